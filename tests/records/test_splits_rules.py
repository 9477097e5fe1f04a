"""Splits by time and as given, rules of a schema, checks of the user's, and where refused rows go."""

import datetime as dt
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.job.failures import FailureClass
from trainers.records.errors import ColumnError, InvalidOption, TooManyBadRows
from trainers.records.frames import frames
from trainers.records.rules import CheckFailed, Rules
from trainers.records.schema import Feature, Schema
from trainers.records.split import Dealer, hash_rows
from trainers.records.splits import SplitRule


def held(manifest, split):
    return [r for shard in manifest.split(split) for r in frames(manifest.folder / shard.file)]


def quarantine(manifest):
    return pq.read_table(manifest.folder / "quarantine.parquet").to_pylist()


# Splits -----------------------------------------------------------------------------------------------------

rows = st.lists(st.tuples(st.integers(0, 50), st.text(max_size=3)), min_size=1, max_size=60)


def table_of(some):
    return pa.RecordBatch.from_arrays(
        [pa.array([a for a, _ in some], pa.int64()), pa.array([b for _, b in some])], names=["a", "b"]
    )


@settings(max_examples=50, deadline=None)
@given(rows, rows, st.sampled_from([(0.2, 0.0), (0.2, 0.1), (0.0, 0.3)]))
def test_a_row_never_moves_when_data_grows(first, more, shares):
    rule = SplitRule(eval=shares[0], test=shares[1])
    deal = Dealer(rule, Schema([Feature("a", "int64"), Feature("b", "string")]))
    before = table_of(first)
    after = table_of([*more, *first, *more])
    was = deal(before, hash_rows(before)).tolist()
    now = deal(after, hash_rows(after)).tolist()
    assert now[len(more) : len(more) + len(first)] == was
    assert set(now) <= set(range(len(rule.splits)))


def test_shares_of_three_splits(run, tmp_path):
    pq.write_table(pa.table({"id": range(4000), "y": [1] * 4000}), tmp_path / "a.parquet")
    two = run(tmp_path / "a.parquet", key="id", eval_fraction=0.2)
    three = run(tmp_path / "a.parquet", key="id", split={"by": "hash", "eval": 0.2, "test": 0.1})
    assert three.counts["eval"] / 4000 == pytest.approx(0.2, abs=0.02)
    assert three.counts["test"] / 4000 == pytest.approx(0.1, abs=0.02)
    assert sorted(held(three, "eval")) == sorted(held(two, "eval"))
    assert set(three.statistics) == {"train", "eval", "test"}


KINDS = {
    "dates": (lambda days: [dt.date(2013, 1, 1) + dt.timedelta(d) for d in days], "2013-02-01", "2013-03-01"),
    "times": (
        lambda days: [dt.datetime(2013, 1, 1) + dt.timedelta(d) for d in days],
        "2013-02-01",
        "2013-03-01T01:00:00+01:00",
    ),
    "numbers": (lambda days: list(days), 31, 59),
}


@pytest.mark.parametrize("kind", KINDS)
def test_by_time(kind, run, tmp_path):
    make, eval_from, test_from = KINDS[kind]
    days = list(range(90))
    pq.write_table(pa.table({"ts": make(days), "y": days}), tmp_path / "a.parquet")
    split = {"by": "time", "column": "ts", "eval_from": eval_from}
    manifest = run(tmp_path / "a.parquet", split=split)
    assert manifest.counts == {"train": 31, "eval": 59}
    manifest = run(tmp_path / "a.parquet", split={**split, "test_from": test_from})
    assert manifest.counts == {"train": 31, "eval": 28, "test": 31}
    assert manifest.statistics["eval"]["y"]["min"] == 31
    assert manifest.statistics["test"]["y"]["min"] == 59
    assert manifest.options["split"]["by"] == "time"


def test_as_given(run, tmp_path):
    where = ["train", "eval", "train", "test", None, "dev"]
    pq.write_table(pa.table({"where": where, "y": range(6)}), tmp_path / "a.parquet")
    split = {"by": "given", "column": "where", "splits": ["train", "eval", "test"]}
    manifest = run(tmp_path / "a.parquet", split=split, quarantine_threshold=0.5)
    assert manifest.counts == {"train": 2, "eval": 1, "test": 1}
    assert [(r["row"], r["reason"]) for r in quarantine(manifest)] == [
        (5, "is missing"),
        (6, "'dev' is none of 'train', 'eval', 'test'"),
    ]
    manifest = run(
        tmp_path / "a.parquet", split={**split, "splits": ["train", "eval"]}, quarantine_threshold=0.9
    )
    assert manifest.counts == {"train": 2, "eval": 1}
    assert not list(manifest.folder.glob("test-*"))


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ("time", "split must be an object"),
        ({"by": "size"}, "split must be an object"),
        ({"by": "hash", "column": "x"}, "no fields but by, eval, test"),
        ({"by": "hash", "eval": 0.6, "test": 0.5}, "leave a share for train"),
        ({"by": "time", "column": "ts"}, "split.eval_from must say"),
        ({"by": "time", "column": "ts", "eval_from": "soon"}, "split.eval_from must be a date"),
        (
            {"by": "time", "column": "ts", "eval_from": "2013-03-01", "test_from": "2013-02-01"},
            "be later than",
        ),
        ({"by": "given", "column": ""}, "split.column must be the name"),
        ({"by": "given", "column": "a", "splits": ["dev"]}, "split.splits must be train and"),
    ],
)
def test_rules_that_are_none(split, match, run, tmp_path):
    pq.write_table(pa.table({"ts": [dt.date(2013, 1, 1)], "y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidOption, match=match):
        run(tmp_path / "a.parquet", split=split)


def test_columns_that_cannot_be_split_by(run, tmp_path):
    pq.write_table(pa.table({"s": ["a"], "y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match="'s' holds string, which can't be split by time"):
        run(tmp_path / "a.parquet", split={"by": "time", "column": "s", "eval_from": "2013-01-01"})
    with pytest.raises(ColumnError, match="'y' holds int64, which can't be compared"):
        run(tmp_path / "a.parquet", split={"by": "time", "column": "y", "eval_from": "2013-01-01"})
    with pytest.raises(ColumnError, match="'y' holds int64, not the names of splits"):
        run(tmp_path / "a.parquet", split={"by": "given", "column": "y"})
    with pytest.raises(ColumnError, match="'ts' isn't in"):
        run(tmp_path / "a.parquet", split={"by": "given", "column": "ts"})


# Rules ------------------------------------------------------------------------------------------------------

BROKEN = [
    (
        Feature("v", "int64", rules={"min": 0, "max": 9}),
        [5, -1, 10, None],
        {1: "-1 is below 0", 2: "10 is above 9"},
    ),
    (Feature("v", "float32", rules={"max": 0.5}), [0.5, 0.75], {1: "0.75 is above 0.5"}),
    (Feature("v", "string", rules={"values": ["a", "b"]}), ["a", "c", None], {1: "'c' is none of 'a', 'b'"}),
    (Feature("v", "int64", rules={"values": [1, 2]}), [1, 3], {1: "3 is none of 1, 2"}),
    (
        Feature("v", "string", rules={"regex": "[A-Z]{3}|x"}),
        ["JFK", "JFKX", "x", "jfk"],
        {1: "'JFKX' doesn't match [A-Z]{3}|x", 3: "'jfk' doesn't match [A-Z]{3}|x"},
    ),
    (Feature("v", "string", rules={"min_length": 2}), ["é", "e"], {1: "'e' is below 2 bytes"}),
    (Feature("v", "int64", (None,), rules={"min_values": 1}), [[1], []], {1: "[] is below 1 values"}),
    (Feature("v", "int64", (None,), rules={"max": 3}), [[1, 9], [], [3], None], {0: "[1, 9] is above 3"}),
    (Feature("v", "string", rules={"unique": True}), ["a", "b", "a", None, None], {2: "'a' is there twice"}),
]


def arrow(feature):
    kind = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string()}[feature.type]
    return pa.large_list(kind) if feature.shape else kind


@pytest.mark.parametrize(("feature", "values", "want"), BROKEN, ids=lambda v: str(getattr(v, "rules", "")))
def test_rules(feature, values, want):
    batch = pa.RecordBatch.from_arrays([pa.array(values, arrow(feature))], names=["v"])
    found = Rules(Schema([feature])).refuse(batch)
    assert found == {row: ("v", reason) for row, reason in want.items()}
    # As a slice of something larger, too.
    longer = pa.RecordBatch.from_arrays([pa.array([*values[:1], *values], arrow(feature))], names=["v"])
    assert Rules(Schema([feature])).refuse(longer.slice(1)).keys() == want.keys()


def test_unique_over_batches_against_a_set():
    feature = Feature("v", "int64", rules={"unique": True})
    rules, seen = Rules(Schema([feature])), set()
    rng = np.random.default_rng(1)
    for _ in range(60):
        values = rng.integers(0, 3000, 100)
        twice = [i for i, v in enumerate(values.tolist()) if v in seen or seen.add(v)]
        assert sorted(rules.refuse(pa.RecordBatch.from_pydict({"v": values}))) == twice


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rules": {"least": 1}}, "must be some of min, max"),
        ({"rules": {"regex": "a"}}, "must fit int64"),
        ({"rules": {"min": "1"}}, "must be a number"),
        ({"type": "string", "rules": {"regex": "("}}, "must be a regular expression"),
        ({"type": "string", "rules": {"values": []}}, "a list that isn't empty"),
        ({"rules": {"unique": 1}}, "must be true or false"),
        ({"rules": [1]}, "must be an object"),
        ({"drift": {"kl": {}}}, "must be some of js, linf"),
        ({"drift": {"js": {"warn": -1}}}, "must be a number of 0 or more"),
        ({"drift": {"js": 1}}, 'an object of "warn" and "fail"'),
        ({"default": 1.5}, "default of 'v' must be int64"),
        ({"type": "bytes", "default": "a"}, "must not be set for bytes"),
    ],
)
def test_rules_and_thresholds_that_are_none(fields, match):
    with pytest.raises(ValueError, match=match):
        Feature(**{"name": "v", "type": "int64", **fields})


def test_rules_of_a_given_schema_fill_the_quarantine(run, tmp_path, table):
    path = tmp_path / "a.parquet"
    pq.write_table(table(100), path)
    schema = json.loads((run(path).folder / "schema.json").read_text())
    rules = {"id": {"unique": True}, "x": {"max": 14.0}, "color": {"values": ["red", "green"]}}
    for feature in schema["features"]:
        if feature["name"] in rules:
            feature["rules"] = rules[feature["name"]]
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    manifest = run(path, schema=tmp_path / "schema.json", quarantine_threshold=0.5)
    found = quarantine(manifest)
    assert {r["row"] for r in found} == {
        i + 1 for i in range(100) if i % 3 == 2 or (i % 10 != 3 and i / 7 > 14)
    }
    assert {r["reason"] for r in found if r["column"] == "color"} == {"'blue' is none of 'red', 'green'"}
    assert manifest.quarantined + sum(manifest.counts.values()) == 100
    with pytest.raises(TooManyBadRows, match=r"worst: color 33 .*'blue' is none of.*; x 1 ") as e:
        run(path, schema=tmp_path / "schema.json", name="strict")
    assert e.value.failure_class is FailureClass.DATA


# Checks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checks(tmp_path, monkeypatch):
    (tmp_path / "my_checks.py").write_text(
        "import numpy as np, pyarrow as pa, pyarrow.compute as pc\n"
        "def even(batch):\n    return pc.equal(pc.bit_wise_and(batch['id'], 1), 0)\n"
        "def reasons(batch):\n"
        "    return pc.if_else(pc.less(batch['id'], 3), pa.scalar('is too early'), pa.scalar(None, pa.string()))\n"
        "def mask(batch):\n    return np.ones(batch.num_rows, bool)\n"
        "def short(batch):\n    return pa.array([True])\n"
        "def raises(batch):\n    return batch['nowhere']\n"
        "def number(batch):\n    return batch['id']\n"
        "nothing = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_checks", None)


def test_the_users_checks(run, table, tmp_path, checks):
    pq.write_table(table(20), tmp_path / "a.parquet")
    names = ["my_checks:reasons", "my_checks:even", "my_checks:mask"]
    manifest = run(tmp_path / "a.parquet", checks=names, quarantine_threshold=0.9, batch_rows=7)
    assert [(r["row"], r["column"], r["reason"]) for r in quarantine(manifest)] == [
        *((i, "", "reasons: is too early") for i in (1, 2, 3)),
        *((i + 1, "", "even refuses it") for i in range(3, 20, 2)),
    ]
    assert sum(manifest.counts.values()) == 8
    # Another check, another dataset: its code is part of what the dataset is made from.
    source = (tmp_path / "my_checks.py").read_text()
    (tmp_path / "my_checks.py").write_text(source + "# more\n")
    again = run(tmp_path / "a.parquet", checks=names, quarantine_threshold=0.9)
    assert again.fingerprint != manifest.fingerprint
    assert again.shards == manifest.shards


@pytest.mark.parametrize(
    ("check", "error", "match"),
    [
        ("my_checks:short", CheckFailed, "gave 1 values for 20 rows"),
        ("my_checks:raises", CheckFailed, "raised KeyError"),
        ("my_checks:number", CheckFailed, "gave int64, not bool or string"),
        ("my_checks:nothing", InvalidOption, "be a function"),
        ("my_checks:nowhere", InvalidOption, "can be imported"),
        ("no_module_of_this_name:f", InvalidOption, "can be imported"),
        ("my_checks", InvalidOption, '"module:function"'),
        ({"a": 1}, InvalidOption, '"module:function"'),
        ("os;x:system", InvalidOption, '"module:function"'),
    ],
)
def test_checks_that_are_none(check, error, match, run, table, tmp_path, checks):
    pq.write_table(table(20), tmp_path / "a.parquet")
    with pytest.raises(error, match=match) as e:
        run(tmp_path / "a.parquet", checks=check)
    wants = FailureClass.USER if error is CheckFailed else FailureClass.CONFIG
    assert e.value.failure_class is wants


def test_without_statistics(run, table, tmp_path):
    pq.write_table(table(50), tmp_path / "a.parquet")
    manifest = run(tmp_path / "a.parquet", statistics=False)
    assert manifest.schema()["x"].presence == "optional"
    assert manifest.schema()["x"].domain is None
    assert set(manifest.statistics["train"]["x"]) == {"count", "missing"}
    assert pc.sum(pa.array([len(held(manifest, s)) for s in ("train", "eval")])).as_py() == 50
