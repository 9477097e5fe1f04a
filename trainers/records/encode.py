# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Columns in, framed TFRecords of tf.train.Example out, without TensorFlow or protobuf.

The encoder works column by column on a whole batch. A feature of an Example is a header (lengths, the name,
tags) and a payload; for one column the header depends on nothing but the payload's size, so a batch needs a
few templates a column, not one object a value:

* columns whose payload has one size in the batch (numbers, flags, raw images) are laid out side by side in a
  template matrix, neighbours together, and copied to their rows in one go;
* all others are grouped by size (short ones) or by header length (long ones), each group in one go;
* a null is a feature that isn't there.

Features lie in the order of their names and varints are minimal, so the bytes are those of protobuf's
deterministic serialisation; they don't depend on how rows are cut into batches.

| Arrow type                                         | in the Example                                |
|----------------------------------------------------|-----------------------------------------------|
| float32                                            | float_list, one value                         |
| int64                                              | int64_list, one value                         |
| string, binary (large or not), fixed-size binary   | bytes_list, one value                         |
| list (large, fixed-size or not) of one of these    | the same list, any number of values           |

Other types are mapped to these first, see `trainers.records.convert`.

Copies of `width` bytes to rows at odd places are made by numpy's fancy assignment on a view whose items
overlap (one item starts at every byte): a memcpy an item, 10 ns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import crc32c
import numpy as np
import pyarrow as pa

__all__ = ["Encoded", "Encoder"]

FRAME_HEAD = 12  # length u64, masked CRC-32C of it u32
FRAME_TAIL = 4  # masked CRC-32C of the payload

# Tags of tf.train.Example's messages: field number << 3 | wire type 2.
_TAG_FEATURES = 0x0A  # Example.features; also Features.feature (map entry), its key, and a list's values
_TAG_VALUE = 0x12  # value of a map entry
_TAG_BYTES_LIST, _TAG_FLOAT_LIST, _TAG_INT64_LIST = 0x0A, 0x12, 0x1A

# What stands before a column's payload in its list message.
_ALWAYS = "always"  # one bytes value: tag and length, also when it is empty
_PACKED = "packed"  # packed numbers: tag and length, nothing for an empty list
_NOTHING = "nothing"  # several bytes values: each brings its own tag and length

_MAX_TEMPLATES = 24  # more different sizes than this in a batch are grouped by header length instead
_SHORT = 128  # sizes below are counted by a histogram


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Framed records of a batch; `data[offsets[i]:offsets[i + 1]]` is record i with its frame.

    `data` is a view of the encoder's buffer and holds until its next `encode`.
    """

    data: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclasses.dataclass(frozen=True)
class _Column:
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
            inner = sizes + 1 + _varint_sizes(sizes)
        elif self.prefix == _PACKED:
            inner = np.where(sizes > 0, sizes + 1 + _varint_sizes(sizes), 0)
        feature = inner + 1 + _varint_sizes(inner)
        entry = feature + 1 + _varint_sizes(feature) + 1 + len(_varint(len(self.key))) + len(self.key)
        return inner, feature, entry, entry + 1 + _varint_sizes(entry)

    def headers(self, sizes: np.ndarray) -> np.ndarray:
        """Headers, one a row, for sizes whose headers are equally long."""
        sample = self.header(int(sizes[0]))
        block = np.empty((len(sizes), len(sample)), np.uint8)
        block[:] = np.frombuffer(sample, np.uint8)
        inner, feature, entry, _ = self._lengths(sizes)
        at = _put_varints(block, 1, entry)
        at += 1 + len(_varint(len(self.key))) + len(self.key) + 1
        at = _put_varints(block, at, feature) + 1
        at = _put_varints(block, at, inner)
        if at < block.shape[1]:
            _put_varints(block, at + 1, sizes)
        return block


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_sizes(values: np.ndarray) -> np.ndarray:
    """Bytes of each value as a varint; values are unsigned or not negative."""
    sizes = np.ones(len(values), np.int64)
    top = int(values.max()) if len(values) else 0
    bits = 7
    while top >> bits:
        sizes += values >= values.dtype.type(1 << bits)
        bits += 7
    return sizes


def _put_varints(block: np.ndarray, at: int, values: np.ndarray) -> int:
    """Write varints of one common width into columns of a block; the column after them."""
    width = len(_varint(int(values[0])))
    for i in range(width):
        more = 0x80 if i < width - 1 else 0
        block[:, at + i] = (values >> (7 * i)) & 0x7F | more
    return at + width


def _items(data: np.ndarray, width: int) -> np.ndarray:
    """A view of `data` in which item i is the `width` bytes from byte i on; items overlap."""
    return np.ndarray((len(data) - width + 1,), _item(width), data, strides=(1,))


def _item(width: int) -> np.dtype:
    # numpy copies the small ones by a move, others by memcpy.
    return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}.get(width) or (np.void, width))


def _rows_of(block: np.ndarray) -> np.ndarray:
    """The rows of a contiguous uint8 matrix, one item each."""
    return block.view(_item(block.shape[1]))[:, 0]


def _copy(source: np.ndarray, starts: np.ndarray, sizes: np.ndarray, out: np.ndarray, to: np.ndarray) -> None:
    """Copy many pieces of any sizes.

    A piece of s bytes is copied as its first and its last p bytes, p being the greatest power of two not
    above s; the two overlap. So pieces of all sizes need two copies a power of two.
    """
    powers = np.frexp(sizes.astype(np.float64))[1] - 1  # sizes are far below 2**53: exact
    for power in np.unique(powers[sizes > 0]).tolist():
        which = np.flatnonzero(powers == power)
        width = 1 << power
        read, write = _items(source, width), _items(out, width)
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


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large_bytes(kind)


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
    sizes = _varint_sizes(unsigned)
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
    _copy(block, np.arange(len(values)) * width, sizes, out, ends[:-1])
    return out, ends


def _concatenated_bytes(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values of a bytes array back to back, each with tag and length, and where each starts."""
    data, starts, sizes = _bytes(array)
    heads = 1 + _varint_sizes(sizes)
    ends = np.concatenate([[0], np.cumsum(heads + sizes)])
    out = np.empty(int(ends[-1]), np.uint8)
    for width in np.unique(heads).tolist():
        which = np.flatnonzero(heads == width)
        block = np.full((len(which), width), 0x0A, np.uint8)
        _put_varints(block, 1, sizes[which])
        _items(out, width)[ends[which]] = _rows_of(block)
    _copy(data, starts, sizes, out, ends[:-1] + heads)
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


def _column(name: str, array: pa.Array) -> _Column:
    """The payloads of one column; TypeError for a type that has no place in an Example."""
    kind = array.type
    rows = None
    if array.null_count:
        rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        first, end, items = _lists(array)
        if items.null_count:
            raise TypeError(f"column {name!r} has a null inside a list, which an Example can't hold")
        tag, prefix, payload, starts, sizes = _list_payload(name, items, first, end)
    elif kind == pa.float32():
        values = _numbers(array, "<f4")
        tag, prefix, payload = _TAG_FLOAT_LIST, _PACKED, values.view(np.uint8)
        starts, sizes = np.arange(len(array)) * 4, np.full(len(array), 4)
    elif kind == pa.int64():
        payload, sizes, width = _varints(_numbers(array, "<i8"))
        tag, prefix, starts = _TAG_INT64_LIST, _PACKED, np.arange(len(array)) * width
    elif _is_bytes(kind) or pa.types.is_fixed_size_binary(kind):
        tag, prefix = _TAG_BYTES_LIST, _ALWAYS
        payload, starts, sizes = _bytes(array)
    else:
        raise TypeError(f"column {name!r} has type {kind}, which must be mapped first: see records.convert")
    if rows is not None:
        starts, sizes = starts[rows], sizes[rows]
    return _Column(name.encode(), tag, prefix, payload, starts, sizes, rows)


def _list_payload(
    name: str, items: pa.Array, first: np.ndarray, end: np.ndarray
) -> tuple[int, str, np.ndarray, np.ndarray, np.ndarray]:
    if items.type == pa.float32():
        return _TAG_FLOAT_LIST, _PACKED, _numbers(items, "<f4").view(np.uint8), first * 4, (end - first) * 4
    if items.type == pa.int64():
        payload, ends = _concatenated_varints(_numbers(items, "<i8"))
        return _TAG_INT64_LIST, _PACKED, payload, ends[first], ends[end] - ends[first]
    if _is_bytes(items.type):
        payload, ends = _concatenated_bytes(items)
        return _TAG_BYTES_LIST, _NOTHING, payload, ends[first], ends[end] - ends[first]
    raise TypeError(f"column {name!r} is a list of {items.type}, which must be mapped first")


# ------------------------------------------------------------------------------------------------------------
# Pieces: what is copied into rows in one go


class _Block:
    """Neighbouring columns that take the same bytes in every row: one template matrix."""

    def __init__(self, columns: Sequence[_Column]) -> None:
        self.columns = columns
        self.headers = [column.header(int(column.sizes[0])) for column in columns]
        self.lengths = sum(
            len(header) + int(column.sizes[0]) for header, column in zip(self.headers, columns, strict=True)
        )

    def write(self, out: np.ndarray, at: np.ndarray) -> None:
        width = self.lengths
        template = b"".join(
            header + bytes(int(column.sizes[0]))
            for header, column in zip(self.headers, self.columns, strict=True)
        )
        block = np.empty((len(at), width), np.uint8)
        block[:] = np.frombuffer(template, np.uint8)
        offset = 0
        for header, column in zip(self.headers, self.columns, strict=True):
            offset += len(header)
            size = int(column.sizes[0])
            if size:
                cells = np.ndarray((len(at),), _item(size), block, offset, (width,))
                cells[:] = _items(column.payload, size)[column.starts]
            offset += size
        _items(out, width)[at] = _rows_of(block)


class _Ragged:
    """One column whose rows differ in length, or don't all have it."""

    def __init__(self, column: _Column, count: int) -> None:
        self.column = column
        self.heads = column.header_sizes(column.sizes)
        if column.rows is None:
            self.lengths = self.heads + column.sizes
        else:
            self.lengths = np.zeros(count, np.int64)
            self.lengths[column.rows] = self.heads + column.sizes

    def write(self, out: np.ndarray, at: np.ndarray) -> None:
        column = self.column
        if column.rows is not None:
            at = at[column.rows]
        sizes = column.sizes
        if int(sizes.max()) < _SHORT:
            counts = np.bincount(sizes)
            if np.count_nonzero(counts) <= _MAX_TEMPLATES:
                for size in np.flatnonzero(counts).tolist():
                    self._write_size(out, at, size, np.flatnonzero(sizes == size))
                return
        for length in np.unique(self.heads).tolist():
            which = np.flatnonzero(self.heads == length)
            _items(out, length)[at[which]] = _rows_of(column.headers(sizes[which]))
        _copy(column.payload, column.starts, sizes, out, at + self.heads)

    def _write_size(self, out: np.ndarray, at: np.ndarray, size: int, which: np.ndarray) -> None:
        header = np.frombuffer(self.column.header(size), np.uint8)
        width = len(header) + size
        block = np.empty((len(which), width), np.uint8)
        block[:, : len(header)] = header
        if size:
            cells = np.ndarray((len(which),), _item(size), block, len(header), (width,))
            cells[:] = _items(self.column.payload, size)[self.column.starts[which]]
        _items(out, width)[at[which]] = _rows_of(block)


def _pieces(columns: Sequence[_Column], count: int) -> list[_Block | _Ragged]:
    pieces: list[_Block | _Ragged] = []
    fixed: list[_Column] = []
    for column in columns:
        if column.rows is not None and not len(column.rows):
            continue
        if column.rows is None and int(column.sizes.min()) == int(column.sizes.max()):
            fixed.append(column)
            continue
        if fixed:
            pieces.append(_Block(fixed))
            fixed = []
        pieces.append(_Ragged(column, count))
    if fixed:
        pieces.append(_Block(fixed))
    return pieces


# ------------------------------------------------------------------------------------------------------------
# Framing


def _mask(crcs: np.ndarray) -> np.ndarray:
    """TFRecord's masked form of CRCs, see `frames.masked_crc`."""
    crcs = crcs.astype(np.uint32)
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)


# A CRC is affine over GF(2): that of a length is the XOR of one table entry for each of its 8 bytes.
_CRC_OF_ZERO = crc32c.crc32c(bytes(8))
_CRC_TABLES = np.array(
    [
        [crc32c.crc32c(bytes(i) + bytes([v]) + bytes(7 - i)) ^ _CRC_OF_ZERO for v in range(256)]
        for i in range(5)
    ],
    np.uint32,
)


def _crc_of_lengths(lengths: np.ndarray) -> np.ndarray:
    crcs = np.full(len(lengths), _CRC_OF_ZERO, np.uint32)
    for i, table in enumerate(_CRC_TABLES):  # 5 bytes: a record is below 1 TB
        crcs ^= table[(lengths >> (8 * i)) & 0xFF]
    return crcs


class Encoder:
    """Turns record batches into framed TFRecords; keeps its buffer from batch to batch.

    Not for two threads at once: have one each.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode every row of a batch of mapped columns as one framed record.

        Raises TypeError for a column of a type that the table above doesn't list.
        """
        count = batch.num_rows
        named = sorted(zip(batch.schema.names, batch.columns, strict=True), key=lambda c: c[0].encode())
        columns = [_column(name, array) for name, array in named]
        if not count:
            return Encoded(np.empty(0, np.uint8), np.zeros(1, np.int64))
        pieces = _pieces(columns, count)
        features = np.zeros(count, np.int64)
        for piece in pieces:
            features += piece.lengths
        outer = 1 + _varint_sizes(features)
        lengths = outer + features
        offsets = np.concatenate([[0], np.cumsum(lengths + FRAME_HEAD + FRAME_TAIL)])
        out = self._room(int(offsets[-1]))
        starts = offsets[:-1] + FRAME_HEAD
        for width in np.unique(outer).tolist():
            which = np.flatnonzero(outer == width)
            block = np.full((len(which), width), _TAG_FEATURES, np.uint8)
            _put_varints(block, 1, features[which])
            _items(out, width)[starts[which]] = _rows_of(block)
        at = starts + outer
        for piece in pieces:
            piece.write(out, at)
            at = at + piece.lengths
        self._frame(out, offsets, lengths)
        return Encoded(out, offsets)

    def _room(self, size: int) -> np.ndarray:
        if len(self._buffer) < size:
            self._buffer = np.empty(size + size // 8, np.uint8)
        return self._buffer[:size]

    @staticmethod
    def _frame(out: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        heads, ends = offsets[:-1], offsets[1:] - FRAME_TAIL
        _items(out, 8)[heads] = lengths.astype(np.uint64)
        numbers = _items(out, 4)
        numbers[heads + 8] = _mask(_crc_of_lengths(lengths))
        view, crc = memoryview(out), crc32c.crc32c
        payloads = zip((heads + FRAME_HEAD).tolist(), ends.tolist(), strict=True)
        numbers[ends] = _mask(np.fromiter((crc(view[a:b]) for a, b in payloads), np.uint32, len(ends)))
