"""What a change of schema means, and older datasets read with a newer schema."""

import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.job.failures import FailureClass
from trainers.records.evolution import BREAKING, COMPATIBLE, DEFAULTS, SchemaBreaks, compare
from trainers.records.read import RecordsDataset
from trainers.records.schema import Feature, Schema

OLD = Feature("v", "int64", domain={"min": 0, "max": 9})


def change(**fields):
    return dataclasses.replace(OLD, **fields)


CHANGES = [
    ([OLD], [OLD], COMPATIBLE, ""),
    ([OLD], [change(domain={"min": 0, "max": 20})], COMPATIBLE, "v ranges from 0 to 20, before from 0 to 9"),
    ([OLD], [change(type="float32")], COMPATIBLE, "v goes from int64 to float32"),
    ([OLD], [change(presence="optional")], COMPATIBLE, "v may be missing"),
    ([OLD, Feature("w", "string")], [OLD], COMPATIBLE, "w is no longer there"),
    ([OLD], [OLD, Feature("w", "string", presence="optional")], DEFAULTS, "w is new; it is missing in older"),
    ([OLD], [OLD, Feature("w", "string", default="?")], DEFAULTS, "older rows get its default, '?'"),
    ([OLD], [OLD, Feature("w", "string")], BREAKING, "w is new and required"),
    ([change(presence="optional")], [OLD], BREAKING, "v is required now, and has no default"),
    (
        [change(presence="optional")],
        [change(default=3)],
        DEFAULTS,
        "older rows without it get its default, 3",
    ),
    ([change(type="float32")], [OLD], BREAKING, "v goes from float32 to int64"),
    ([OLD], [change(type="string", domain=None)], BREAKING, "v goes from int64 to string"),
    ([OLD], [change(shape=(2,))], BREAKING, "v goes from shape [] to [2]"),
    (
        [Feature("s", "string", domain={"values": ["a", "b"]})],
        [Feature("s", "string", domain={"values": ["b", "c"]})],
        COMPATIBLE,
        "s's domain no longer has a",
    ),
    (
        [change(domain={"names": ["cat", "dog"]})],
        [change(domain={"names": ["cat", "dog", "owl"]})],
        COMPATIBLE,
        "v has more classes: owl",
    ),
    (
        [change(domain={"names": ["cat", "dog"]})],
        [change(domain={"names": ["dog", "cat"]})],
        BREAKING,
        "indices",
    ),
]


@pytest.mark.parametrize(
    ("older", "newer", "verdict", "words"), CHANGES, ids=[c[3] or "same" for c in CHANGES]
)
def test_verdicts(older, newer, verdict, words):
    found = compare(Schema(older), Schema(newer))
    assert found.verdict == verdict
    assert words in str(found)
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == verdict


def test_fields_of_today_change_no_older_schemas_digest():
    schema = Schema([OLD])
    assert set(schema.to_dict()["features"][0]) == {"name", "type", "shape", "encoding", "presence", "domain"}
    full = Schema([change(default=1, rules={"min": 0}, drift={"js": {"fail": 0.5}})])
    assert Schema.from_dict(json.loads(json.dumps(full.to_dict()))) == full
    assert full.digest != schema.digest


def test_an_older_dataset_is_read_with_a_newer_schema(run, tmp_path):
    data = {"n": pa.array([1, None, 3]), "m": [4, 5, 6], "gone": ["a", "b", "c"], "y": [0, 1, 0]}
    pq.write_table(pa.table(data), tmp_path / "a.parquet")
    manifest = run(tmp_path / "a.parquet", eval_fraction=0.0, shards=1)
    newer = Schema(
        [
            Feature("n", "float32", presence="optional"),
            Feature("m", "float32"),
            Feature("y", "int64"),
            Feature("color", "string", default="none"),
            Feature("size", "float32", (2,), presence="optional", default=0.5),
            Feature("tags", "string", (None,), presence="optional"),
        ]
    )
    (tmp_path / "newer.json").write_text(json.dumps(newer.to_dict()))
    records = RecordsDataset.open(manifest.path, schema=tmp_path / "newer.json")
    (batch,) = records.dataset("train", 10)
    assert set(batch) == set(newer.names)
    found = {
        name: tensor.to_list() if name == "tags" else tensor.numpy().tolist()
        for name, tensor in batch.items()
    }
    order = sorted(range(3), key=lambda i: found["m"][i])
    assert [found["m"][i] for i in order] == [4.0, 5.0, 6.0]
    assert [repr(found["n"][i]) for i in order] == ["1.0", "nan", "3.0"]
    assert found["color"] == [b"none"] * 3
    assert found["size"] == [[0.5, 0.5]] * 3
    assert found["tags"] == [[], [], []]
    with pytest.raises(SchemaBreaks, match=r"the newer schema breaks.*m goes from int64 to string") as e:
        RecordsDataset.open(manifest.path, schema=Schema([Feature("m", "string")]))
    assert e.value.failure_class is FailureClass.DATA


def test_a_missing_value_reads_as_its_default(run, tmp_path, table):
    pq.write_table(table(20), tmp_path / "a.parquet")
    manifest = run(tmp_path / "a.parquet", eval_fraction=0.0, shards=1)
    schema = manifest.schema()
    schema = schema.replace([dataclasses.replace(schema["x"], default=-7.0)])
    (batch,) = RecordsDataset.open(manifest.path, schema=schema).dataset("train", 20)
    assert sorted(batch["x"].numpy().tolist())[:3] == [-7.0, -7.0, 0.0]


@pytest.mark.parametrize("zone", [None, ["a", None]], ids=["without the column", "with some"])
def test_older_data_is_prepared_with_the_default_of_a_column_that_was_added(zone, run, tmp_path):
    older = {"x": [1.0, 2.0], "y": [0, 1]}
    pq.write_table(pa.table(older if zone is None else {**older, "zone": zone}), tmp_path / "2012.parquet")
    schema = Schema((Feature("x", "float32"), Feature("y", "int64"), Feature("zone", "string", default="?")))
    (tmp_path / "schema.json").write_text(json.dumps(schema.to_dict()))
    manifest = run(tmp_path / "2012.parquet", schema=tmp_path / "schema.json", eval_fraction=0.0)
    assert manifest.quarantined == 0
    assert manifest.schema()["zone"].presence == "required"
    (batch,) = RecordsDataset.open(manifest.path).dataset("train", 4)
    assert sorted(batch["zone"].numpy().tolist()) == ([b"?", b"?"] if zone is None else [b"?", b"a"])
