"""From raw data to a published dataset, and every way in which it must not be published."""

import json
import os
import re
import struct
import threading

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainers.job.failures import FailureClass
from trainers.records import listing as listing_module
from trainers.records.__main__ import main
from trainers.records.errors import (
    ColumnError,
    DatasetCorrupt,
    DatasetMissing,
    InvalidOption,
    RecordsError,
    SourceChanged,
    SourceEmpty,
    SourceMissing,
    SourceUnreadable,
    TooManyBadRows,
)
from trainers.records.frames import find_damage, frames
from trainers.records.manifest import Manifest
from trainers.records.split import hash_text, is_eval


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def quarantine(manifest):
    return pq.read_table(manifest.folder / "quarantine.parquet").to_pylist()


def records(manifest):
    return {s.file: list(frames(manifest.folder / s.file)) for s in manifest.shards}


def content(manifest):
    return {key: value for key, value in manifest.to_dict().items() if key != "created"}


# Pictures ---------------------------------------------------------------------------------------------------


def test_pictures(pictures, run, said, tmp_path):
    source = pictures(40)
    manifest = run(source, label="digit")
    assert names(manifest.folder) == [
        "eval-00000-of-00002.tfrecord",
        "eval-00001-of-00002.tfrecord",
        "manifest.json",
        "schema.json",
        "statistics.json",
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
    ]
    assert names(tmp_path / "out") == [manifest.fingerprint[:16]]
    assert sum(manifest.counts.values()) == 40
    assert manifest.label == "digit"
    assert manifest.sources == (str(source),)
    schema = manifest.schema()
    assert schema["image"].shape == (4, 6, 1)
    assert schema["image"].encoding == "raw"
    assert schema["digit"].names == ("0", "1", "2", "3")
    for shard in manifest.shards:
        assert find_damage(manifest.folder / shard.file) is None
    found = b"".join(data for shard in records(manifest).values() for data in shard)
    for path in source.rglob("*.png"):
        assert np.asarray(Image.open(path)).tobytes() in found
        assert path.relative_to(source).as_posix().encode() in found
    statistics = manifest.statistics["train"]
    assert statistics["image"]["count"] == manifest.counts["train"]
    assert statistics["digit"]["min"] == 0
    assert any("published" in line for line in said)


def test_pictures_are_split_by_path_for_ever(pictures, run):
    source = pictures(60)
    manifest = run(source)
    paths = sorted(p.relative_to(source).as_posix() for p in source.rglob("*.png"))
    evals = {path for path, e in zip(paths, is_eval(hash_text(paths), 0.2), strict=True) if e}
    found = records(manifest)
    for split in ("train", "eval"):
        data = b"".join(d for file, shard in found.items() if file.startswith(split) for d in shard)
        assert {p for p in paths if p.encode() in data} == (evals if split == "eval" else set(paths) - evals)
    # More data and more shards: nobody moves.
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(source / "0" / "new.png")
    more = records(run(source, shards=5))
    data = b"".join(d for file, shard in more.items() if file.startswith("eval") for d in shard)
    assert {p for p in paths if p.encode() in data} == evals


def test_named_classes_jpeg_and_colour(pictures, run):
    source = pictures(12, classes=("dog", "cat"), suffix=".jpg", shape=(5, 5, 3))
    schema = run(source, label="pet").schema()
    assert schema["pet"].names == ("cat", "dog")
    assert schema["image"].shape == (5, 5, 3)


def test_encoded_pictures_are_the_files_themselves(pictures, run):
    source = pictures(12)
    (source / "0" / "cut.png").write_bytes((source / "0" / "0000.png").read_bytes()[:-6])
    manifest = run(source, image="encoded", quarantine_threshold=0.1)
    assert manifest.schema()["image"].encoding == "image"
    found = b"".join(data for shard in records(manifest).values() for data in shard)
    assert (source / "1" / "0001.png").read_bytes() in found
    assert quarantine(manifest) == [
        {
            "file": "0/cut.png",
            "row": None,
            "column": "image",
            "reason": "is cut short: a PNG file ends otherwise",
        }
    ]


def test_picture_modes(run, tmp_path):
    source = tmp_path / "modes"
    gray = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    for i, mode in enumerate(["RGB", "P", "CMYK", "RGB"]):
        (source / "a").mkdir(parents=True, exist_ok=True)
        gray.convert(mode).save(source / "a" / f"{i}.{'jpg' if mode == 'CMYK' else 'png'}")
    manifest = run(source, eval_fraction=0.0)
    assert manifest.schema()["image"].shape == (4, 6, 3)
    assert manifest.counts == {"train": 4, "eval": 0}
    assert not list(manifest.folder.glob("eval*"))


BAD_PICTURES = {
    "cut.png": (lambda good: good[: len(good) // 2], "can't be decoded"),
    "empty.png": (lambda good: b"", "is empty"),
    "text.jpg": (lambda good: b"hello", "is no PNG or JPEG"),
    "sizes.png": (lambda good: good[:16] + struct.pack(">II", 0, 0) + good[24:], "can't be read|is no PNG"),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_picture_goes_to_the_quarantine(name, pictures, run):
    source = pictures(30)
    spoil, reason = BAD_PICTURES[name]
    (source / "2" / name).write_bytes(spoil((source / "0" / "0000.png").read_bytes()))
    manifest = run(source, quarantine_threshold=0.05)
    assert manifest.quarantined == 1
    assert sum(manifest.counts.values()) == 30
    (row,) = quarantine(manifest)
    assert row["file"] == f"2/{name}"
    assert re.search(reason, row["reason"])


def test_pictures_of_another_shape_depth_or_place(pictures, run, said):
    source = pictures(30)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(source / "0" / "large.png")
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(source / "0" / "deep.png")
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(source / "nowhere.png")
    (source / "0" / "notes.txt").write_text("a note")
    (source / ".hidden").mkdir()
    (source / ".hidden" / "0.png").write_text("no picture")
    manifest = run(source, quarantine_threshold=0.2)
    assert {(row["file"], row["reason"]) for row in quarantine(manifest)} == {
        ("0/large.png", "has shape [9, 9, 1], wants [4, 6, 1]"),
        ("0/deep.png", "has mode I;16, wants 8 bits a channel"),
        ("nowhere.png", "lies in no class folder"),
    }
    assert any("passed over 1 files that are no data" in line for line in said)


def test_too_many_bad_pictures_publish_nothing(pictures, run, tmp_path):
    source = pictures(30)
    (source / "0" / "bad.png").write_bytes(b"x")
    with pytest.raises(
        TooManyBadRows, match=r"1 of 31 rows are bad \(3.2%, up to 1.0%.*0/bad.png column image"
    ) as e:
        run(source)
    assert (e.value.bad, e.value.total, e.value.failure_class) == (1, 31, FailureClass.DATA)
    (folder,) = (tmp_path / "out").iterdir()
    assert names(folder) == ["quarantine.parquet"]
    with pytest.raises(DatasetMissing):
        Manifest.load(folder)
    # The same data with a higher threshold is the same dataset.
    assert run(source, quarantine_threshold=0.05).folder == folder


def test_pictures_need_class_folders_and_free_names(pictures, run, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(flat / "a.png")
    with pytest.raises(SourceEmpty, match="not in class folders"):
        run(flat)
    source = pictures(4)
    with pytest.raises(ColumnError, match="rename the label"):
        run(source, label="image")
    with pytest.raises(ColumnError, match=r"column 'path' isn't in .* it holds image, y, key"):
        run(source, key="path")
    for path in source.rglob("*.png"):
        path.write_bytes(b"x")
    with pytest.raises(SourceUnreadable, match=r"holds no picture that can be read: .*0/0000.png is no PNG"):
        run(source)
    assert names(tmp_path / "out") == []


# Sources that are nothing -----------------------------------------------------------------------------------


def test_missing_empty_and_mixed_sources(run, tmp_path, table):
    with pytest.raises(SourceMissing, match=r"no such file or folder: .*nowhere; check the path"):
        run(tmp_path / "nowhere")
    folder = tmp_path / "raw"
    folder.mkdir()
    with pytest.raises(SourceEmpty, match=r"holds no file; put files there that end in one of .png"):
        run(folder)
    (folder / "a.txt").write_text("x")
    with pytest.raises(SourceEmpty, match=r"only files such as .*a.txt"):
        run(folder)
    pq.write_table(table(3), folder / "a.parquet")
    (folder / "b.csv").write_text("y\n1\n")
    with pytest.raises(SourceUnreadable, match=r"several kinds: csv \(b.csv\), parquet \(a.parquet\)"):
        run(folder)


def test_a_file_that_may_not_be_read(run, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("y\n1\n")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(listing_module, "sha256_of_file", denied)
    with pytest.raises(SourceUnreadable, match=r"a.csv: can't be read: Permission denied; check its owner"):
        run(tmp_path / "a.csv")


# Tables -----------------------------------------------------------------------------------------------------


def write(path, data, kind):
    if kind == "parquet":
        pq.write_table(data, path, row_group_size=30)
    elif kind == "csv":
        pyarrow.csv.write_csv(data.drop_columns(["tags"]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in data.to_pylist()))


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


def test_bad_csv_rows_with_their_numbers(run, tmp_path):
    path = tmp_path / "a.csv"
    lines = ["id,x,name,y"] + [f'{i},{i / 2},"n, {i % 3}\nq",{i % 2}' for i in range(300)]
    lines[10] = "9,oops,n,1"
    lines[20] = "19,1.5"
    lines[30] = "29,2.5,z,"
    lines[40] = "39,2.5,z,1,7"
    lines[41] = "zz,1.5,q,1"
    lines[300] = "299,1"
    path.write_text("\n".join(lines) + "\n")
    manifest = run(path, key="id", quarantine_threshold=0.5, batch_rows=8)
    assert sorted((row["row"], row["column"], row["reason"]) for row in quarantine(manifest)) == [
        (10, "x", "'oops' is no double"),
        (20, "", "has 2 fields, wants 4"),
        (30, "y", "is missing"),
        (40, "", "has 5 fields, wants 4"),
        (41, "id", "'zz' is no int64"),
        (300, "", "has 2 fields, wants 4"),
    ]
    assert sum(manifest.counts.values()) == 294


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


def test_bad_json_lines_with_their_numbers(run, tmp_path):
    lines = [json.dumps({"id": i, "x": i / 2, "t": ["a"] * (i % 3), "y": i % 2}) for i in range(300)]
    lines[5] = "{bad"
    lines[7] = json.dumps({"id": 7, "x": "text", "y": 1})
    lines[9] = ""
    lines[11] = json.dumps({"id": 11, "x": 1})
    lines[13] = "[1]"
    lines[15] = '{"id": 15, "x": 1, "y": 0} {"id": 16, "x": 1, "y": 0}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    manifest = run(tmp_path / "a.jsonl", key="id", quarantine_threshold=0.5, batch_rows=50)
    assert sorted((row["row"], row["column"], row["reason"]) for row in quarantine(manifest)) == [
        (6, "", "is no JSON: '{bad'"),
        (8, "x", '"text" is no double'),
        (12, "y", "is missing"),
        (14, "", "is list, wants an object"),
        (16, "", "is no JSON: '" + lines[15][:40] + "'"),
    ]
    assert sum(manifest.counts.values()) == 294
    assert manifest.schema()["t"].ragged


def test_json_that_is_not_of_one_mind(run, tmp_path):
    rows = [{"a": 1, "b": True, "c": "2013-01-01T00:00:00Z", "y": 0}] * 99 + [{"a": "x", "b": False, "y": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = run(tmp_path / "a.jsonl")
    assert [row["reason"] for row in quarantine(manifest)] == ['"x" is no int64']
    schema = manifest.schema()
    assert schema["a"].type == "int64"
    assert schema["b"].domain == {"min": 1, "max": 1}


def test_a_label_must_be_there_and_be_a_number(run, tmp_path):
    pq.write_table(pa.table({"y": [1.0, None, float("nan"), 4.0], "x": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    manifest = run(tmp_path / "a.parquet", eval_fraction=0.0, quarantine_threshold=0.6)
    assert [(row["row"], row["reason"]) for row in quarantine(manifest)] == [(2, "is missing"), (3, "is nan")]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_missing_columns(kind, run, table, tmp_path):
    path = tmp_path / f"a.{kind}"
    write(path, table(20), kind)
    with pytest.raises(ColumnError, match=f"column 'target' isn't in .*a.{kind}; it holds id, x, color"):
        run(path, label="target")
    with pytest.raises(ColumnError, match="column 'user' isn't in"):
        run(path, key="user")
    with pytest.raises(ColumnError, match="column 'x' has type float, which makes no key"):
        run(path, key="x")
    assert names(tmp_path / "out") == []


UNREADABLE = {
    "cut.parquet": (
        lambda good: good[: len(good) // 2],
        SourceUnreadable,
        "can't be read.*write the file again",
    ),
    "text.parquet": (lambda good: b"hello" * 9, SourceUnreadable, "can't be read"),
    "empty.parquet": (lambda good: b"", SourceEmpty, "is empty"),
    "empty.csv": (lambda good: b"", SourceEmpty, "is empty"),
    "blank.csv": (lambda good: b"\n\n", SourceUnreadable, "can't be read"),
    "header.csv": (lambda good: b"id,y\n", SourceEmpty, "holds no row"),
    "latin.csv": (lambda good: "n,y\né,1\n".encode("latin-1"), SourceUnreadable, "save it as UTF-8"),
    "twice.csv": (lambda good: b"y,y\n1,2\n", ColumnError, "is there twice"),
    "empty.jsonl": (lambda good: b"", SourceEmpty, "is empty"),
    "blank.jsonl": (lambda good: b"\n", SourceEmpty, "no columns"),
    "nested.jsonl": (lambda good: b'{"y": 1, "a": {"b": 1}}\n', ColumnError, "can't hold"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_are_not_what_they_say(name, run, table, tmp_path):
    good = tmp_path / "good.bin"
    pq.write_table(table(50), good)
    spoil, error, problem = UNREADABLE[name]
    path = tmp_path / name
    path.write_bytes(spoil(good.read_bytes()))
    with pytest.raises(error, match=problem) as e:
        run(path)
    assert e.value.failure_class is FailureClass.DATA
    assert name in str(e.value) or isinstance(e.value, ColumnError)
    assert names(tmp_path / "out") == []


def test_parquet_damaged_in_its_data(run, table, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(2000), path, compression="snappy")
    data = bytearray(path.read_bytes())
    data[200:2200] = b"\xff" * 2000
    path.write_bytes(data)
    with pytest.raises(SourceUnreadable, match=r"a.parquet: can't be read"):
        run(path)
    assert names(tmp_path / "out") == []


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


def test_no_rows_for_training(run, tmp_path):
    pq.write_table(pa.table({"k": [1] * 3, "y": [1] * 3}), tmp_path / "a.parquet")
    with pytest.raises(SourceEmpty, match=r"none of the 3 rows of .* is for training"):
        run(tmp_path / "a.parquet", key="k", eval_fraction=0.95)
    pq.write_table(pa.table({"y": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(SourceEmpty, match="holds no row"):
        run(tmp_path / "a.parquet")


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


# Again, beside each other, and in between -------------------------------------------------------------------


def test_a_second_run_does_nothing(pictures, run, said):
    source = pictures(20)
    first = run(source)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    said.clear()
    assert run(source) == first
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    assert any(line.startswith("nothing to do") for line in said)


def test_a_damaged_dataset_is_written_anew(pictures, run, said):
    source = pictures(20)
    first = run(source)
    shard = first.folder / first.shards[0].file
    shard.write_bytes(shard.read_bytes()[:-1])
    again = run(source)
    assert again.digest == first.digest
    assert content(again) == content(first)
    again.verify()
    assert any("writing the dataset anew" in line for line in said)


def test_other_bytes_are_another_dataset(pictures, run):
    source = pictures(20)
    first = run(source)
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(source / "0" / "0000.png")
    second = run(source)
    assert second.folder != first.folder
    assert second.digest != first.digest


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "went from .* to .* bytes"),
        (lambda path: os.utime(path, ns=(1, 1)), "was written to"),
        (lambda path: path.unlink(), "went away"),
    ],
    ids=["grows", "touched", "removed"],
)
def test_a_file_that_changes_while_it_is_read(change, problem, run, table, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    write(path, table(50), "csv")

    def progress(line):
        if "features" in line:  # listed and hashed, not yet read
            change(path)

    with pytest.raises(SourceChanged, match=f"a.csv {problem} while it was being read; wait"):
        run(path, progress=progress)
    assert names(tmp_path / "out") == []


def test_a_file_that_changes_while_it_is_hashed(run, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("y\n1\n")
    real = listing_module.sha256_of_file

    def hashing(path):
        digest = real(path)
        path.write_text("y\n1\n2\n")
        return digest

    monkeypatch.setattr(listing_module, "sha256_of_file", hashing)
    with pytest.raises(SourceChanged, match="went from 4 to 6 bytes"):
        run(path)
    monkeypatch.setattr(listing_module, "sha256_of_file", lambda path: path.unlink() or real(path))
    with pytest.raises(SourceChanged, match="went away"):
        run(path)


def test_a_picture_that_goes_away(pictures, run, tmp_path):
    source = pictures(20)

    def progress(line):
        if "features" in line:
            (source / "1" / "0001.png").unlink()

    with pytest.raises(SourceChanged, match=r"0001.png went away"):
        run(source, progress=progress)
    assert names(tmp_path / "out") == []


class Interrupted(Exception):
    """Stands for the end of a process in the middle of things."""


def test_an_interrupted_run_goes_on_where_it_was(pictures, run, said, tmp_path):
    source = pictures(40)

    def progress(line):
        said.append(line)
        if line.startswith("unit 2/3"):
            raise Interrupted

    with pytest.raises(Interrupted):
        run(source, shards=3, progress=progress)
    (folder,) = (tmp_path / "out").iterdir()
    # Two units are whole and recorded, the third is not begun, and nothing is half written.
    assert [name for name in names(folder) if name.startswith(".unit")] == [
        ".unit-00000-of-00003.json",
        ".unit-00001-of-00003.json",
    ]
    assert not [name for name in names(folder) if name.endswith(".tmp")]
    shard = folder / "train-00000-of-00003.tfrecord"
    before = shard.stat()
    (folder / ".train-00009-of-00009.tfrecord.1.ab.tmp").write_text("left by a killed run")
    # A record that isn't what the disk holds is not believed.
    (folder / "train-00001-of-00003.tfrecord").write_bytes(b"x")
    manifest = run(source, shards=3)
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    assert not [name for name in names(folder) if name.startswith(".")]
    assert len([line for line in said if "finished by an earlier run" in line]) == 1
    elsewhere = run(source, shards=3, name="test", progress=said.append)
    assert content(elsewhere) == content(manifest)
    manifest.verify()


def test_a_broken_unit_record_is_not_believed(pictures, run, tmp_path):
    source = pictures(20)

    def progress(line):
        if line.startswith("unit 1/2"):
            raise Interrupted

    with pytest.raises(Interrupted):
        run(source, progress=progress)
    (folder,) = (tmp_path / "out").iterdir()
    (folder / ".unit-00000-of-00002.json").write_text("{")
    run(source).verify()


def test_two_runs_at_once(pictures, run, said, tmp_path):
    source = pictures(30)
    holding, go_on = threading.Event(), threading.Event()
    results = []

    def first(line):
        if line.startswith("unit 1/2"):
            holding.set()
            assert go_on.wait(60)

    def second(line):
        said.append(line)
        if line.startswith("another run"):
            go_on.set()

    one = threading.Thread(target=lambda: results.append(run(source, progress=first)))
    one.start()
    assert holding.wait(60)
    results.append(run(source, progress=second))
    one.join()
    assert results[0] == results[1]
    assert any("waiting for it" in line for line in said)
    assert any(line.startswith("nothing to do") for line in said)
    assert names(tmp_path / "out") == [results[0].fingerprint[:16]]


def test_long_runs_speak_in_between(pictures, run, said, monkeypatch):
    monkeypatch.setattr("trainers.records.listing.SPEAK_EVERY", 0)
    monkeypatch.setattr("trainers.records.build.SPEAK_EVERY", 0)
    run(pictures(10), batch_rows=2)
    assert any(line.startswith("looked at 10 of 10 files") for line in said)
    assert any(re.fullmatch(r"unit 1/2: 2 rows, [\d,]+ rows/s", line) for line in said)


def test_without_locks_files_are_whole_all_the_same(pictures, run, monkeypatch):
    def flock(fd, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("trainers.records.locks.fcntl.flock", flock)
    run(pictures(10)).verify()


# The pod step -----------------------------------------------------------------------------------------------


def test_the_step(pictures, tmp_path, capsys):
    spec = {"source": str(pictures(20)), "output": f"file://{tmp_path}/out", "name": "d", "label": "y"}
    result = main(spec)
    manifest = Manifest.load(result["manifest"])
    assert result == {
        "manifest": str(manifest.path),
        "digest": manifest.digest,
        "counts": dict(manifest.counts),
        "reused": False,
        "quarantined": 0,
    }
    assert main(spec)["reused"] is True
    assert "published" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source": None}, "the spec lacks source"),
        ({"shard": 2}, "unknown keys shard; it takes source, output"),
        ({"shards": "2"}, "shards must be a whole number"),
        ({"schema": "/nowhere/schema.json"}, "no schema at /nowhere/schema.json"),
    ],
)
def test_a_wrong_spec(changes, problem, tmp_path):
    spec = {"source": "raw", "output": str(tmp_path), "name": "d", "label": "y", **changes}
    from trainers.job.errors import TrainyardError

    with pytest.raises(TrainyardError, match=problem):
        main(spec)


def test_errors_are_one_family():
    for error in (SourceEmpty, SourceMissing, SourceChanged, TooManyBadRows, DatasetCorrupt):
        assert issubclass(error, RecordsError)
        assert error.code.startswith("records.")
    assert issubclass(InvalidOption, ValueError)
