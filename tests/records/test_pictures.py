"""Folders of pictures, one a class."""

import re
import struct

import numpy as np
import pytest
from PIL import Image

from tests.records.published import names, quarantine, records
from trainers.job.failures import FailureClass
from trainers.records.errors import (
    ColumnError,
    DatasetMissing,
    SourceChanged,
    SourceEmpty,
    SourceUnreadable,
    TooManyBadRows,
)
from trainers.records.frames import find_damage
from trainers.records.manifest import Manifest
from trainers.records.split import hash_text, is_eval


def test_pictures(pictures, run, said, tmp_path):
    source = pictures(40)
    manifest = run(source, label="digit")
    assert names(manifest.folder) == [
        "eval-00000-of-00002.tfrecord",
        "eval-00001-of-00002.tfrecord",
        "manifest.json",
        "report.html",
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


def test_a_corrupt_jpeg_goes_to_the_quarantine(pictures, run):
    source = pictures(30, suffix=".jpg", shape=(40, 40, 3))
    good = (source / "0" / "0000.jpg").read_bytes()
    (source / "2" / "cut.jpg").write_bytes(good[: len(good) // 2])
    (source / "2" / "head.jpg").write_bytes(good[:4] + b"\xff" * 60 + good[64:])
    for image in ("raw", "encoded"):
        manifest = run(source, quarantine_threshold=0.1, image=image)
        assert {row["file"] for row in quarantine(manifest)} == {"2/cut.jpg", "2/head.jpg"}


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


def test_a_picture_that_goes_away(pictures, run, tmp_path):
    source = pictures(20)

    def progress(line):
        if "features" in line:
            (source / "1" / "0001.png").unlink()

    with pytest.raises(SourceChanged, match=r"0001.png went away"):
        run(source, progress=progress)
    assert names(tmp_path / "out") == []
