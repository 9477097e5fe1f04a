"""The blocks layout: written the same however rows come, and read as rows are."""

import dataclasses
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from trainers.records import blocks as blocks_module
from trainers.records.convert import feature_of
from trainers.records.errors import InvalidOption
from trainers.records.examples import examples
from trainers.records.frames import frames
from trainers.records.read import Dataset
from trainers.records.schema import Schema

ROWS = 1000


def raw(count=ROWS):
    """Every kind of feature that a block holds, with nulls in each that may have them."""
    rng = np.random.default_rng(11)

    def some(values, kind=None):
        return pa.array(values, kind, mask=rng.random(count) < 0.2)

    return pa.table(
        {
            "id": np.arange(count),
            "x": rng.normal(size=count),
            "gap": some(rng.normal(size=count).astype("f4")),
            "whole": some(rng.integers(-(2**62), 2**62, count)),
            "word": some([["", "é", "red", "y" * 40][i % 4] for i in range(count)]),
            "data": some([bytes([i % 256]) * (i % 5) for i in range(count)]),
            "three": some(rng.normal(size=(count, 3)).tolist(), pa.list_(pa.float32())),
            "pair": some([[i, -i] for i in range(count)], pa.list_(pa.int64())),
            "words": some([[f"a{i}", "b"] for i in range(count)], pa.list_(pa.string())),
            "y": rng.integers(0, 2, count),
        }
    )


@pytest.fixture
def source(tmp_path):
    pq.write_table(raw(), tmp_path / "raw.parquet", row_group_size=300)
    return tmp_path / "raw.parquet"


@pytest.fixture
def schema(tmp_path):
    """Fixes the shapes of lists, which Parquet can't hold together with nulls."""
    shapes = {"three": (3,), "pair": (2,), "words": (2,)}
    features = [feature_of(field.name, field.type) for field in raw().schema]
    features = [dataclasses.replace(f, shape=shapes.get(f.name, ()), presence="optional") for f in features]
    required = {"id", "x", "y"}
    features = [dataclasses.replace(f, presence="required") if f.name in required else f for f in features]
    (tmp_path / "schema.json").write_text(json.dumps(Schema(tuple(features)).to_dict()))
    return tmp_path / "schema.json"


@pytest.fixture
def run(run, schema):
    """`prepare` with the schema, unless one says otherwise."""

    def call(source, **options):
        given = schema if source.name == "raw.parquet" else None
        return run(source, **{"schema": given, **options})

    return call


@pytest.fixture
def both(source, run):
    """The same rows in both layouts."""
    options = {"key": "id", "shards": 3}
    rows = run(source, **options)
    blocks = run(source, layout="blocks", block_rows=64, **options)
    return Dataset.open(rows.path), Dataset.open(blocks.path)


def values(batches, key="id"):
    """Rows by their key, as bytes, so that NaN equals NaN; nothing may come twice."""
    found = {}
    for batch in batches:
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}
        for i, row in enumerate(arrays[key].tolist()):
            assert row not in found
            found[row] = {
                name: np.asarray(a[i]).tolist() if a.dtype == object else a[i].tobytes()
                for name, a in arrays.items()
            }
    return found


def order(batches, key="id"):
    return [row for batch in batches for row in batch[key].numpy().tolist()]


def test_both_layouts_read_the_same(both):
    rows, blocks = both
    assert rows.manifest.counts == blocks.manifest.counts
    assert rows.manifest.statistics == blocks.manifest.statistics
    assert rows.schema == blocks.schema
    for split in ("train", "eval"):
        for drop in (False, True):
            want = rows.dataset(split, 50, drop_remainder=drop)
            got = blocks.dataset(split, 50, drop_remainder=drop)
            assert got.element_spec == want.element_spec
            assert list(got.element_spec) == list(want.element_spec)
        want = values(rows.dataset(split, 50))
        assert len(want) == rows.count(split)
        assert values(blocks.dataset(split, 50)) == want
        # However it is cut, shuffled or cached.
        assert values(blocks.dataset(split, 7)) == want
        assert values(blocks.dataset(split, 5000)) == want
        assert values(blocks.dataset(split, 64, shuffle=True)) == want
        assert values(blocks.dataset(split, 33, cache=True)) == want
        assert values(blocks.dataset(split, 33, cache=True, shuffle=True)) == want
    # What serving gets is rows, whatever training read.
    examples = tf.constant(list(frames(rows.manifest.folder / rows.manifest.shards[0].file)))
    assert values([blocks.parse(examples)]) == values([rows.parse(examples)])
    assert blocks.feature_spec() == rows.feature_spec()


def test_rows_come_as_examples_from_both_layouts(both):
    rows, blocks = both
    for split in ("train", "eval"):
        want, got = (np.concatenate(list(examples(data, split, 37))) for data in both)
        assert len(got) == len(want) == rows.count(split)
        assert values([blocks.parse(tf.constant(got))]) == values([rows.parse(tf.constant(want))])
        # Those that lack a value lack it again.
        masked = rows.with_masks()
        assert values([masked.parse(tf.constant(got))]) == values([masked.parse(tf.constant(want))])


def test_shares_leave_nothing_out_and_nothing_twice(both):
    _, blocks = both
    everything = sorted(order(blocks.dataset("train", 32)))
    shuffled = {"shuffle": True, "seed": 3}
    for workers, options in ((2, shuffled), (4, {}), (4, shuffled), (4, {"cache": True})):  # of 3 files
        seen = []
        for i in range(workers):
            share = order(blocks.dataset("train", 32, shard=(i, workers), **options))
            assert len(share) == blocks.count("train", shard=(i, workers))
            seen += share
        assert sorted(seen) == everything


def test_a_seed_makes_the_order(both):
    _, blocks = both
    for cache, shard in ((False, (0, 1)), (False, (2, 5)), (True, (1, 2))):
        per_epoch = blocks.count("train", shard=shard)

        def epochs(seed, cache=cache, shard=shard, per_epoch=per_epoch):
            data = blocks.dataset("train", 1, shuffle=True, seed=seed, repeat=True, cache=cache, shard=shard)
            found = order(data.take(2 * per_epoch))
            return found[:per_epoch], found[per_epoch:]

        first, second = epochs(1)
        assert epochs(1) == (first, second)
        assert first != second
        assert sorted(first) == sorted(second)
        assert epochs(2)[0] != first
        assert first != order(blocks.dataset("train", 1, shard=shard))


def test_epochs_end_with_what_is_left(both):
    _, blocks = both
    count = blocks.count("train")
    sizes = [len(b["id"]) for b in blocks.dataset("train", 300)]
    assert sizes == [300] * (count // 300) + [count % 300]
    per_epoch = len(sizes)
    sizes = [len(b["id"]) for b in blocks.dataset("train", 300, repeat=True).take(2 * per_epoch)]
    assert sizes[:per_epoch] == sizes[per_epoch:]
    assert [len(b["id"]) for b in blocks.dataset("train", 300, drop_remainder=True)] == [300] * (count // 300)


def test_an_older_dataset_is_read_by_a_newer_schema_as_rows_are(both, tmp_path):
    _, blocks = both
    newer = json.loads((blocks.manifest.folder / "schema.json").read_text())
    for feature in newer["features"]:
        feature |= {"whole": {"type": "float32"}, "gap": {"default": 7.5}}.get(feature["name"], {})
    newer["features"].append(
        {
            "name": "added",
            "type": "int64",
            "shape": [],
            "encoding": "plain",
            "presence": "optional",
            "default": 3,
        }
    )
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(newer))
    want, got = (Dataset.open(data.manifest.path, schema=path).dataset("train", 50) for data in both)
    assert got.element_spec == want.element_spec
    assert values(got) == values(want)
    assert values(got) != values(blocks.dataset("train", 50))


def test_it_goes_on_where_it_was(both):
    _, blocks = both
    options = {"shuffle": True, "seed": 5, "repeat": True}
    per_epoch = blocks.batches("train", 90)
    whole = [order([b]) for b in blocks.dataset("train", 90, **options).take(2 * per_epoch)]
    for start in (3, per_epoch + 2):
        rest = blocks.dataset("train", 90, start=start, **options).take(2 * per_epoch - start)
        assert [order([b]) for b in rest] == whole[start:]


def test_whole_blocks_of_a_damaged_shard_are_read_when_asked(both):
    _, blocks = both
    shard = blocks.manifest.split("train")[0]
    path = blocks.manifest.folder / shard.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    skipping = Dataset.open(blocks.manifest.path, on_corrupt="skip")
    read = order(skipping.dataset("train", 50))
    assert sum(skipping.skipped.values()) == 64
    assert len(read) == skipping.count("train") == blocks.manifest.counts["train"] - 64
    damage = blocks.damage()
    assert shard.file in damage.file


@pytest.mark.parametrize("image", ["raw", "encoded"])
def test_pictures(image, pictures, run):
    folder = pictures(40)
    rows = Dataset.open(run(folder, label="digit", image=image).path)
    blocks = Dataset.open(run(folder, label="digit", image=image, layout="blocks", block_rows=7).path)
    want, got = rows.dataset("train", 8), blocks.dataset("train", 8)
    assert got.element_spec == want.element_spec
    assert values(got, "key") == values(want, "key")


# Writing ----------------------------------------------------------------------------------------------------


def records(manifest):
    return [list(frames(manifest.folder / s.file)) for s in manifest.shards]


def test_bytes_do_not_depend_on_batches(source, run, tmp_path):
    options = {"key": "id", "layout": "blocks", "block_rows": 100, "name": "one"}
    digests = set()
    for batch_rows in (8192, 77):
        manifest = run(source, batch_rows=batch_rows, **options)
        digests.add(manifest.digest)
        manifest.path.unlink()
    assert len(digests) == 1


def test_blocks_are_ordinary_examples_with_rows_shuffled(source, run):
    manifest = run(source, key="id", layout="blocks", block_rows=128, eval_fraction=0, shards=1)
    (shard,) = records(manifest)
    assert len(shard) == -(-ROWS // 128)
    ids, counts, masked = [], [], 0
    for data in shard:
        features = tf.train.Example.FromString(data).features.feature
        count = features["rows"].int64_list.value[0]
        counts.append(count)
        integers = np.array(features["int64"].int64_list.value).reshape(count, -1)
        assert integers.shape[1] == 5  # id, whole, pair (2), y
        assert len(features["float32"].float_list.value) == count * 5  # x, gap, three
        assert len(features["bytes/words"].bytes_list.value) == 2 * count
        mask = np.frombuffer(features["missing/whole"].bytes_list.value[0], np.uint8)
        assert (integers[mask == 1, 1] == -1).all()
        masked += int(mask.sum())
        ids += integers[:, 0].tolist()
        assert "missing/x" not in features
    assert counts == [128] * (ROWS // 128) + [ROWS % 128]
    assert sorted(ids) == list(range(ROWS))
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(ids)) < ROWS / 20
    assert masked == raw()["whole"].null_count
    assert shard == records(manifest)[0]


def test_windows_are_bounded_by_rows_and_by_bytes(source, run, monkeypatch):
    options = {"key": "id", "layout": "blocks", "block_rows": 50, "eval_fraction": 0, "shards": 1}

    def places(manifest):
        data = Dataset.open(manifest.path).dataset("train", ROWS)
        return np.array(order(data))

    monkeypatch.setattr(blocks_module, "WINDOW_ROWS", 100)
    by_rows = places(run(source, name="rows", **options))
    assert (by_rows // 100 == np.arange(ROWS) // 100).all()
    monkeypatch.setattr(blocks_module, "WINDOW_ROWS", 16_384)
    monkeypatch.setattr(blocks_module, "WINDOW_BYTES", 20_000)
    found = set()
    for batch_rows in (8192, 13):
        manifest = run(source, name="bytes", batch_rows=batch_rows, **options)
        by_bytes = places(manifest)
        assert sorted(by_bytes) == list(range(ROWS))
        assert np.abs(by_bytes - np.arange(ROWS)).max() < 400  # far less than all
        found.add(manifest.digest)
        manifest.path.unlink()
    assert len(found) == 1


def test_lists_of_any_length_are_refused_before_anything_is_written(run, table, tmp_path):
    pq.write_table(table(), tmp_path / "raw.parquet")
    with pytest.raises(InvalidOption, match=r"layout must be rows for .* \(tags\), which no block can hold"):
        run(tmp_path / "raw.parquet", layout="blocks", schema=None)
    assert not list((tmp_path / "out").rglob("*.tfrecord*"))


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("layout", "columns", "layout must be one of rows, blocks, got 'columns'"),
        ("block_rows", 0, "block_rows must be a whole number from 1 to 65536, got 0"),
        ("processes", 0, "processes must be a whole number from 1 to 256, got 0"),
    ],
)
def test_options_are_checked(option, value, problem, run, tmp_path):
    with pytest.raises(InvalidOption, match=problem):
        run(tmp_path, **{option: value})
