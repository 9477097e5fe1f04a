# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Rows of a dataset as what a server is sent: serialised tf.train.Examples, a row each, whatever its layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trainers.records.encode import Encoder
from trainers.records.masks import mask_name
from trainers.records.schema import Feature

if TYPE_CHECKING:
    from trainers.records.read import RecordsDataset

__all__ = ["examples"]

_LENGTH, _FRAME = 12, 16  # bytes before an Example in a TFRecord, and around it


def examples(records: RecordsDataset, split: str, batch: int) -> Iterator[Any]:
    """Batches of up to `batch` serialised rows of a split, as NumPy arrays of bytes; of blocks each is made anew."""
    import tensorflow as tf

    if records.manifest.options.get("layout", "rows") == "rows":
        paths = [str(records.manifest.folder / shard.file) for shard in records.manifest.split(split)]
        found = tf.data.TFRecordDataset(
            paths, compression_type=records.manifest.options.get("compression", "")
        )
        yield from found.batch(batch).as_numpy_iterator()
        return
    stored = type(records)(
        records.manifest, records.stored
    )  # as the records hold it, whatever schema is wanted
    encoder = Encoder()
    for rows in stored.dataset(split, batch, masks=True):
        columns = {f.name: _column(rows, f) for f in records.stored}
        encoded = encoder.encode(pa.RecordBatch.from_pydict(columns))
        data, ends = memoryview(encoded.data), encoded.offsets.tolist()
        made = [bytes(data[a + _LENGTH : b - _FRAME + _LENGTH]) for a, b in itertools.pairwise(ends)]
        yield np.array(made, object)


def _column(rows: Any, feature: Feature) -> pa.Array:
    """A feature's values as they were encoded; none where its mask says so."""
    values = rows[feature.name].numpy()
    mask = rows.get(mask_name(feature.name))
    none = np.zeros(len(values), bool) if mask is None else mask.numpy() > 0
    if feature.encoding == "raw":
        return pa.array([value.tobytes() for value in values], pa.binary())
    kind = {"float32": pa.float32(), "int64": pa.int64()}.get(feature.type, pa.binary())
    if not feature.shape:
        return pa.array(values, kind, mask=none)
    lists = [None if gone else value.reshape(-1).tolist() for value, gone in zip(values, none, strict=True)]
    return pa.array(lists, pa.large_list(kind))
