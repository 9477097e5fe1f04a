"""Damaged shards: an error that says where, or what is left of them when that was asked for."""

import struct

import pytest
import tensorflow as tf

from trainers.records.errors import DatasetCorrupt, InvalidOption
from trainers.records.frames import find_damage, frames, masked_crc
from trainers.records.read import Dataset
from trainers.records.salvage import salvage


def keys(data):
    return [key.decode() for batch in data for key in batch["key"].numpy()]


def largest(manifest):
    return manifest.folder / max(manifest.split("train"), key=lambda shard: shard.records).file


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_compressed_shards_hold_the_same_records(compression, pictures, run):
    manifest = run(pictures(40), compression=compression)
    plain = run(pictures(40))
    for a, b in zip(manifest.shards, plain.shards, strict=True):
        found = list(frames(manifest.folder / a.file, compression))
        assert found == list(frames(plain.folder / b.file))
        read = tf.data.TFRecordDataset(str(manifest.folder / a.file), compression_type=compression)
        assert [record.numpy() for record in read] == found
    assert (manifest.digest == plain.digest) == (not compression)
    order = {"shuffle": True, "seed": 1}
    a, b = (Dataset.open(m.path).dataset("train", 8, **order) for m in (manifest, plain))
    assert sorted(keys(a)) == sorted(keys(b))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_damage_of_a_compressed_shard_is_told(compression, pictures, run):
    manifest = run(pictures(40), compression=compression)
    path = largest(manifest)
    good = path.read_bytes()
    path.write_bytes(good[:-7])
    damage = find_damage(path, compression)
    assert "the compressed data is damaged" in damage.problem
    with pytest.raises(DatasetCorrupt, match="its manifest says"):
        Dataset.open(manifest.path)
    # None of it is taken, and all of it is counted.
    found = Dataset.open(manifest.path, on_corrupt="skip")
    left = keys(found.dataset("train", 8))
    records = {shard.file: shard.records for shard in manifest.shards}
    assert found.skipped == {path.name: records[path.name]}
    assert len(left) == manifest.counts["train"] - records[path.name] == found.count("train")
    path.write_bytes(good)
    middle = bytearray(good)
    middle[len(good) // 2] ^= 0xFF
    path.write_bytes(middle)
    opened = Dataset.open(manifest.path, verify=False)
    with pytest.raises(DatasetCorrupt, match=f"{path.name} is damaged at record"), opened.reading():
        list(opened.dataset("train", 8))


def flip(data, at):
    data[at] ^= 1


def cut(data, at):
    del data[at:]


SPOILS = {
    "data": (lambda data, frame: flip(data, frame[2] + 30), 1),
    "length": (lambda data, frame: flip(data, frame[2] + 1), 1),
    "checksum of a length": (lambda data, frame: flip(data, frame[2] + 9), 1),
    "cut between two records": (lambda data, frame: cut(data, frame[-1]), 1),
    "cut within a record": (lambda data, frame: cut(data, frame[-2] + 5), 2),
    "zeros instead": (lambda data, frame: data.__setitem__(slice(frame[1], frame[3]), b"\0" * 9), 2),
}


@pytest.mark.parametrize(
    ("spoil", "options"),
    [(spoil, {}) for spoil in SPOILS]
    + [("data", {"shuffle": True, "seed": 1}), ("data", {"cache": True}), ("data", {"shard": (1, 5)})],
)
def test_what_is_whole_is_read_when_asked_for(spoil, options, pictures, run):
    spoil, lost = SPOILS[spoil]
    manifest = run(pictures(40))
    path = largest(manifest)
    whole = keys(Dataset.open(manifest.path).dataset("train", 8))
    starts, at = [], 0
    for record in frames(path):
        starts.append(at)
        at += len(record) + 16
    data = bytearray(path.read_bytes())
    spoil(data, starts)
    path.write_bytes(data)
    found = Dataset.open(manifest.path, on_corrupt="skip")
    shares = [(i, options["shard"][1]) for i in range(5)] if "shard" in options else [(0, 1)]
    read = [key for s in shares for key in keys(found.dataset("train", 4, **{**options, "shard": s}))]
    assert found.skipped == {path.name: lost}
    assert len(read) == found.count("train") == manifest.counts["train"] - lost
    assert len(set(read)) == len(read)
    assert set(read) < set(whole)
    # And it goes on where it was.
    size = found.batches("train", 4)
    if "shard" not in options:
        tail = keys(found.dataset("train", 4, start=size - 1, **options))
        assert tail == read[4 * (size - 1) :]


def test_without_being_asked_nothing_is_skipped(pictures, run):
    manifest = run(pictures(40))
    found = Dataset.open(manifest.path, on_corrupt="skip")
    assert len(keys(found.dataset("train", 8))) == manifest.counts["train"]
    assert found.skipped == {}
    with pytest.raises(InvalidOption, match="on_corrupt must be one of error, skip"):
        Dataset.open(manifest.path, on_corrupt="ignore")
    largest(manifest).unlink()
    with pytest.raises(DatasetCorrupt, match="is not there"):
        Dataset.open(manifest.path, on_corrupt="skip").dataset("train", 8)


def test_a_shard_cut_between_records_after_opening_ends_in_an_error(pictures, run):
    manifest = run(pictures(40))
    opened = Dataset.open(manifest.path)
    path = largest(manifest)
    data = path.read_bytes()
    path.write_bytes(data[: (len(next(iter(frames(path)))) + 16) * 2])
    with pytest.raises(DatasetCorrupt, match=f"{path.name} has .* bytes"), opened.reading():
        list(opened.dataset("train", 2))


def test_a_length_that_is_made_up_is_not_believed(tmp_path):
    path = tmp_path / "a.tfrecord"
    head = struct.pack("<Q", 1 << 40)
    path.write_bytes(head + struct.pack("<I", masked_crc(head)) + b"x" * 100)
    assert "more than 1 GB" in find_damage(path).problem
    assert len(salvage(path).starts) == 0
    path.write_bytes(b"")
    assert len(salvage(path).starts) == 0
