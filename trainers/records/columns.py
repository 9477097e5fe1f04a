# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Arrow columns as features of an Example: where each row's payload lies, and the header before it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa

__all__ = [
    "TAG_FEATURES",
    "Column",
    "column_of",
    "copy_pieces",
    "is_bytes",
    "item_type",
    "overlapping",
    "put_varints",
    "rows_of",
    "varint_sizes",
]

# Tags of tf.train.Example's messages: field number << 3 | wire type 2.
TAG_FEATURES = 0x0A  # Example.features; also Features.feature (map entry), its key, and a list's values
_TAG_VALUE = 0x12  # value of a map entry
_TAG_BYTES_LIST, _TAG_FLOAT_LIST, _TAG_INT64_LIST = 0x0A, 0x12, 0x1A

# What stands before a column's payload in its list message.
_ALWAYS = "always"  # one bytes value: tag and length, also when it is empty
_PACKED = "packed"  # packed numbers: tag and length, nothing for an empty list
_NOTHING = "nothing"  # several bytes values: each brings its own tag and length


@dataclasses.dataclass(frozen=True)
class Column:
    """One feature of a batch: where each present row's payload lies."""

    key: bytes
    tag: int
    prefix: str
    payload: np.ndarray  # uint8
    starts: np.ndarray  # int64, a row's first byte in payload
    sizes: np.ndarray  # int64, bytes of a row's payload
    rows: np.ndarray | None  # rows that have the feature, None for all

    def header(self, size: int) -> bytes:
        """All bytes of the feature before a payload of `size` bytes."""
        inner = size
        prefix = b""
        if self.prefix == _ALWAYS or (self.prefix == _PACKED and size):
            prefix = b"\x0a" + _varint(size)
            inner += len(prefix)
        head = bytes([self.tag]) + _varint(inner) + prefix
        value = bytes([_TAG_VALUE]) + _varint(len(head) + size) + head
        key = b"\x0a" + _varint(len(self.key)) + self.key
        return b"\x0a" + _varint(len(key) + len(value) + size) + key + value

    def header_sizes(self, sizes: np.ndarray) -> np.ndarray:
        """The length of the header for each payload size."""
        return self._lengths(sizes)[-1] - sizes

    def _lengths(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Lengths of the list message, the Feature, the map entry, and of all with the entry's own head."""
        inner = sizes
        if self.prefix == _ALWAYS:
            inner = sizes + 1 + varint_sizes(sizes)
        elif self.prefix == _PACKED:
            inner = np.where(sizes > 0, sizes + 1 + varint_sizes(sizes), 0)
        feature = inner + 1 + varint_sizes(inner)
        entry = feature + 1 + varint_sizes(feature) + 1 + len(_varint(len(self.key))) + len(self.key)
        return inner, feature, entry, entry + 1 + varint_sizes(entry)

    def headers(self, sizes: np.ndarray) -> np.ndarray:
        """Headers, one a row, for sizes whose headers are equally long."""
        sample = self.header(int(sizes[0]))
        block = np.empty((len(sizes), len(sample)), np.uint8)
        block[:] = np.frombuffer(sample, np.uint8)
        inner, feature, entry, _ = self._lengths(sizes)
        at = put_varints(block, 1, entry)
        at += 1 + len(_varint(len(self.key))) + len(self.key) + 1
        at = put_varints(block, at, feature) + 1
        at = put_varints(block, at, inner)
        if at < block.shape[1]:
            put_varints(block, at + 1, sizes)
        return block


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_sizes(values: np.ndarray) -> np.ndarray:
    """Bytes of each value as a varint; values are unsigned or not negative."""
    sizes = np.ones(len(values), np.int64)
    top = int(values.max()) if len(values) else 0
    bits = 7
    while top >> bits:
        sizes += values >= values.dtype.type(1 << bits)
        bits += 7
    return sizes


def put_varints(block: np.ndarray, at: int, values: np.ndarray) -> int:
    """Write varints of one common width into columns of a block; the column after them."""
    width = len(_varint(int(values[0])))
    for i in range(width):
        more = 0x80 if i < width - 1 else 0
        block[:, at + i] = (values >> (7 * i)) & 0x7F | more
    return at + width


def overlapping(data: np.ndarray, width: int) -> np.ndarray:
    """A view of `data` in which item i is the `width` bytes from byte i on; items overlap."""
    return np.ndarray((len(data) - width + 1,), item_type(width), data, strides=(1,))


def item_type(width: int) -> np.dtype:
    # numpy copies the small ones by a move, others by memcpy.
    return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}.get(width) or (np.void, width))


def rows_of(block: np.ndarray) -> np.ndarray:
    """The rows of a contiguous uint8 matrix, one item each."""
    return block.view(item_type(block.shape[1]))[:, 0]


def copy_pieces(
    source: np.ndarray, starts: np.ndarray, sizes: np.ndarray, out: np.ndarray, to: np.ndarray
) -> None:
    """Copy many pieces of any sizes.

    A piece of s bytes is copied as its first and its last p bytes, p being the greatest power of two not
    above s; the two overlap. So pieces of all sizes need two copies a power of two.
    """
    powers = np.frexp(sizes.astype(np.float64))[1] - 1  # sizes are far below 2**53: exact
    for power in np.unique(powers[sizes > 0]).tolist():
        which = np.flatnonzero(powers == power)
        width = 1 << power
        read, write = overlapping(source, width), overlapping(out, width)
        a, b = starts[which], to[which]
        write[b] = read[a]
        rest = sizes[which] - width
        if rest.any():
            write[b + rest] = read[a + rest]


# ------------------------------------------------------------------------------------------------------------
# Columns of Arrow arrays


def _buffer(buffer: pa.Buffer | None) -> np.ndarray:
    return np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)


def _offsets(array: pa.Array) -> np.ndarray:
    """Start of each item and the end of the last, of a variable-size array, as int64."""
    wide = pa.types.is_large_list(array.type) or _is_large_bytes(array.type)
    dtype = np.dtype("<i8" if wide else "<i4")
    buffer = array.buffers()[1]
    if buffer is None or not buffer.size:  # Arrow allows an array of no items to have no offsets
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, dtype, len(array) + 1, array.offset * dtype.itemsize).astype(np.int64)


def _is_large_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of a type are bytes: text, or binary of any or one length."""
    variable = pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large_bytes(kind)
    return variable or pa.types.is_fixed_size_binary(kind)


def _numbers(array: pa.Array, dtype: str) -> np.ndarray:
    """The values of a float32 or int64 array without a copy; what stands at nulls is of no meaning."""
    size = np.dtype(dtype).itemsize
    buffer = array.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * size)


def _varints(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Varints of int64 values: bytes, sizes, and the bytes between the starts of two neighbours."""
    unsigned = values.view("<u8")
    sizes = varint_sizes(unsigned)
    width = int(sizes.max()) if len(sizes) else 1
    block = np.empty((len(values), width), np.uint8)
    rest = unsigned
    for i in range(width):
        # A byte has its top bit set when another one follows; bytes after the last are never read.
        block[:, i] = (rest & np.uint64(0x7F)) | ((i + 1 < sizes).view(np.uint8) << np.uint8(7))
        rest = rest >> np.uint64(7)
    return block.reshape(-1), sizes, width


def _concatenated_varints(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Varints back to back, and where each starts, with the end of the last."""
    block, sizes, width = _varints(values)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    out = np.empty(int(ends[-1]), np.uint8)
    copy_pieces(block, np.arange(len(values)) * width, sizes, out, ends[:-1])
    return out, ends


def _concatenated_bytes(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values of a bytes array back to back, each with tag and length, and where each starts."""
    data, starts, sizes = _bytes(array)
    heads = 1 + varint_sizes(sizes)
    ends = np.concatenate([[0], np.cumsum(heads + sizes)])
    out = np.empty(int(ends[-1]), np.uint8)
    for width in np.unique(heads).tolist():
        which = np.flatnonzero(heads == width)
        block = np.full((len(which), width), 0x0A, np.uint8)
        put_varints(block, 1, sizes[which])
        overlapping(out, width)[ends[which]] = rows_of(block)
    copy_pieces(data, starts, sizes, out, ends[:-1] + heads)
    return out, ends


def _bytes(array: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Data, starts and sizes of the values of a bytes array."""
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        starts = (np.arange(len(array)) + array.offset) * width
        return _buffer(array.buffers()[1]), starts, np.full(len(array), width)
    offsets = _offsets(array)
    return _buffer(array.buffers()[2]), offsets[:-1], np.diff(offsets)


def _lists(array: pa.Array) -> tuple[np.ndarray, np.ndarray, pa.Array]:
    """First and end item of each list, and the array of items that they count from."""
    if pa.types.is_fixed_size_list(array.type):
        length = array.type.list_size
        first = np.arange(len(array)) * length
        return first, first + length, array.values.slice(array.offset * length, len(array) * length)
    offsets = _offsets(array)
    low, high = int(offsets[0]), int(offsets[-1])
    offsets = offsets - low
    return offsets[:-1], offsets[1:], array.values.slice(low, high - low)


def column_of(name: str, array: pa.Array) -> Column:
    """The payloads of one column; TypeError for a type that has no place in an Example."""
    kind = array.type
    rows = None
    if array.null_count:
        rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        first, end, items = _lists(array)
        if items.null_count and array.flatten().null_count:  # what lies under a null list doesn't count
            raise TypeError(f"column {name!r} has a null inside a list, which an Example can't hold")
        tag, prefix, payload, starts, sizes = _list_payload(name, items, first, end)
    elif kind == pa.float32():
        values = _numbers(array, "<f4")
        tag, prefix, payload = _TAG_FLOAT_LIST, _PACKED, values.view(np.uint8)
        starts, sizes = np.arange(len(array)) * 4, np.full(len(array), 4)
    elif kind == pa.int64():
        payload, sizes, width = _varints(_numbers(array, "<i8"))
        tag, prefix, starts = _TAG_INT64_LIST, _PACKED, np.arange(len(array)) * width
    elif is_bytes(kind):
        tag, prefix = _TAG_BYTES_LIST, _ALWAYS
        payload, starts, sizes = _bytes(array)
    else:
        raise TypeError(f"column {name!r} has type {kind}, which must be mapped first: see records.convert")
    if rows is not None:
        starts, sizes = starts[rows], sizes[rows]
    return Column(name.encode(), tag, prefix, payload, starts, sizes, rows)


def _list_payload(
    name: str, items: pa.Array, first: np.ndarray, end: np.ndarray
) -> tuple[int, str, np.ndarray, np.ndarray, np.ndarray]:
    if items.type == pa.float32():
        return _TAG_FLOAT_LIST, _PACKED, _numbers(items, "<f4").view(np.uint8), first * 4, (end - first) * 4
    if items.type == pa.int64():
        payload, ends = _concatenated_varints(_numbers(items, "<i8"))
        return _TAG_INT64_LIST, _PACKED, payload, ends[first], ends[end] - ends[first]
    if is_bytes(items.type):
        payload, ends = _concatenated_bytes(items)
        return _TAG_BYTES_LIST, _NOTHING, payload, ends[first], ends[end] - ends[first]
    raise TypeError(f"column {name!r} is a list of {items.type}, which must be mapped first")
