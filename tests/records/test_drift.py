"""Drift against exact computations and TFDV, its verdicts, its place beside the manifest, and the report."""

import dataclasses
import html.parser
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import tfdv_oracle
from tests.records.test_statistics import of_oracle
from trainers.job.failures import FailureClass, exit_code_of
from trainers.records.drift import FAIL, PASS, UNKNOWN, WARN, Drift, DriftFailed, compare, jensen_shannon
from trainers.records.errors import DatasetMissing, InvalidOption
from trainers.records.manifest import Manifest
from trainers.records.quality import main
from trainers.records.schema import Feature, Schema
from trainers.records.spans import record_span
from trainers.records.statistics import Statistics


def statistics(values, kind="float32"):
    schema = Schema([Feature("v", kind, presence="optional")])
    found = Statistics(schema)
    arrow = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.string()}[kind]
    found.add(pa.RecordBatch.from_arrays([pa.array(values, arrow)], names=["v"]))
    return found, schema


def measured(old, new, kind="float32", **fields):
    before, schema = statistics(old, kind)
    after, _ = statistics(new, kind)
    schema = Schema([dataclasses.replace(schema["v"], **fields)])
    return {m.measure: m for m in compare(before, after, schema).measures}


# Measures ---------------------------------------------------------------------------------------------------


def test_divergence_of_two_normals_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    x = np.linspace(-12, 12, 200_001)
    for shift in (0.0, 0.5, 1.0, 3.0):
        p, q = (np.exp(-((x - m) ** 2) / 2) for m in (0.0, shift))
        exact = jensen_shannon(p / p.sum(), q / q.sum())
        found = measured(rng.standard_normal(50_000), rng.standard_normal(50_000) + shift)["js"].value
        assert found == pytest.approx(exact, abs=0.01)  # 20 bins lose a little
    assert measured(np.zeros(100), np.ones(100))["js"].value == 1.0


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=100, max_size=150),
    st.lists(st.integers(0, 5), min_size=100, max_size=150),
)
def test_few_values_are_compared_each(old, new):
    p, q = (np.bincount(v, minlength=6) / len(v) for v in (old, new))
    assert measured(old, new, "int64")["js"].value == pytest.approx(jensen_shannon(p, q), abs=1e-6)
    assert measured(new, old, "int64")["js"].value == measured(old, new, "int64")["js"].value
    texts = [[str(v) for v in values] for values in (old, new)]
    found = measured(*texts, "string")
    assert found["linf"].value == pytest.approx(np.abs(p - q).max(), abs=1e-6)
    assert found["new_values"].value == pytest.approx(q[p == 0].sum(), abs=1e-6)
    assert found["vanished_values"].value == pytest.approx(p[q == 0].sum(), abs=1e-6)


def test_chance_alone_is_no_drift():
    rng = np.random.default_rng(5)
    for n in (200, 1000, 20_000):
        for make in (
            rng.standard_normal,
            lambda n: rng.integers(0, 4, n),
            lambda n: np.exp(4 * rng.standard_normal(n)),
        ):
            found = measured(make(n), make(n))
            assert found["js"].verdict == PASS, n


def test_an_outlier_hides_no_drift():
    rng = np.random.default_rng(2)
    old, new = rng.standard_normal(5000), rng.standard_normal(5000) + 1
    new[0] = 1e30
    assert measured(old, new)["js"].value == pytest.approx(measured(old, new[1:])["js"].value, abs=0.002)
    years = [2013 + i % 3 for i in range(3000)]
    assert measured(years, [y + 1 for y in years], "int64")["js"].value > 0.3


def test_missing_values_and_ranges():
    found = measured([1.0, 2.0] * 100, [None, 3.0, float("nan"), 1.5] * 100)
    assert found["missing"].value == 0.5
    assert found["missing"].verdict == WARN
    assert found["out_of_range"].value == 0.5
    assert "3, before 1 to 2" in found["out_of_range"].words


def test_the_same_as_tensorflow_data_validation():
    oracle = json.loads(tfdv_oracle.ORACLE.read_text())
    before, after = of_oracle(False), of_oracle(True)
    schema = Schema([f.feature for f in before.features.values()])
    found = compare(before, after, schema)
    mine = {(m.feature, m.measure): m.value for m in found.measures}
    assert mine["color", "linf"] == pytest.approx(oracle["drift"]["color"], abs=1e-6)
    assert mine["color", "new_values"] == pytest.approx(0.1, abs=0.01)
    assert "black" in oracle["anomalies"]["color"]
    for name in ("heavy", "same", "count"):
        assert mine[name, "js"] == pytest.approx(oracle["drift"][name], abs=1e-6)
    # TFDV's is "approximate", over ten bins of one width; both see it, ours by the exact divergence.
    x = np.linspace(-40, 40, 400_001)
    p, q = (np.exp(-(x - m)) / (1 + np.exp(-(x - m))) ** 2 for m in (0, 0.75))
    assert mine["bell", "js"] == pytest.approx(jensen_shannon(p / p.sum(), q / q.sum()), abs=0.005)
    assert oracle["drift"]["bell"] > 0.01


# Verdicts ---------------------------------------------------------------------------------------------------


def test_thresholds_of_a_feature_win_over_given_ones_over_defaults():
    old, new = ["a"] * 80 + ["b"] * 20, ["a"] * 60 + ["b"] * 40
    before, schema = statistics(old, "string")
    after, _ = statistics(new, "string")

    def verdict(own=None, given=None):
        feature = dataclasses.replace(schema["v"], drift=own)
        (found,) = (
            m
            for m in compare(before, after, Schema([feature]), thresholds=given).measures
            if m.measure == "linf"
        )
        return found.verdict

    assert verdict() == WARN
    assert verdict(given={"linf": {"fail": 0.15}}) == FAIL
    assert verdict(own={"linf": {"fail": 0.3, "warn": None}}, given={"linf": {"fail": 0.15}}) == PASS
    assert verdict(own={"linf": {"fail": 0.1}}) == FAIL
    with pytest.raises(ValueError, match="thresholds must be some of"):
        verdict(given={"kl": {}})
    with pytest.raises(ValueError, match="must be a number of 0 or more"):
        verdict(given={"js": {"warn": "much"}})


def test_too_few_rows_are_unknown_not_passed():
    before, schema = statistics([1.0] * 500)
    after, _ = statistics([9.0] * 99)
    found = compare(before, after, schema)
    assert found.verdict == UNKNOWN
    assert found.measures[0].value is None
    assert "99 rows are too few to tell" in str(found)
    texts = [f"user-{i}" for i in range(10_001)]
    many = measured(texts, texts, "string")
    assert (many["linf"].verdict, "counts are bounds" in many["linf"].words) == (PASS, True)
    for name in ("new_values", "vanished_values"):
        assert (many[name].verdict, "too many different values" in many[name].words) == (UNKNOWN, True)


def test_shares_of_frequent_values_move_also_among_very_many():
    rng = np.random.default_rng(2)
    tail = [f"id-{i}" for i in rng.integers(0, 30_000, 40_000)]
    before = [*tail, *["a"] * 8_000, *["b"] * 2_000]
    after = [*tail, *["a"] * 1_000, *["b"] * 2_000, *["c"] * 7_000]
    moved = measured(before, after, "string")["linf"]
    assert moved.verdict == WARN
    assert (
        0.14 - 0.003 < moved.value <= 0.16
    )  # the share of "a" went from 16 % to 2 %, that of "c" from 0 to 14 %
    assert moved.value <= 0.14
    # Where all values of one side are known, what the other has beside is new.
    known = measured(["a", "b"] * 500, after, "string")
    assert known["new_values"].value >= 0.13
    assert known["vanished_values"].verdict == UNKNOWN


def test_a_comparison_survives_json():
    before, schema = statistics([1.0, None] * 200)
    found = compare(before, statistics([2.0] * 200)[0], schema)
    assert Drift.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.verdict == WARN


# Beside the manifest ----------------------------------------------------------------------------------------


@pytest.fixture
def months(tmp_path, run):
    """Prepares a span of which the share of one colour and the numbers can be moved."""

    def make(span, shift=0.0, colors=("red", "green"), **options):
        path = tmp_path / f"{span}-{shift}-{len(colors)}.parquet"
        rng = np.random.default_rng(int(span[-2:]))
        data = {
            "x": rng.standard_normal(1000) + shift,
            "color": [colors[i % len(colors)] for i in range(1000)],
        }
        pq.write_table(pa.table({**data, "y": [i % 2 for i in range(1000)]}), path)
        manifest = run(path, span=span, **options)
        record_span(manifest)
        return manifest

    return make


def schema_with(manifest, tmp_path, **drift):
    schema = json.loads((manifest.folder / "schema.json").read_text())
    for feature in schema["features"]:
        feature.pop("domain", None)
        if feature["name"] in drift:
            feature["drift"] = drift[feature["name"]]
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    return path


def test_a_span_is_compared_with_the_one_before(months, tmp_path, said):
    first = months("2013-01", baseline="previous")
    assert not (first.folder / "drift.json").exists()
    same = months("2013-02", baseline="previous")
    assert json.loads((same.folder / "drift.json").read_text())["verdict"] == PASS
    moved = months("2013-03", shift=2.0, baseline="previous")
    drift = json.loads((moved.folder / "drift.json").read_text())
    assert (drift["verdict"], drift["digest"]) == (WARN, same.digest)
    assert any(line.startswith("drift: warn    x: Jensen-Shannon divergence") for line in said)
    # Another baseline changes no record and no digest.
    again = months("2013-03", shift=2.0, baseline=first.path)
    assert again.digest == moved.digest
    assert json.loads((moved.folder / "drift.json").read_text())["digest"] == first.digest


def test_drift_fails_only_where_a_threshold_says_so(months, tmp_path):
    first = months("2013-01")
    schema = schema_with(first, tmp_path, x={"js": {"fail": 0.3}})
    with pytest.raises(DriftFailed, match=r"drifted from test 2013-01: x: Jensen-Shannon.*above 0.3") as e:
        months("2013-02", shift=3.0, baseline="previous", schema=schema)
    assert e.value.failure_class is FailureClass.DATA
    (folder,) = (p.parent for p in tmp_path.glob("out/*/drift.json"))
    assert sorted(p.name for p in folder.iterdir()) == ["drift.json", "report.html"]
    with pytest.raises(DatasetMissing):
        Manifest.load(folder)
    # It isn't forgotten for being there already: prepared without a baseline, judged when there is one.
    done = months("2013-02", shift=3.0, schema=schema)
    with pytest.raises(DriftFailed):
        months("2013-02", shift=3.0, baseline="previous", schema=schema)
    with pytest.raises(DriftFailed):
        months("2013-02", shift=3.0, baseline="previous", schema=schema)
    assert Manifest.load(done.folder).digest == done.digest


def test_baselines_that_are_none(months, run, tmp_path):
    with pytest.raises(DatasetMissing):
        months("2013-01", baseline=tmp_path / "nowhere")
    with pytest.raises(InvalidOption, match="baseline must be a manifest where there is no span"):
        run(tmp_path / "a.parquet", baseline="previous")


def test_the_command_line(months, tmp_path, capsys):
    first, moved = months("2013-01"), months("2013-02", shift=2.0)
    assert main([str(first.path), str(moved.folder)]) == 0
    assert "warn    x: Jensen-Shannon divergence" in capsys.readouterr().out
    # What serving saw: rows without a label, one column of text.
    served = pa.table({"color": ["red"] * 150 + ["pink"] * 50, "x": [str(v) for v in range(200)]})
    pq.write_table(served, tmp_path / "served.parquet")
    (tmp_path / "limits.json").write_text('{"new_values": {"fail": 0.2}}')
    code = main(
        [
            str(first.path),
            str(tmp_path / "served.parquet"),
            "--json",
            "--thresholds",
            str(tmp_path / "limits.json"),
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"]) == (exit_code_of(FailureClass.DATA), FAIL)
    by = {(m["feature"], m["measure"]): m for m in found["measures"]}
    assert by["color", "new_values"]["value"] == 0.25
    assert ("y", "js") not in by
    assert main([str(tmp_path / "served.parquet"), str(tmp_path / "served.parquet")]) != 0
    assert "neither side is a dataset" in capsys.readouterr().err


# The report -------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Tags and text of a page; unclosed or wrongly closed elements of SVG and table sections are told."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


EVIL = [
    "<script>alert(1)</script>",
    "'onload='alert(1)",
    '"><img src=x onerror=alert(1)>',
    "</style>",
    "\x00\u202e",
]


def test_the_report_shows_all_and_runs_nothing(run, tmp_path):
    rng = np.random.default_rng(0)
    data = {
        "text": [EVIL[i % len(EVIL)] for i in range(500)],
        EVIL[2]: rng.standard_normal(500),
        "x' onmouseover='alert(1)": [i % 3 for i in range(500)],
        "b": pa.array([b"ab"] * 500),
        "l": pa.array([[i % 5] * (i % 3) for i in range(500)], pa.list_(pa.int64())),
        "nothing": pa.nulls(500, pa.float32()),
        "y": [i % 2 for i in range(500)],
    }
    pq.write_table(pa.table(data), tmp_path / "a.parquet")
    first = run(tmp_path / "a.parquet")
    pq.write_table(pa.table({**data, "y": [2] * 500}), tmp_path / "b.parquet")
    text = (run(tmp_path / "b.parquet", baseline=first.path).folder / "report.html").read_text()
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & set(page.tags)
    assert not [
        name for name, _ in page.attributes if name.startswith("on") or name in ("href", "src", "style")
    ]
    assert "default-src 'none'" in text
    shown = " ".join(page.words)
    for name in ("text", "nothing", EVIL[0], EVIL[2], "divergence"):
        assert name in shown
    assert "\x00" not in text
    assert "\u202e" not in text
    assert page.tags.count("article") == 7
    assert (first.folder / "report.html").read_text().count(
        "<h2>"
    ) == 2  # features, schema; neither drift nor quarantine


def test_the_report_is_bounded(run, tmp_path):
    columns = {f"c{i}": [("v" * 500) + str(j) for j in range(20)] for i in range(310)}
    pq.write_table(pa.table({**columns, "y": [1] * 20}), tmp_path / "a.parquet")
    text = (run(tmp_path / "a.parquet").folder / "report.html").read_text()
    assert len(text) < 4_000_000
    assert "11 more features are in the manifest only" in text
    assert "v" * 200 not in text
    assert text.count("<article") == 300
