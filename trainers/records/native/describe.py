# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""What the library is told of a batch: where Arrow's buffers of each column lie, and how much is in them."""

from __future__ import annotations

import ctypes

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from trainers.records.columns import is_bytes

__all__ = ["FIELDS", "Description", "Layout"]

# Fields of the C struct `column` in columns.h, all of 8 bytes, in its order.
FIELDS = (
    "value", "data", "data_size", "offsets", "offset_width", "size", "items", "is_list", "list_offsets",
    "list_width", "list_size", "valid", "valid_at", "key", "key_size",
)  # fmt: skip
_FLOAT, _INT64, _BYTES = range(3)


class Description:
    """An array of C structs, and what their addresses point into, which must live as long."""

    def __init__(self, columns: list[int], keep: list[object]) -> None:
        self._columns = np.array(columns, np.int64)
        self._keep = keep
        self.count = len(columns) // len(FIELDS)

    @property
    def address(self) -> int:
        """Where the first struct lies."""
        return self._columns.ctypes.data


class Layout:
    """What holds for all batches of a schema; TypeError for a type that has no place in an Example."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        named = sorted(enumerate(schema), key=lambda c: c[1].name.encode())
        self._columns = [(index, _Column(field.name, field.type)) for index, field in named]

    def describe(self, batch: pa.RecordBatch) -> Description:
        """The columns of a batch in the order of their keys; ValueError where a buffer is too small."""
        found: list[int] = []
        keep: list[object] = [self]
        arrays = batch.columns
        for index, column in self._columns:
            found += column.describe(arrays[index], keep)
        return Description(found, keep)


class _Column:
    """One feature of a schema."""

    def __init__(self, name: str, kind: pa.DataType) -> None:
        self.name = name
        self._key = name.encode()
        address = ctypes.cast(ctypes.c_char_p(self._key), ctypes.c_void_p).value or 0
        self._named = (address, len(self._key))
        self._list_width = self._list_size = 0
        self._is_list = True
        if pt.is_fixed_size_list(kind):
            self._list_size = kind.list_size
        elif pt.is_list(kind) or pt.is_large_list(kind):
            self._list_width = 8 if pt.is_large_list(kind) else 4
        else:
            self._is_list = False
        item = kind.value_type if self._is_list else kind
        self._value, self._size, self._width = _BYTES, 0, 0  # width: of a value, or of its offset
        if item == pa.float32():
            self._value, self._width = _FLOAT, 4
        elif item == pa.int64():
            self._value, self._width = _INT64, 8
        elif pt.is_fixed_size_binary(item):
            self._size = item.byte_width
        elif is_bytes(item):
            self._width = 8 if pt.is_large_string(item) or pt.is_large_binary(item) else 4
        elif self._is_list:
            raise TypeError(f"column {name!r} is a list of {item}, which must be mapped first")
        else:
            raise TypeError(
                f"column {name!r} has type {kind}, which must be mapped first: see records.convert"
            )

    def describe(self, array: pa.Array, keep: list[object]) -> tuple[int, ...]:
        """The fields of the C struct for an array of the column's type."""
        buffers = array.buffers()
        keep.append(buffers)
        valid = valid_at = list_offsets = 0
        if array.null_count and buffers[0] is not None:
            valid, valid_at = buffers[0].address, array.offset
            self._check(buffers[0], (array.offset + len(array) + 7) // 8)
        items = array
        if self._is_list:
            if self._list_width:
                items = array.values
                list_offsets = self._address(buffers[1], array.offset, self._list_width, len(array) + 1)
            else:
                items = array.values.slice(array.offset * self._list_size, len(array) * self._list_size)
            if items.null_count and array.flatten().null_count:  # what lies under a null list doesn't count
                raise TypeError(f"column {self.name!r} has a null inside a list, which an Example can't hold")
            buffers = items.buffers()
            keep.append((items, buffers))
        count, data, data_size, offsets = len(items), 0, 0, 0
        if self._value != _BYTES or not self._width:
            width = self._width or self._size
            data, data_size = self._address(buffers[1], items.offset, width, count), width * count
        else:
            if count:
                offsets = self._address(buffers[1], items.offset, self._width, count + 1)
            if buffers[2] is not None:
                data, data_size = buffers[2].address, buffers[2].size
        offset_width = self._width if self._value == _BYTES else 0
        lists = (int(self._is_list), list_offsets, self._list_width, self._list_size)
        values = (self._value, data, data_size, offsets, offset_width, self._size, count)
        return (*values, *lists, valid, valid_at, *self._named)

    def _address(self, buffer: pa.Buffer | None, first: int, width: int, count: int) -> int:
        """Where `count` values from `first` on start in a buffer, which must hold them."""
        if buffer is None or not count:
            return 0
        self._check(buffer, (first + count) * width)
        return buffer.address + first * width

    def _check(self, buffer: pa.Buffer, size: int) -> None:
        if buffer.size < size:
            raise ValueError(f"column {self.name!r} must have a buffer of {size} bytes, got {buffer.size}")
