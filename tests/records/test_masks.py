"""Masks say where values are missing: the same from rows and blocks, and from what a server is sent."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from trainers.records.convert import feature_of
from trainers.records.errors import ColumnError, InvalidOption
from trainers.records.frames import frames
from trainers.records.read import Dataset
from trainers.records.schema import Schema

ROWS = 400


@pytest.fixture
def table():
    rng = np.random.default_rng(5)

    def some(values, kind=None):
        return pa.array(values, kind, mask=rng.random(ROWS) < 0.2)

    return pa.table(
        {
            "id": np.arange(ROWS),
            "km": some(rng.normal(size=ROWS).astype("f4")),
            "stops": some(rng.integers(-1, 3, ROWS)),
            "zone": some([["", "a", "b"][i % 3] for i in range(ROWS)]),
            "pair": some([[i, -i] for i in range(ROWS)], pa.list_(pa.int64())),
            "y": rng.integers(0, 2, ROWS),
        }
    )


@pytest.fixture
def both(table, tmp_path, run):
    """The same rows in both layouts."""
    pq.write_table(table, tmp_path / "raw.parquet", row_group_size=150)
    features = [feature_of(field.name, field.type) for field in table.schema]
    required = ("id", "y")
    features = [
        dataclasses.replace(
            f,
            presence="required" if f.name in required else "optional",
            shape=(2,) if f.name == "pair" else (),
            default=7 if f.name == "stops" else None,
        )
        for f in features
    ]
    (tmp_path / "schema.json").write_text(json.dumps(Schema(tuple(features)).to_dict()))
    options = {
        "schema": tmp_path / "schema.json",
        "key": "id",
        "label": "y",
        "shards": 3,
        "eval_fraction": 0.0,
    }
    rows = run(tmp_path / "raw.parquet", **options)
    blocks = run(tmp_path / "raw.parquet", layout="blocks", block_rows=32, **options)
    return Dataset.open(rows.path), Dataset.open(blocks.path)


def by_id(batches):
    """Each row's values by its id, as bytes."""
    found = {}
    for batch in batches:
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}
        for i, row in enumerate(arrays["id"].tolist()):
            found[row] = {n: a[i] if a.dtype == object else a[i].tobytes() for n, a in arrays.items()}
    return found


def test_masks_say_where_values_are_missing_in_both_layouts(both, table):
    masks = {f"{name}_missing" for name in ("km", "stops", "zone", "pair")}
    for options in ({}, {"shuffle": True, "seed": 1}, {"cache": True}, {"shard": (1, 2)}, {"start": 3}):
        want, got = (d.dataset("train", 50, masks=True, **options) for d in both)
        assert got.element_spec == want.element_spec
        assert set(got.element_spec) == {*table.column_names, *masks}
        assert got.element_spec["km_missing"].dtype == tf.int64
        if "shard" not in options and "start" not in options:
            assert by_id(got) == by_id(want)
    for data in both:
        found = by_id(data.dataset("train", 64, masks=True))
        assert len(found) == ROWS
        for name in ("km", "stops", "zone", "pair"):
            none = {i for i, value in enumerate(table[name].to_pylist()) if value is None}
            assert {i for i, row in found.items() if np.frombuffer(row[f"{name}_missing"], "i8")} == none
        # What stands there is what stands there without masks: the schema's default, -1 and "" that are values too.
        plain = by_id(data.dataset("train", 64))
        assert {i: {n: v for n, v in row.items() if n not in masks} for i, row in found.items()} == plain


def test_only_those_that_are_named_and_none_unasked(both, table):
    for data in both:
        assert set(data.dataset("train", 8).element_spec) == set(table.column_names)
        spec = data.dataset("train", 8, masks=["km", "y"]).element_spec
        assert set(spec) - set(table.column_names) == {"km_missing", "y_missing"}
        (batch,) = data.dataset("train", ROWS, masks=["y"])
        assert not np.any(batch["y_missing"])  # a required feature is never missing
        with pytest.raises(ColumnError):
            data.dataset("train", 8, masks=["nothing"])


def test_what_a_server_is_sent_has_the_same_masks(both, table):
    rows = both[0]
    examples = tf.constant([r for s in rows.manifest.shards for r in frames(rows.manifest.folder / s.file)])
    want = by_id(rows.dataset("train", 64, masks=True))
    for data in both:
        parse = tf.function(data.with_masks().parse)
        assert by_id([parse(examples)]) == want
    long = tf.train.Example()
    long.features.feature["km"].float_list.value.extend([1.0, 2.0])
    for name in ("id", "y"):
        long.features.feature[name].int64_list.value.append(1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="km must have 1 values or none"):
        parse(tf.constant([long.SerializeToString()]))


def test_a_newer_schema_masks_what_older_records_lack(both):
    for data in both:
        newer = [dataclasses.replace(f, type="float32") if f.name == "stops" else f for f in data.schema]
        newer.append(dataclasses.replace(data.schema["km"], name="speed", default=1.5))
        grown = Dataset.open(data.manifest.path, schema=Schema(tuple(newer)))
        (old,) = data.dataset("train", ROWS, masks=True)
        (new,) = grown.dataset("train", ROWS, masks=True)
        assert new["speed"].numpy().tolist() == [1.5] * ROWS
        assert new["speed_missing"].numpy().tolist() == [1] * ROWS
        assert new["stops"].dtype == tf.float32
        assert new["stops_missing"].numpy().tolist() == old["stops_missing"].numpy().tolist()


def test_a_mask_whose_name_is_taken_is_refused(both):
    data = both[0]
    taken = [*data.schema, dataclasses.replace(data.schema["km"], name="km_missing")]
    schema = Schema(tuple(taken))
    with pytest.raises(InvalidOption, match="km_missing is a feature itself"):
        Dataset.open(data.manifest.path, schema=schema).with_masks(["km"])
