"""Tables of all formats: types, splits, schemas, statistics."""

import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.records.published import quarantine, records, write
from trainers.records.errors import (
    ColumnError,
)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_tables(kind, run, table, tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    for part in range(2):
        write(folder / f"{part}.{kind}", table(100, part * 100), kind)
    manifest = run(folder, key="id", shards=3, batch_rows=17)
    assert sum(manifest.counts.values()) == 200
    assert len(manifest.shards) == 6
    assert manifest.quarantined == 0
    schema = manifest.schema()
    assert [schema[n].type for n in ("id", "x", "color", "y")] == ["int64", "float32", "string", "int64"]
    assert schema["x"].presence == "optional"
    assert schema["id"].presence == "required"
    assert schema["id"].domain == {"min": 0, "max": 199}
    assert schema["color"].domain == {"values": ["blue", "green", "red"]}
    if kind != "csv":
        assert schema["tags"].ragged
    rows = sum(s["x"]["count"] for s in manifest.statistics.values())
    missing = sum(s["x"]["missing"] for s in manifest.statistics.values())
    assert (rows, missing) == (200, 20)
    x = manifest.statistics["train"]["x"]
    assert 0 <= x["min"] < x["mean"] < x["max"]
    assert x["std"] > 0
    top = dict(manifest.statistics["train"]["color"]["top"])
    assert sum(top.values()) == manifest.counts["train"]
    # The cut into batches has no influence on what is written.
    again = run(folder, key="id", shards=3, batch_rows=1000, name="again")
    assert again.digest == manifest.digest


def test_the_same_rows_split_the_same_way_in_all_formats(run, table, tmp_path):
    counts = []
    for kind in ("parquet", "csv", "jsonl"):
        path = tmp_path / f"data.{kind}"
        write(path, table(100), kind)
        counts.append(run(path, key="id").counts)
    assert counts[0] == counts[1] == counts[2]


def test_without_a_key_equal_rows_stay_together(run, table, tmp_path):
    data = table(50)
    pq.write_table(pa.concat_tables([data, data]), tmp_path / "twice.parquet")
    manifest = run(tmp_path / "twice.parquet")
    assert manifest.counts["train"] % 2 == 0
    found = records(manifest)
    train = {d for file, shard in found.items() if file.startswith("train") for d in shard}
    evals = {d for file, shard in found.items() if file.startswith("eval") for d in shard}
    assert not train & evals


@pytest.mark.parametrize(
    ("values", "kind", "presence"),
    [
        (["1", "2"], "int64", "required"),
        (["1", "2.5"], "float32", "required"),
        (["nan", "-inf"], "float32", "required"),
        (["true", "false"], "int64", "required"),
        (["2013-01-01", "2014-01-01"], "int64", "required"),
        (["2013-01-01 05:00:00", "2013-01-01"], "int64", "required"),
        (["2013-01-01T05:00:00Z", "2013-01-01T06:00:00Z"], "int64", "required"),
        (["1", "NA"], "int64", "optional"),
        (["", ""], "string", "optional"),
        (["a", "1"], "string", "required"),
        (['"NA"', "x"], "string", "required"),
    ],
)
def test_types_of_csv_columns(values, kind, presence, run, tmp_path):
    (tmp_path / "a.tsv").write_text("c\ty\n" + "".join(f"{value}\t1\n" for value in values))
    schema = run(tmp_path / "a.tsv", eval_fraction=0.0).schema()
    assert (schema["c"].type, schema["c"].presence) == (kind, presence)


def test_few_mistakes_do_not_make_a_column_of_numbers_text(run, tmp_path):
    for values, kind in ((["1"] * 199 + ["x"], "int64"), (["1.5"] * 199 + ["x"], "float32")):
        (tmp_path / "a.csv").write_text("c,y\n" + "".join(f"{value},1\n" for value in values))
        manifest = run(tmp_path / "a.csv")
        assert manifest.schema()["c"].type == kind
        assert manifest.quarantined == 1


def test_json_that_is_not_of_one_mind(run, tmp_path):
    rows = [{"a": 1, "b": True, "c": "2013-01-01T00:00:00Z", "y": 0}] * 99 + [{"a": "x", "b": False, "y": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = run(tmp_path / "a.jsonl")
    assert [row["reason"] for row in quarantine(manifest)] == ['"x" is no int64']
    schema = manifest.schema()
    assert schema["a"].type == "int64"
    assert schema["b"].domain == {"min": 1, "max": 1}


def test_files_of_one_table_must_agree(run, table, tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    pq.write_table(table(10), folder / "a.parquet")
    pq.write_table(table(10).drop_columns(["x"]), folder / "b.parquet")
    with pytest.raises(ColumnError, match=r"column 'x' is in a.parquet, not in b.parquet"):
        run(folder)
    changed = table(10)
    pq.write_table(changed.set_column(1, "x", pa.array(["a"] * 10)), folder / "b.parquet")
    with pytest.raises(ColumnError, match=r"column 'x' is double in the files before, string in b.parquet"):
        run(folder)
    # Numbers of other widths, and columns without any value, are no disagreement.
    pq.write_table(changed.set_column(1, "x", pa.array(range(10), pa.int32())), folder / "b.parquet")
    pq.write_table(changed.set_column(1, "x", pa.nulls(10)), folder / "c.parquet")
    manifest = run(folder)
    assert manifest.schema()["x"].type == "float32"
    assert sum(manifest.counts.values()) == 30


def test_a_given_schema_is_held_to(run, table, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(100), path)
    first = run(path, key="id")
    schema = json.loads((first.folder / "schema.json").read_text())
    features = {f["name"]: f for f in schema["features"]}
    features["id"]["type"] = "float32"
    features["x"]["presence"] = "required"
    schema["features"] = [features[name] for name in ("id", "x", "y")]
    given = tmp_path / "schema.json"
    given.write_text(json.dumps(schema))
    manifest = run(path, schema=given, quarantine_threshold=0.2)
    assert manifest.schema().names == ("id", "x", "y")
    assert manifest.schema()["id"].type == "float32"
    assert {row["reason"] for row in quarantine(manifest)} == {"is missing"}
    assert manifest.quarantined == 10
    with pytest.raises(ColumnError, match="column 'color' isn't in the schema"):
        run(path, schema=given, label="color")
    schema["features"].append({"name": "z", "type": "int64"})
    given.write_text(json.dumps(schema))
    with pytest.raises(ColumnError, match=r"column 'z' isn't in .* the schema requires it"):
        run(path, schema=given)
    schema["features"][-1]["presence"] = "optional"
    given.write_text(json.dumps(schema))
    manifest = run(path, schema=given, quarantine_threshold=0.2)
    assert manifest.statistics["train"]["z"]["missing"] == manifest.counts["train"]


def test_statistics_of_odd_numbers(run, tmp_path):
    values = [0.0, float("nan"), float("inf"), 2.0, 4.0]
    data = pa.table(
        {"x": values, "y": [1] * 5, "b": [b"ab"] * 5, "e": pa.array([[]] * 5, pa.list_(pa.int64()))}
    )
    pq.write_table(data, tmp_path / "a.parquet")
    statistics = run(tmp_path / "a.parquet", eval_fraction=0.0).statistics["train"]
    x = statistics["x"]
    assert (dict(x.pop("quantiles"))[0.5], sum(x.pop("histogram")["counts"])) == (2.0, 3)
    assert x == {
        "count": 5, "missing": 0, "min": 0.0, "max": 4.0, "mean": 2.0, "std": pytest.approx(1.632993),
        "zeros": 1, "nan": 1, "infinite": 1, "distinct": 3,
    }  # fmt: skip
    lengths = {"min_length": 2, "max_length": 2, "mean_length": 2.0}
    assert statistics["b"] == {"count": 5, "missing": 0, "distinct": 1, **lengths}
    lengths = {"min_values": 0, "max_values": 0, "mean_values": 0.0}
    assert statistics["e"] == {"count": 5, "missing": 0, **lengths}


def test_many_different_values_are_no_vocabulary(run, tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    for part in range(2):
        ids = [f"user {part} {i}" for i in range(6000)]
        pq.write_table(pa.table({"user": ids, "y": [1] * 6000}), folder / f"{part}.parquet")
    manifest = run(folder, eval_fraction=0.0)
    assert "top" not in manifest.statistics["train"]["user"]
    assert manifest.schema()["user"].domain is None
