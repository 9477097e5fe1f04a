"""Raw data of kinds other than tables and class folders: arrays, TFRecords, pictures with a label table."""

import gzip
import io
import json
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image

from trainers.records.errors import ColumnError, InvalidOption, SourceEmpty, SourceMissing, SourceUnreadable
from trainers.records.frames import frames
from trainers.records.read import Dataset


def rows_of(manifest, key="key"):
    """All examples as {key: {name: value}}."""
    opened = Dataset.open(manifest.path)
    out = {}
    for split in ("train", "eval"):
        if opened.count(split):
            for batch in opened.dataset(split, 16):
                tensors = {name: tensor.numpy() for name, tensor in batch.items() if name != key}
                for at, name in enumerate(batch[key].numpy().tolist()):
                    out[name] = {column: tensor[at] for column, tensor in tensors.items()}
    return out


def quarantine(manifest):
    return [
        (row["file"], row["row"], row["column"], row["reason"])
        for row in pq.read_table(manifest.folder / "quarantine.parquet").to_pylist()
    ]


# Arrays -----------------------------------------------------------------------------------------------------


def idx(array):
    kinds = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
    head = bytes([0, 0, kinds[array.dtype.str[1:]], array.ndim])
    return (
        head
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


PIXELS = np.random.default_rng(1).integers(0, 256, (50, 5, 4), dtype=np.uint8)
DIGITS = (np.arange(50) % 10).astype(np.uint8)


def test_mnists_files(run, tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(PIXELS[:40])))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(DIGITS[:40])))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS[40:]))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(DIGITS[40:]))
    manifest = run(folder, label="digit", batch_rows=7)
    assert manifest.schema()["image"].shape == (5, 4, 1)
    found = rows_of(manifest)
    assert len(found) == 50
    for i in range(50):
        name = f"train-images/{i}" if i < 40 else f"t10k-images/{i - 40}"
        assert (found[name.encode()]["image"][:, :, 0] == PIXELS[i]).all()
        assert found[name.encode()]["digit"] == DIGITS[i]


def test_numpy_arrays_in_units_of_ranges(run, tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.records.arrays._PART", 16)
    folder = tmp_path / "raw"
    folder.mkdir()
    x = np.arange(50 * 6, dtype=np.float64).reshape(50, 2, 3) / 7
    np.save(folder / "x_train.npy", x)
    np.save(folder / "y_train.npy", (np.arange(50) % 3).reshape(50, 1))
    manifest = run(folder, shards=4)
    assert manifest.schema()["x"].shape == (2, 3)
    assert len([shard for shard in manifest.shards if shard.split == "train"]) == 4
    found = rows_of(manifest)
    assert len(found) == 50
    for i in range(50):
        row = found[f"x_train/{i}".encode()]
        assert (row["x"] == x[i].astype(np.float32)).all()
        assert row["y"] == i % 3


def save(array):
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


GOOD = {"images.npy": save(PIXELS), "labels.npy": save(DIGITS)}
BAD_ARRAYS = {
    "pickle": (
        {"images.npy": save(np.array([{}] * 50, object))},
        SourceUnreadable,
        "a pickle, which is never loaded",
    ),
    "cut": ({"images.npy": GOOD["images.npy"][:-9]}, SourceUnreadable, "by its header .* it should have"),
    "longer": ({"images.npy": GOOD["images.npy"] + b"x"}, SourceUnreadable, "by its header"),
    "not npy": ({"images.npy": b"hello, I am text"}, SourceUnreadable, "no header that can be read"),
    "columns first": ({"images.npy": save(np.asfortranarray(PIXELS))}, SourceUnreadable, "C order"),
    "text": ({"images.npy": save(np.array(["a"] * 50))}, SourceUnreadable, "not numbers"),
    "other count": (
        {"labels.npy": save(DIGITS[:-1])},
        SourceUnreadable,
        "50 examples, labels.npy has 49 labels",
    ),
    "one-hot": ({"labels.npy": save(np.eye(50))}, ColumnError, "wants one value an example"),
    "alone": ({"labels.npy": None}, SourceUnreadable, "has no file of labels beside it"),
    "no word": ({"other.npy": save(DIGITS)}, SourceUnreadable, "doesn't say whether it holds"),
    "two": ({"image.npy": save(DIGITS)}, SourceUnreadable, "as image.npy does|as images.npy does"),
    "empty": ({"labels.npy": b""}, SourceEmpty, "is empty"),
    "no rows": ({"images.npy": save(PIXELS[:0]), "labels.npy": save(DIGITS[:0])}, SourceEmpty, "no row"),
    "idx head": (
        {"images.npy": None, "images.idx": b"\0\0\x07\x01"},
        SourceUnreadable,
        "which no IDX file does",
    ),
    "idx cut": (
        {"images.npy": None, "images.idx": idx(PIXELS)[:9]},
        SourceUnreadable,
        "ends within its header",
    ),
    "gzip cut": (
        {"images.npy": None, "images.npy.gz": gzip.compress(GOOD["images.npy"])[:-30]},
        SourceUnreadable,
        "can't be read: Truncated|ends before example",
    ),
    "gzip short": (
        {"images.npy": None, "images.npy.gz": gzip.compress(GOOD["images.npy"][:-40])},
        SourceUnreadable,
        "ends before example",
    ),
    "gzip long": (
        {"images.npy": None, "images.npy.gz": gzip.compress(GOOD["images.npy"] + b"x")},
        SourceUnreadable,
        "goes on after",
    ),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_are_not_what_they_say(name, run, tmp_path):
    changes, error, problem = BAD_ARRAYS[name]
    folder = tmp_path / "raw"
    folder.mkdir()
    for file, data in {**GOOD, **changes}.items():
        if data is not None:
            (folder / file).write_bytes(data)
    with pytest.raises(error, match=problem):
        run(folder)
    assert list((tmp_path / "out").iterdir()) == []


# TFRecords --------------------------------------------------------------------------------------------------


def example(**features):
    def feature(value):
        values = value if isinstance(value, list) else [value]
        if all(isinstance(v, bytes) for v in values):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if all(isinstance(v, int) for v in values):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    held = {name: feature(value) for name, value in features.items() if value is not None}
    return tf.train.Example(features=tf.train.Features(feature=held)).SerializeToString()


def write(path, records, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_tfrecords_in_tfrecords_out(compression, run, tmp_path):
    rows = [
        {
            "key": f"k{i}".encode(),
            "x": None if i % 4 == 0 else i / 2,
            "pair": [i, -i],
            "tags": [b"\xffa"] * (1 + i % 3),
            "y": i % 2,
        }
        for i in range(60)
    ]
    folder = tmp_path / "raw"
    folder.mkdir()
    write(folder / "a.tfrecord", [example(**row) for row in rows[:30]], compression)
    write(folder / "b.tfrecord", [example(**row) for row in rows[30:]], compression)
    manifest = run(folder, key="key", batch_rows=11)
    schema = manifest.schema()
    assert [(f.name, f.type, f.shape) for f in schema] == [
        ("key", "string", ()),
        ("pair", "int64", (2,)),
        ("tags", "bytes", (None,)),
        ("x", "float32", ()),
        ("y", "int64", ()),
    ]
    written = [r for s in manifest.shards for r in frames(manifest.folder / s.file)]
    parsed = sorted((tf.train.Example.FromString(r) for r in written), key=str)
    wanted = sorted((tf.train.Example.FromString(example(**row)) for row in rows), key=str)
    assert parsed == wanted


def test_tfrecords_of_pictures_and_bad_ones(run, tmp_path):
    png = io.BytesIO()
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(png, "png")
    good = [example(image=png.getvalue(), y=i % 2) for i in range(40)]
    bad = [b"\xff\xff\xff", example(image=[b"a", b"b"], y=1), example(image=1, y=1), example(image=b"x")]
    write(tmp_path / "a.tfrecord", [*(good * 25), *bad])
    manifest = run(tmp_path / "a.tfrecord", quarantine_threshold=0.2)
    assert manifest.schema()["image"].encoding == "image"
    assert quarantine(manifest) == [
        ("a.tfrecord", 1001, "", "is no tf.train.Example"),
        ("a.tfrecord", 1002, "image", "has 2 values, wants one"),
        ("a.tfrecord", 1003, "image", "is int64_list, wants bytes_list"),
        ("a.tfrecord", 1004, "y", "is missing"),
    ]
    # A file that isn't nearly all of one type is none of ours to guess at.
    (tmp_path / "a.tfrecord").unlink()
    write(tmp_path / "a.tfrecord", [*good, *bad])
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress((tmp_path / "a.tfrecord").read_bytes()))
    with pytest.raises(ColumnError, match="is bytes_list in 42 records, int64_list in 1"):
        run(path)


def test_damaged_tfrecords(run, tmp_path):
    path = tmp_path / "a.tfrecord"
    records = [example(x=i, y=i % 2) for i in range(2000)]
    write(path, records)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceUnreadable, match=r"a.tfrecord: is damaged at record 1999, byte"):
        run(path)
    write(path, records, "GZIP")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SourceUnreadable, match="compressed data is damaged"):
        run(path)
    path.write_bytes(b"no record at all")
    with pytest.raises(SourceUnreadable, match="checksum of a record's length"):
        run(path)
    write(path, [])
    with pytest.raises(SourceEmpty, match=r"no tf.train.Example"):
        run(path)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_schema_says_what_tfrecords_hold(run, tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=i, image=bytes([i] * 6), tags=[1], y=i % 2) for i in range(40)])
    schema = tmp_path / "schema.json"
    features = [
        {"name": "x", "type": "float32"},
        {"name": "image", "type": "uint8", "shape": [2, 3, 1], "encoding": "raw"},
        {"name": "tags", "type": "int64", "shape": [None]},
        {"name": "y", "type": "int64"},
    ]
    schema.write_text(json.dumps({"version": 1, "features": features}))
    manifest = run(tmp_path / "a.tfrecord", schema=schema)
    assert manifest.schema()["x"].type == "float32"
    batch = next(iter(Dataset.open(manifest.path).dataset("train", 4)))
    assert batch["image"].shape == (4, 2, 3, 1)


def test_tfrecords_are_read_without_tensorflow():
    program = "import trainers.records.tfrecords, sys; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# Label tables -----------------------------------------------------------------------------------------------


def label(folder, rows, name="labels.csv"):
    (folder / name).write_text("file,pet\n" + "".join(f"{file},{value}\n" for file, value in rows))


def test_labels_from_a_table(pictures, run):
    folder = pictures(30, classes=("a", "b"))
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    label(
        folder,
        [(name, ("dog", "cat", "ant")[i % 3]) for i, name in enumerate(names[:-1])] + [("no.png", "cat")],
    )
    manifest = run(folder, label="pet", format={"labels": "labels.csv"}, quarantine_threshold=0.2)
    assert manifest.schema()["pet"].names == ("ant", "cat", "dog")
    found = rows_of(manifest)
    assert {name: row["pet"] for name, row in found.items()} == {
        name.encode(): (2, 1, 0)[i % 3] for i, name in enumerate(names[:-1])
    }
    assert sorted(quarantine(manifest), key=str) == sorted(
        [
            ("labels.csv", 30, "file", "names 'no.png', which isn't there"),
            (names[-1], None, "image", "isn't in labels.csv"),
        ],
        key=str,
    )
    # Numbers stay numbers; other labels are another dataset.
    pq.write_table(pa.table({"name": names, "pet": [i / 4 for i in range(30)]}), folder / "labels.parquet")
    (folder / "labels.csv").unlink()
    format = {"labels": "labels.parquet", "file_column": "name"}
    again = run(folder, label="pet", format=format)
    assert again.schema()["pet"].type == "float32"
    assert rows_of(again)[names[3].encode()]["pet"] == 0.75


def test_label_tables_that_are_refused(pictures, run, tmp_path):
    folder = pictures(4)
    name = next(folder.rglob("*.png")).relative_to(folder).as_posix()
    format = {"labels": "labels.csv"}
    with pytest.raises(SourceMissing, match=r"holds no labels.csv"):
        run(folder, label="pet", format=format)
    for outside in ("../secret.png", "/etc/passwd", "0/../../x.png"):
        label(folder, [(outside, 1)])
        with pytest.raises(SourceUnreadable, match=r"row 1 names .*leads out of"):
            run(folder, label="pet", format=format)
    label(folder, [(name, 1), (name, 2)])
    with pytest.raises(ColumnError, match="is 1 and, in row 2, 2"):
        run(folder, label="pet", format=format)
    with pytest.raises(ColumnError, match=r"column 'kind' isn't in .*labels.csv; it holds file, pet"):
        run(folder, label="kind", format=format)
    with pytest.raises(SourceUnreadable, match=r"several kinds.*format.labels"):
        run(folder, label="pet")
    for wrong in ("../labels.csv", "/labels.csv", "a/../../labels.csv"):
        with pytest.raises(InvalidOption, match="be a path below the source"):
            run(folder, label="pet", format={"labels": wrong})
    assert list((tmp_path / "out").iterdir()) == []
