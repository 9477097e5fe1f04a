"""Records to tensors through TensorFlow."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image

from trainers.job.failures import FailureClass
from trainers.records.errors import DatasetCorrupt, DatasetMissing, InvalidOption
from trainers.records.frames import Damage, find_damage, frames
from trainers.records.read import Dataset, RecordsDataset


@pytest.fixture
def dataset(pictures, run):
    return Dataset.open(run(pictures(90), label="digit", shards=3).path)


def keys(data):
    return [key.decode() for batch in data for key in batch["key"].numpy()]


def test_pixels_come_back(dataset, tmp_path):
    assert dataset.label == "digit"
    seen = 0
    for split in ("train", "eval"):
        for batch in dataset.dataset(split, 16):
            assert batch["image"].dtype == tf.uint8
            assert batch["image"].shape[1:] == (4, 6, 1)
            for image, label, key in zip(*(batch[n].numpy() for n in ("image", "digit", "key")), strict=True):
                path = tmp_path / "pictures" / key.decode()
                assert (np.asarray(Image.open(path)) == image[:, :, 0]).all()
                assert label == int(path.parent.name)
                seen += 1
    assert seen == 90


def test_spec_and_decode_stand_alone_as_in_an_export(dataset):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def serve(examples):
        spec = {name: spec for name, spec in dataset.feature_spec().items() if name == "image"}
        return dataset.decode(tf.io.parse_example(examples, spec))

    shard = dataset.manifest.split("eval")[0]
    examples = list(frames(dataset.manifest.folder / shard.file))
    assert serve(tf.constant(examples))["image"].shape == (shard.records, 4, 6, 1)
    assert serve(tf.constant([], tf.string))["image"].shape == (0, 4, 6, 1)


@pytest.mark.parametrize("cache", [False, True])
def test_order(dataset, cache):
    count = dataset.count("train")
    plain = keys(dataset.dataset("train", 7, cache=cache))
    assert len(plain) == len(set(plain)) == count
    shuffled = dataset.dataset("train", 7, shuffle=True, seed=3, repeat=True, cache=cache)
    steps = -(-count // 7)
    first, second = keys(shuffled.take(steps)), keys(shuffled.take(2 * steps))[count:]
    assert sorted(first) == sorted(second) == sorted(plain)
    assert plain != first != second  # each epoch has an order of its own
    again = dataset.dataset("train", 7, shuffle=True, seed=3, repeat=True, cache=cache)
    assert keys(again.take(steps)) == first
    other = dataset.dataset("train", 7, shuffle=True, seed=4, cache=cache)
    assert keys(other) != first
    unseeded = dataset.dataset("train", count, shuffle=True, cache=cache)
    assert sorted(keys(unseeded)) == sorted(plain)


@pytest.mark.parametrize(("workers", "cache"), [(2, True), (3, False), (4, True), (7, False)])
def test_shares_leave_nothing_out_and_nothing_twice(dataset, workers, cache):
    parts = []
    for index in range(workers):
        part = keys(dataset.dataset("train", 5, shard=(index, workers), shuffle=True, seed=1, cache=cache))
        assert len(part) == dataset.count("train", shard=(index, workers))
        parts += part
    assert sorted(parts) == sorted(keys(dataset.dataset("train", 50)))


@pytest.mark.parametrize("cache", [False, True])
def test_remainders(dataset, cache):
    count = dataset.count("train")
    sizes = [len(b["digit"]) for b in dataset.dataset("train", 16, cache=cache)]
    assert sizes[-1] == count % 16 > 0
    dropped = dataset.dataset("train", 16, drop_remainder=True, cache=cache)
    assert {len(b["digit"]) for b in dropped} == {16}
    assert dropped.element_spec["digit"].shape == (16,)


@pytest.mark.parametrize(
    ("split", "batch", "options"),
    [
        ("train", 0, {}),
        ("train", 2.5, {}),
        ("test", 8, {}),
        ("train", 8, {"shard": (2, 2)}),
        ("train", 8, {"shard": (0, 0)}),
        ("train", 1, {"shard": (999, 1000)}),
        ("train", 1000, {"drop_remainder": True}),
    ],
)
def test_what_would_be_empty_or_wrong_is_refused(dataset, split, batch, options):
    with pytest.raises(InvalidOption) as e:
        dataset.dataset(split, batch, **options)
    assert e.value.failure_class is FailureClass.CONFIG


def test_strategies_leave_our_shares_alone(dataset):
    options = dataset.dataset("train", 8).options()
    assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF


def test_it_works_inside_a_function_as_a_coordinator_calls_it(dataset):
    @tf.function
    def total():
        data = dataset.dataset("train", 8, cache=True, shuffle=True, seed=1, shard=(1, 2))
        return data.reduce(tf.constant(0, tf.int64), lambda n, batch: n + tf.size(batch["key"], tf.int64))

    assert total() == dataset.count("train", shard=(1, 2))


def test_tables_with_lists_and_missing_values(run, tmp_path):
    data = pa.table(
        {
            "id": range(40),
            "x": [None if i % 4 == 0 else i / 2 for i in range(40)],
            "n": pa.array([None if i % 5 == 0 else i for i in range(40)]),
            "s": [None if i % 2 else f"s{i}" for i in range(40)],
            "tags": [["a"] * (i % 3) for i in range(40)],
            "pair": pa.array([[i, i + 1] for i in range(40)], pa.list_(pa.float32(), 2)),
            "blob": [bytes([i]) for i in range(40)],
            "y": range(40),
        }
    )
    pq.write_table(data, tmp_path / "a.parquet")
    records = RecordsDataset.open(run(tmp_path / "a.parquet", key="id").path)
    for options in ({}, {"cache": True, "shuffle": True, "seed": 1}):
        seen = 0
        for batch in records.dataset("train", 6, **options):
            for at, i in enumerate(batch["id"].numpy().tolist()):
                row = {name: batch[name][at].numpy() for name in ("x", "n", "s", "pair", "blob", "y")}
                assert np.isnan(row["x"]) if i % 4 == 0 else row["x"] == i / 2
                assert row["n"] == (-1 if i % 5 == 0 else i)
                assert row["s"] == (b"" if i % 2 else f"s{i}".encode())
                assert row["pair"].tolist() == [i, i + 1]
                assert row["blob"] == bytes([i])
                assert batch["tags"][at].numpy().tolist() == [b"a"] * (i % 3)
                seen += 1
        assert seen == records.count("train")


def test_encoded_pictures(pictures, run):
    records = Dataset.open(run(pictures(10), image="encoded").path)
    batch = next(iter(records.dataset("train", 2)))
    assert tf.io.decode_png(batch["image"][0]).shape == (4, 6, 1)


# Damage -----------------------------------------------------------------------------------------------------


def first_shard(dataset):
    return dataset.manifest.folder / dataset.manifest.split("train")[0].file


def test_no_dataset(tmp_path):
    with pytest.raises(DatasetMissing):
        Dataset.open(tmp_path)


def test_a_shard_cut_between_records_is_seen_at_once(dataset):
    path = first_shard(dataset)
    size = sum(len(frame) + 16 for frame in list(frames(path))[:-1])
    with path.open("r+b") as f:
        f.truncate(size)
    assert find_damage(path) is None  # nothing is wrong with what is left: only the manifest knows
    with pytest.raises(DatasetCorrupt, match=f"{path.name} has {size} bytes, its manifest says"):
        Dataset.open(dataset.manifest.path, verify=False)
    assert "bytes, its manifest says" in str(dataset.damage())


def test_a_flipped_byte_is_seen_when_opening_or_names_the_shard_when_reading(dataset):
    path = first_shard(dataset)
    second = len(next(iter(frames(path)))) + 16
    data = bytearray(path.read_bytes())
    data[second + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetCorrupt, match=f"{path.name} has SHA-256"):
        Dataset.open(dataset.manifest.path)
    opened = Dataset.open(dataset.manifest.path, verify=False)
    with (
        pytest.raises(DatasetCorrupt, match=f"{path.name} is damaged at record 1, byte {second}.*again"),
        opened.reading(),
    ):
        list(opened.dataset("train", 8))
    (dataset.manifest.folder / path.name).unlink()
    with pytest.raises(DatasetCorrupt, match=f"{path.name} is not there"), opened.reading():
        list(opened.dataset("train", 8))


def test_errors_that_are_not_the_datas_pass_through(dataset):
    assert dataset.damage() is None
    with pytest.raises(tf.errors.InvalidArgumentError), dataset.reading():
        tf.io.decode_png(b"x")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda data: data[:-3], "the file ends within a record"),
        (lambda data: data + b"\x01\x02", "the file ends within a record's head"),
        (lambda data: b"\xff" + data[1:], "the checksum of a record's length is wrong"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "a record's checksum is wrong"),
    ],
)
def test_where_a_file_is_damaged(spoil, problem, tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"one")
        writer.write(b"two")
    assert list(frames(path)) == [b"one", b"two"]
    path.write_bytes(spoil(path.read_bytes()))
    damage = find_damage(path)
    assert isinstance(damage, Damage)
    assert damage.problem == problem


def test_missing_values_are_written_into_no_json(dataset):
    # NaN is no JSON: defaults live in code, not in schema.json.
    text = (dataset.manifest.folder / "schema.json").read_text()
    assert "NaN" not in text
    json.loads(text)
