# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""The `blocks` layout: one ordinary tf.train.Example holds up to `block_rows` rows, column by column.

A record costs what it costs whatever is in it, and so does a feature; so training reads rows several times as
fast when they come by the block and their numbers packed. A block has these features:

    rows            int64_list, one value: how many rows
    float32         float_list: rows x width, row-major; the float32 features side by side, in schema order
    int64           int64_list: the same for the int64 features
    raw/NAME        bytes_list, one value: the raw bytes (pixels) of all rows, one after the other
    bytes/NAME      bytes_list: the values of a string, bytes or image feature; shape's size values a row
    missing/NAME    bytes_list, one value: a byte a row, 1 where the row has no value; only where one hasn't

A feature of shape [3] takes three columns of its kind's width. Where a row has no value, it holds the schema's
default or `schema.MISSING_VALUES`, which is what a reader of `rows` puts there; so both layouts read as the same
tensors. Lists of any length have no place in a block. `layout.BlockShape` says what lies where.

Rows are shuffled when they are written, within windows of about 16,384 rows or 32 MB of a shard, by a
permutation that depends on the shard's name and the window's number and nothing else: the same rows give the
same bytes, however they are cut into batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainers.records.encode import Encoder
from trainers.records.layout import BlockShape, missing_value
from trainers.records.schema import Feature, Schema
from trainers.records.split import hash_text, mix
from trainers.records.write import ShardWriter

__all__ = ["WINDOW_BYTES", "WINDOW_ROWS", "BlockWriter"]

WINDOW_ROWS = 16_384
WINDOW_BYTES = 32 << 20

_NUMBERS = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}  # the packed kinds


@dataclasses.dataclass
class _Part:
    """Some rows on their way into a window: nothing of it points into the batch that they came from."""

    rows: int
    numbers: dict[str, np.ndarray]
    raw: dict[str, np.ndarray]
    texts: dict[str, pa.Array]
    missing: dict[str, np.ndarray]


class BlockWriter:
    """Collects the rows of one shard into windows, and writes each as shuffled blocks."""

    def __init__(self, schema: Schema, writer: ShardWriter, encoder: Encoder, block_rows: int) -> None:
        self._shape = BlockShape.of(schema)
        self._writer = writer
        self._encoder = encoder
        self._block_rows = block_rows
        self._window_rows = block_rows * max(1, WINDOW_ROWS // block_rows)
        self._name = writer.path.name
        self._windows = 0
        self._parts: list[_Part] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in mapped rows; they are copied."""
        ends = np.cumsum(self._row_bytes(batch))
        first = 0
        while first < batch.num_rows:
            before = int(ends[first - 1]) if first else 0
            full = int(np.searchsorted(ends, WINDOW_BYTES - self._bytes + before)) + 1
            end = min(batch.num_rows, first + self._window_rows - self._rows, full)
            self._parts.append(self._part(batch.slice(first, end - first)))
            self._rows += end - first
            self._bytes += int(ends[end - 1]) - before
            first = end
            if self._rows >= self._window_rows or self._bytes >= WINDOW_BYTES:
                self._write_window()

    def finish(self) -> None:
        """Write what is left."""
        if self._rows:
            self._write_window()

    def _row_bytes(self, batch: pa.RecordBatch) -> np.ndarray:
        """About the bytes of each row; of the row alone, so that windows don't depend on batches."""
        shape = self._shape
        fixed = sum(_NUMBERS[kind].itemsize * width for kind, width in shape.widths.items())
        sizes = np.full(batch.num_rows, fixed + sum(feature.size for feature in shape.raw), np.int64)
        for feature in shape.texts:
            column = batch.column(feature.name)
            if feature.shape:
                items = pc.fill_null(pc.binary_length(column.flatten()), 0)
                parents = pc.list_parent_indices(column).to_numpy()
                lengths = np.bincount(parents, items.to_numpy(zero_copy_only=False), batch.num_rows)
            else:
                lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
            sizes += np.asarray(lengths, np.int64)
        return sizes

    def _part(self, rows: pa.RecordBatch) -> _Part:
        part = _Part(rows.num_rows, {}, {}, {}, {})
        for kind, features in self._shape.packed.items():
            matrix = np.empty((rows.num_rows, self._shape.widths[kind]), _NUMBERS[kind])
            for feature, at in features:
                _fill(matrix[:, at : at + feature.size], rows.column(feature.name), feature, part.missing)
            part.numbers[kind] = matrix
        for feature in self._shape.raw:
            array = rows.column(feature.name)
            data = np.frombuffer(array.buffers()[1], np.uint8)
            first = array.offset * feature.size
            pixels = data[first : first + len(array) * feature.size].reshape(len(array), feature.size)
            part.raw[feature.name] = pixels.copy()
        for feature in self._shape.texts:
            part.texts[feature.name] = _text(rows.column(feature.name), feature, part.missing)
        return part

    def _write_window(self) -> None:
        seed = hash_text([f"{self._name}:{self._windows}"])[0]
        # Sorting by hashes rather than a library's shuffle, which its next version may do otherwise.
        order = np.argsort(mix(seed ^ mix(np.arange(self._rows, dtype=np.uint64))), kind="stable")
        bounds = np.append(np.arange(0, self._rows, self._block_rows), self._rows)
        columns = dict(self._columns(order, bounds))
        encoded = self._encoder.encode(pa.RecordBatch.from_pydict(columns))
        self._writer.write(memoryview(encoded.data), self._rows)
        self._windows += 1
        self._parts, self._rows, self._bytes = [], 0, 0

    def _columns(self, order: np.ndarray, bounds: np.ndarray) -> Iterator[tuple[str, pa.Array]]:
        yield "rows", pa.array(np.diff(bounds))
        for kind, width in self._shape.widths.items():
            values = np.concatenate([part.numbers[kind] for part in self._parts])[order]
            yield kind, pa.LargeListArray.from_arrays(pa.array(bounds * width), pa.array(values.reshape(-1)))
        for feature in self._shape.raw:
            pixels = np.concatenate([part.raw[feature.name] for part in self._parts])[order]
            yield f"raw/{feature.name}", _bytes_of(pixels, bounds * feature.size)
        for feature in self._shape.texts:
            values = pa.concat_arrays([part.texts[feature.name] for part in self._parts])
            taken = order if not feature.shape else _rows_to_items(order, feature.size)
            offsets = pa.array(bounds * feature.size)
            yield (
                f"bytes/{feature.name}",
                pa.LargeListArray.from_arrays(offsets, values.take(pa.array(taken))),
            )
        for name in sorted({name for part in self._parts for name in part.missing}):
            none = [part.missing.get(name, np.zeros(part.rows, np.uint8)) for part in self._parts]
            missing = np.concatenate(none)[order]
            marked = np.add.reduceat(missing, bounds[:-1], dtype=np.int64) > 0
            blocks = _bytes_of(missing, bounds)
            yield f"missing/{name}", pc.if_else(pa.array(marked), blocks, pa.scalar(None, pa.large_binary()))


def _fill(out: np.ndarray, array: pa.Array, feature: Feature, missing: dict[str, np.ndarray]) -> None:
    """Copy a column's numbers into its place in the matrix, and the default where there are none."""
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        missing[feature.name] = (~valid).view(np.uint8)
        out[:] = missing_value(feature)
        items = array.flatten() if feature.shape else array.drop_null()
        out[valid] = items.to_numpy(zero_copy_only=False).reshape(-1, feature.size)
    else:
        items = array.flatten() if feature.shape else array
        out[:] = items.to_numpy(zero_copy_only=False).reshape(-1, feature.size)


def _text(array: pa.Array, feature: Feature, missing: dict[str, np.ndarray]) -> pa.Array:
    """A column's byte values, its own copy, with the default where there are none."""
    none = pa.scalar(str(missing_value(feature)).encode(), pa.large_binary())
    if array.null_count:
        missing[feature.name] = array.is_null().to_numpy(zero_copy_only=False).view(np.uint8)
    if feature.shape:
        if array.null_count:
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            index = np.full((len(array), feature.size), -1)
            index[valid] = np.arange(int(valid.sum()) * feature.size).reshape(-1, feature.size)
            array = array.flatten().cast(pa.large_binary())
            return pc.fill_null(array.take(pa.array(index.reshape(-1), mask=index.reshape(-1) < 0)), none)
        array = array.flatten()
    values = array.cast(pa.large_binary())
    return pc.fill_null(values.take(pa.array(np.arange(len(values)))), none)


def _rows_to_items(rows: np.ndarray, size: int) -> np.ndarray:
    return (rows[:, None] * size + np.arange(size)).reshape(-1)


def _bytes_of(data: np.ndarray, bounds: np.ndarray) -> pa.Array:
    """Bytes cut at bounds, without a copy."""
    offsets = pa.py_buffer(np.ascontiguousarray(bounds, "<i8"))
    return pa.Array.from_buffers(
        pa.large_binary(), len(bounds) - 1, [None, offsets, pa.py_buffer(np.ascontiguousarray(data))]
    )
