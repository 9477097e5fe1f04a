"""Slices: how people write them, which examples they hold, and what an evaluation says of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers import evaluate
from trainers.evaluation.slices import Bins, Cross, Quantiles, Values, parse, texts
from trainers.evaluation.slicing import MOST_GROUPS, Slicer
from trainers.job.errors import InvalidSpec

STATISTICS = {"distance": {"quantiles": [[0.0, 0.0], [0.25, 10.0], [0.5, 20.0], [0.75, 30.0], [1.0, 99.0]]}}

TEXTS = [
    (Values("carrier"), "carrier"),
    (Values("carrier", top=5), "carrier(5)"),
    (Bins("distance", [500, 1000.5]), "distance[500,1000.5]"),
    (Quantiles("dep_delay", 4), "dep_delay[q4]"),
    (Cross("carrier", Bins("distance", [500])), "carrier*distance[500]"),
    (Cross("a", "b", Quantiles("c", 2)), "a*b*c[q2]"),
]


@pytest.mark.parametrize(("spec", "text"), TEXTS)
def test_a_slice_is_its_text(spec, text):
    assert str(spec) == text
    assert parse(text) == parse(spec) == spec


REFUSED = [
    "",
    "a(",
    "a(0)",
    "a[]",
    "a[x]",
    "a[2,1]",
    "a[1,1]",
    "a[q1]",
    "a[nan]",
    "a*a",
    "a*b*c*d",
    "*",
    "a[1](2)",
    7,
]


@pytest.mark.parametrize("text", REFUSED)
def test_a_text_that_is_no_slice(text):
    with pytest.raises(InvalidSpec) as info:
        parse(text)
    assert info.value.field == "slices"


def test_lists_of_them():
    assert texts(["a", Values("a"), Bins("b", [1])]) == ["a", "b[1]"]
    for wrong in ("a", 7, [f"f{n}" for n in range(21)]):
        with pytest.raises(InvalidSpec):
            texts(wrong)


def groups(specs, *batches, statistics=STATISTICS):
    slicer = Slicer([parse(spec) for spec in specs], statistics)
    for batch in batches:
        slicer.update(batch)
    return slicer, {group.name: group.rows.tolist() for group in slicer.groups()}


def test_values_the_most_frequent_first_over_batches():
    first = {"carrier": tf.constant(["UA", "AA", "UA"])}
    second = {"carrier": tf.constant([["B6"], ["UA"], [""]])}
    _, found = groups(["carrier", "carrier(1)"], first, second)
    assert found["carrier=UA"] == [0, 2, 4]
    assert found["carrier=(missing)"] == [5]
    assert list(found) == ["carrier=UA", "carrier=(missing)", "carrier=AA", "carrier=B6", "carrier=(other)"]
    assert found["carrier=(other)"] == [1, 3, 5]


def test_bins_hold_their_lower_edge():
    batch = {"distance": tf.constant([0.0, 9.9, 10.0, 25.0, 30.0, float("nan")])}
    _, found = groups(["distance[10,30]"], batch)
    assert found == {
        "distance<10": [0, 1],
        "10<=distance<30": [2, 3],
        "distance>=30": [4],
        "distance=(missing)": [5],
    }
    _, found = groups(["distance[q4]"], batch)
    assert list(found) == [
        "distance<10",
        "10<=distance<20",
        "20<=distance<30",
        "distance>=30",
        "distance=(missing)",
    ]
    assert groups(["distance"], batch)[1] == found, "a float has quantiles by itself"


def test_a_cross_has_its_largest_groups():
    batch = {"a": tf.constant(["x", "y", "x", "x"]), "n": tf.constant([1, 2, 1, 5])}
    _, found = groups(["a*n[3]"], batch)
    assert found == {"a=x & n<3": [0, 2], "a=y & n<3": [1], "a=x & n>=3": [3]}
    many = {"a": tf.range(400) % 20, "b": tf.range(400) // 20}
    slicer, found = groups(["a*b"], many)
    assert len(found) == MOST_GROUPS
    assert slicer.not_shown == {"a*b": 400 - MOST_GROUPS}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["p", "q", "r"]), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from(["s", "s(1)", "s(2)", "n[1,2]", "s*n[1]", "s(1)*n[2]"]),
)
def test_each_example_is_in_one_group(words, size, spec):
    batches = [
        {"s": tf.constant(words[i : i + size]), "n": tf.range(len(words[i : i + size])) % 4}
        for i in range(0, len(words), size)
    ]
    _, found = groups([spec], *batches)
    assert sorted(row for rows in found.values() for row in rows) == list(range(len(words)))


WRONG = [
    ("pixels", "carrier, image"),
    ("image", "one value an example"),
    ("carrier[1]", "bins of numbers only"),
    ("carrier[q2]", "statistics only"),
]


@pytest.mark.parametrize(("spec", "words"), WRONG)
def test_a_feature_that_has_no_slices(spec, words):
    batch = {"carrier": tf.constant(["UA", "AA"]), "image": tf.zeros((2, 8, 8, 1))}
    with pytest.raises(InvalidSpec, match=words):
        groups([spec], batch)


def test_more_values_than_are_counted(monkeypatch):
    monkeypatch.setattr("trainers.evaluation.slicing._MOST_VALUES", 3)
    _, found = groups(["a"], {"a": tf.range(5)})
    assert found["a=(other)"] == [3, 4]


# ---- in an evaluation


def test_a_regressions_slices(houses_job):
    slices = ["city", "rooms[2,3]", "city*rooms[2]"]
    result = evaluate.main({"job": str(houses_job), "slices": slices, "slice_min_examples": 12})
    document = json.loads(Path(result["evaluation"]).read_text())
    rows = {row["slice"]: row for row in document["slices"]}
    assert {"city=Oslo", "city=Bergen", "rooms<2", "2<=rooms<3", "rooms>=3"} < set(rows)
    assert {row["of"] for row in document["slices"]} == set(slices)
    assert sum(row["examples"] for row in document["slices"]) == 3 * document["examples"]
    for row in document["slices"]:
        assert row["metrics"]["mae"] == pytest.approx(0.5, abs=1e-5)
        assert row["champion"] is None
        assert row["enough_examples"] == (row["examples"] >= 12)
    assert {row["enough_examples"] for row in document["slices"]} == {True, False}
    assert rows["rooms<2"]["metrics"]["r2"] is None, "all labels are the same"
    folder = houses_job / "evaluation"
    assert {path.name for path in folder.iterdir()} == {
        "report.html",
        "residuals.png",
        "predicted-actual.png",
        "slices.png",
    }
    page = (folder / "report.html").read_text()
    assert "2&lt;=rooms&lt;3" in page
    assert "2<=rooms<3" not in page


def test_the_champions_slices_are_of_the_same_examples(houses_job, tmp_path):
    class Off(tf.Module):
        """Right for all rooms but the largest."""

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32, name="rooms")])
        def serve(self, rooms):
            return {"predictions": (rooms + tf.where(rooms > 3, 5.0, 1.5))[:, None]}

    off = Off()
    tf.saved_model.save(off, str(tmp_path / "champion"), signatures=off.serve)
    champion = {"version": 4, "path": str(tmp_path / "champion")}
    spec = {"job": str(houses_job), "champion": champion, "slices": ["rooms[2,3]"]}
    document = json.loads(Path(evaluate.main(spec)["evaluation"]).read_text())
    found = {row["slice"]: row["champion"] for row in document["slices"]}
    assert found["rooms<2"]["metrics"]["mae"] == pytest.approx(0, abs=1e-5)
    assert found["rooms>=3"]["metrics"]["mae"] == pytest.approx(3.5, abs=1e-5)
    assert found["rooms<2"]["difference"]["mae"]["value"] == pytest.approx(0.5, abs=1e-5)
    assert found["rooms>=3"]["difference"]["mae"]["high"] < -2.9


def test_slices_of_what_is_not_there_are_the_forms_mistake(houses_job):
    with pytest.raises(InvalidSpec, match=r"name features of the batches: .*city"):
        evaluate.main({"job": str(houses_job), "slices": ["colour"]})


def test_a_report_that_can_not_be_drawn_stops_nothing(houses_job, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("no ink")

    monkeypatch.setattr("trainers.evaluation.report.draw", broken)
    result = evaluate.main({"job": str(houses_job)})
    assert result["report"] is None
    assert result["metrics"]["mae"] > 0
    assert "no ink" in caplog.text


def test_names_of_the_data_run_nothing_in_the_report():
    from trainers.evaluation.canvas import Canvas
    from trainers.evaluation.report import render

    evil = "<script>alert(1)</script>"
    row = {"slice": evil, "of": "c", "examples": 3, "enough_examples": False, "metrics": {"mae": 1.0}}
    document = {
        "trainer": evil, "examples": 3, "split": "eval", "step": 1, "records": {"digest": evil},
        "metrics": {evil: 1.0, "mae": 1.0}, "intervals": {}, "slice_min_examples": 30, "slices_not_shown": {evil: 2},
        "slices": [{**row, "intervals": {}, "champion": None}],
        "per_class": [{"class": evil, "examples": 3, "accuracy": 1.0, "precision": None}],
        "champion": {"version": evil, "error": evil},
    }  # fmt: skip
    canvas = Canvas(100, 50, evil)
    canvas.text(1, 20, evil)
    page = render(document, {"plot": canvas})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6
    assert "<script" not in canvas.svg()
    assert canvas.svg().count("&lt;script&gt;") == 2
    assert "http" not in page.replace("http-equiv", "")
    assert canvas.png().startswith(b"\x89PNG")


def test_a_thousand_examples_keep_few_bytes():
    from trainers.evaluation.scoring import Scorer
    from trainers.task import CLASSIFICATION, Task

    def bytes_of(values):
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    scorer = Scorer(
        lambda f: f["x"], Task(CLASSIFICATION), tf.keras.losses.SparseCategoricalCrossentropy(True)
    )
    scorer.update({"x": tf.random.normal((1000, 12))}, tf.zeros(1000, tf.int64))
    assert bytes_of(vars(scorer.finish()).values()) == 28 * 1000
