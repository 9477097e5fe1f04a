# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Pairs of arrays, one of examples and one of labels: NumPy's .npy, and IDX, the format of MNIST.

    train-images-idx3-ubyte.gz  train-labels-idx1-ubyte.gz  t10k-images-idx3-ubyte.gz  t10k-labels-idx1-ubyte.gz
    images.npy  labels.npy            x_train.npy  y_train.npy

A name has a word for what it holds (image, images, x, data, features; label, labels, y, target, targets); files
whose other words agree are a pair. Bytes of two dimensions and more are pictures [height, width, channels]; other
numbers are features of the array's shape. The key of an example is its place: "train-images/17".

Headers are checked against the files' sizes. Arrays of Python objects are refused: pickles are never loaded.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainers.records.errors import ColumnError, SourceEmpty, SourceUnreadable
from trainers.records.files import SourceFile, read_errors
from trainers.records.schema import Feature, Schema
from trainers.records.source import Batch

__all__ = ["KEY", "ArrayPairs"]

_HINT = "copy the file again"

KEY = "key"
_DATA = {"images": "image", "image": "image", "x": "x", "data": "data", "features": "features"}
_LABELS = ("labels", "label", "y", "target", "targets")
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PART = 16_384  # examples of an array without compression that are read on their own
_BATCH_BYTES = 32 << 20
_MOST_DIMENSIONS = 8


@dataclasses.dataclass(frozen=True)
class Array:
    """The header of a file: type, shape, and where the first value lies."""

    file: SourceFile
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of an example."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, first: int, end: int, step: int) -> Iterator[np.ndarray]:
        """Examples of a range, `step` at a time."""
        opened = self.file.stream() if self.file.compression else self.file.seekable()
        with opened as stream:
            if self.file.compression:
                stream.read(self.start)  # a compressed file is one part: it is read from its first example
            else:
                stream.seek(self.start + first * self.row_bytes)
            for at in range(first, end, step):
                count = min(step, end - at)
                data = stream.read(count * self.row_bytes)
                if len(data) < count * self.row_bytes:
                    self.file.check_unchanged()
                    raise SourceUnreadable(
                        self.file.location,
                        f"ends before example {at + len(data) // max(1, self.row_bytes) + 1} of {self.shape[0]}",
                        hint="copy the file again",
                    )
                yield np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])
            if self.file.compression and stream.read(1):
                raise SourceUnreadable(
                    self.file.location, "goes on after its last value", hint="copy the file again"
                )


@dataclasses.dataclass(frozen=True)
class _Pair:
    name: str
    feature: str
    data: Array
    labels: Array


class ArrayPairs:
    """A source of pairs of arrays."""

    def __init__(self, source: Path | str, files: Sequence[SourceFile], *, label: str) -> None:
        self.source = source
        self.files = files
        self.label = label
        self._pairs = _pairs(str(source), files)
        names = {pair.feature for pair in self._pairs} | {KEY}
        if label in names:
            raise ColumnError(label, f"is taken: the arrays make the features {', '.join(sorted(names))}")
        self._parts = [part for pair in self._pairs for part in self._parts_of(pair)]

    @staticmethod
    def _parts_of(pair: _Pair) -> list[tuple[_Pair, int, int]]:
        count = pair.data.shape[0]
        step = count if pair.data.file.compression or pair.labels.file.compression else _PART
        return [(pair, first, min(first + step, count)) for first in range(0, count, max(1, step))]

    def infer(self) -> Schema:
        """The examples' feature, the label and the key; one shape and type in all pairs."""
        found = [
            (_feature(p.feature, p.data), _feature(self.label, p.labels, label=True)) for p in self._pairs
        ]
        for pair, features in zip(self._pairs, found, strict=True):
            for feature, first in zip(features, found[0], strict=True):
                if (feature.name, feature.type, feature.shape) != (first.name, first.type, first.shape):
                    raise ColumnError(
                        feature.name,
                        f"is {feature.type} {list(feature.shape)} in {pair.data.file.name}, "
                        f"{first.name} is {first.type} {list(first.shape)} before",
                        hint="name a folder of pairs that are alike",
                    )
        return Schema((*found[0], Feature(KEY, "string", source="place")))

    def units(self, most: int) -> int:
        """As many as there are parts: ranges of examples, or a whole pair where one file is compressed."""
        return max(1, min(most, len(self._parts)))

    def unit_files(self, unit: int, units: int) -> list[SourceFile]:
        """The files of a unit's parts."""
        files = [f for pair, _, _ in self._parts[unit::units] for f in (pair.data.file, pair.labels.file)]
        return list(dict.fromkeys(files))

    def read(self, unit: int, units: int, schema: Schema, batch_rows: int) -> Iterator[Batch]:
        """The examples of a unit."""
        for pair, first, end in self._parts[unit::units]:
            step = max(1, min(batch_rows, _BATCH_BYTES // max(1, pair.data.row_bytes)))
            with read_errors(pair.data.file, _HINT), read_errors(pair.labels.file, _HINT):
                both = zip(pair.data.rows(first, end, step), pair.labels.rows(first, end, step), strict=True)
                for examples, labels in both:
                    numbers = np.arange(first + 1, first + 1 + len(examples))
                    first += len(examples)
                    keys = [f"{pair.name}/{number - 1}" for number in numbers.tolist()]
                    arrays = [_arrow(examples), _arrow(labels.reshape(len(labels))), pa.array(keys)]
                    names = [pair.feature, self.label, KEY]
                    yield Batch(pair.data.file.name, numbers, pa.RecordBatch.from_arrays(arrays, names=names))


def _feature(name: str, array: Array, *, label: bool = False) -> Feature:
    kind = array.dtype
    source = f"{kind.newbyteorder('=')} array"
    shape = array.shape[1:]
    if label:
        if math.prod(shape) != 1:
            raise ColumnError(
                name,
                f"has shape {list(array.shape)} in {array.file.name}, wants one value an example",
                hint="turn one-hot labels into class numbers",
            )
        shape = ()
    elif kind == np.uint8 and shape:
        return Feature(name, "uint8", (*shape, 1) if len(shape) == 2 else shape, "raw", source=source)
    return Feature(name, "float32" if kind.kind == "f" else "int64", shape, source=source)


def _arrow(values: np.ndarray) -> pa.Array:
    """One Arrow value a row."""
    size = math.prod(values.shape[1:])
    if values.dtype == np.uint8 and values.ndim > 1:
        return pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(size), len(values), [None, pa.py_buffer(values.tobytes())]
        )
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    flat = pa.array(native.reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, size)


# ------------------------------------------------------------------------------------------------------------
# Pairs and headers


def _pairs(source: str, files: Sequence[SourceFile]) -> list[_Pair]:
    found: dict[str, dict[str, tuple[str, SourceFile]]] = {}
    for file in files:
        folder, _, name = file.name.rpartition("/")
        stem = re.sub(r"(?i)(\.gz|\.zst)$", "", name)
        stem = re.sub(r"(?i)(\.npy|\.idx|[-.]idx[0-9]-u?byte)$", "", stem)
        words = [word for word in re.split(r"[-_.]", stem.lower()) if word]
        held = next((word for word in words if word in _DATA or word in _LABELS), "")
        if not held:
            raise SourceUnreadable(
                file.location,
                "doesn't say whether it holds examples or labels",
                hint="name pairs like train-images.npy and train-labels.npy",
            )
        words.remove(held)
        role = "labels" if held in _LABELS else "data"
        pair = found.setdefault("/".join([folder, "-".join(words)]), {})
        if role in pair:
            raise SourceUnreadable(
                file.location, f"holds {role}, as {pair[role][1].name} does", hint="keep one of them"
            )
        pair[role] = (_DATA.get(held, ""), file)
    pairs = []
    for pair in found.values():
        if len(pair) < 2:
            ((role, (_, file)),) = pair.items()
            lacks = "labels" if role == "data" else "examples"
            raise SourceUnreadable(
                file.location,
                f"has no file of {lacks} beside it",
                hint="name pairs like train-images.npy and train-labels.npy",
            )
        feature, file = pair["data"]
        data, labels = _header(file), _header(pair["labels"][1])
        if data.shape[0] != labels.shape[0]:
            raise SourceUnreadable(
                file.location,
                f"has {data.shape[0]} examples, {labels.file.name} has {labels.shape[0]} labels",
                hint="they are no pair",
            )
        name = re.sub(r"(?i)(\.gz|\.zst)$", "", file.name)
        pairs.append(
            _Pair(re.sub(r"(?i)(\.npy|\.idx|[-.]idx[0-9]-u?byte)$", "", name), feature, data, labels)
        )
    if not any(pair.data.shape[0] for pair in pairs):
        raise SourceEmpty(f"{source} holds no row", hint="check that it is the right data")
    return pairs


def _header(file: SourceFile) -> Array:
    if not file.size:
        raise SourceEmpty(f"{file.location} is empty", hint="remove it, or wait until it is written")
    with read_errors(file, _HINT), file.stream() as stream:
        try:
            array = _npy(file, stream) if file.kind_suffix == ".npy" else _idx(file, stream)
        except (ValueError, EOFError) as e:
            raise SourceUnreadable(
                file.location, f"has no header that can be read: {str(e)[:200]}", hint="copy the file again"
            ) from e
    size = array.start + array.shape[0] * array.row_bytes
    if not file.compression and size != file.size:
        raise SourceUnreadable(
            file.location,
            f"has {file.size} bytes, by its header {list(array.shape)} of {array.dtype} it should have {size}",
            hint="copy the file again",
        )
    return array


class _Counted:
    """A stream that knows how much was read of it: one that is decompressed can't tell its place."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.done = 0

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self.done += len(data)
        return data


def _npy(file: SourceFile, stream: Any) -> Array:
    counted = _Counted(stream)
    version = np.lib.format.read_magic(counted)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(counted)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, a pickle, which is never loaded")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"it holds {dtype}, not numbers")
    if not shape or (by_columns and len(shape) > 1):
        raise ValueError("it must be an array in C order with an example a row")
    return Array(file, dtype, tuple(shape), counted.done)


def _idx(file: SourceFile, stream: Any) -> Array:
    head = stream.read(4)
    if (
        len(head) < 4
        or head[:2] != b"\0\0"
        or head[2] not in _IDX_TYPES
        or not 1 <= head[3] <= _MOST_DIMENSIONS
    ):
        raise ValueError(f"it starts with {head!r}, which no IDX file does")
    sizes = stream.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise ValueError("it ends within its header")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    return Array(file, np.dtype(_IDX_TYPES[head[2]]), shape, 4 + 4 * head[3])
