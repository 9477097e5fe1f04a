# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Columns in, framed TFRecords of tf.train.Example out, without TensorFlow or protobuf.

The encoder works column by column on a whole batch. A feature of an Example is a header (lengths, the name,
tags) and a payload; for one column the header depends on nothing but the payload's size, so a batch needs a
few templates a column, not one object a value:

* columns whose payload has one size in the batch (numbers, flags, raw images) are laid out side by side in a
  template matrix, neighbours together, and copied to their rows in one go;
* all others are grouped by size (short ones) or by header length (long ones), each group in one go;
* a null is a feature that isn't there.

Features lie in the order of their names' bytes and varints are minimal, so each feature's bytes are those that
protobuf itself writes (the order of a map is free), and none depend on how rows are cut into batches.

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
from collections.abc import Iterator, Sequence

import crc32c
import numpy as np
import pyarrow as pa

from trainers.records.columns import (
    TAG_FEATURES,
    Column,
    column_of,
    copy_pieces,
    item_type,
    overlapping,
    put_varints,
    rows_of,
    varint_sizes,
)

__all__ = ["Encoded", "Encoder"]

FRAME_HEAD = 12  # length u64, masked CRC-32C of it u32
FRAME_TAIL = 4  # masked CRC-32C of the payload

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


# ------------------------------------------------------------------------------------------------------------
# Pieces: what is copied into rows in one go


class _Block:
    """Neighbouring columns that take the same bytes in every row: one template matrix.

    `template` is a row of it without the values, which says where they go. A matrix of the batch before that has the
    same one is taken again: nothing but values must be put in then.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self.headers = [column.header(int(column.sizes[0])) for column in columns]
        self.template = b"".join(
            header + bytes(int(column.sizes[0])) for header, column in zip(self.headers, columns, strict=True)
        )
        self.lengths = len(self.template)
        self.matrix = np.empty((0, self.lengths), np.uint8)

    def use(self, matrix: np.ndarray | None, count: int) -> None:
        """Take the matrix of a batch before, or a new one."""
        if matrix is None or len(matrix) < count:
            matrix = np.empty((count, self.lengths), np.uint8)
            matrix[:] = np.frombuffer(self.template, np.uint8)
        self.matrix = matrix

    def write(self, out: np.ndarray, at: np.ndarray) -> None:
        width = self.lengths
        block = self.matrix[: len(at)]
        offset = 0
        for header, column in zip(self.headers, self.columns, strict=True):
            offset += len(header)
            size = int(column.sizes[0])
            if size:
                cells = np.ndarray((len(at),), item_type(size), block, offset, (width,))
                # Payloads of one size lie back to back, as nothing else is between them in any Arrow array.
                cells[:] = np.ndarray((len(at),), item_type(size), column.payload, int(column.starts[0]))
            offset += size
        overlapping(out, width)[at] = rows_of(block)


class _Ragged:
    """One column whose rows differ in length, or don't all have it."""

    def __init__(self, column: Column, count: int) -> None:
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
            overlapping(out, length)[at[which]] = rows_of(column.headers(sizes[which]))
        copy_pieces(column.payload, column.starts, sizes, out, at + self.heads)

    def _write_size(self, out: np.ndarray, at: np.ndarray, size: int, which: np.ndarray) -> None:
        header = np.frombuffer(self.column.header(size), np.uint8)
        width = len(header) + size
        block = np.empty((len(which), width), np.uint8)
        block[:, : len(header)] = header
        if size:
            cells = np.ndarray((len(which),), item_type(size), block, len(header), (width,))
            cells[:] = overlapping(self.column.payload, size)[self.column.starts[which]]
        overlapping(out, width)[at[which]] = rows_of(block)


def _pieces(columns: Sequence[Column], count: int) -> list[_Block | _Ragged]:
    pieces: list[_Block | _Ragged] = []
    fixed: list[Column] = []
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
    """Turns record batches into framed TFRecords; keeps its buffers from batch to batch.

    Not for two threads at once: have one each.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)
        self._matrices: dict[bytes, np.ndarray] = {}  # of the last batch, by template

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode every row of a batch of mapped columns as one framed record.

        Raises TypeError for a column of a type that the table above doesn't list.
        """
        count = batch.num_rows
        named = sorted(zip(batch.schema.names, batch.columns, strict=True), key=lambda c: c[0].encode())
        columns = [column_of(name, array) for name, array in named]
        if not count:
            return Encoded(np.empty(0, np.uint8), np.zeros(1, np.int64))
        pieces = _pieces(columns, count)
        self._take_matrices(pieces, count)
        features = np.zeros(count, np.int64)
        for piece in pieces:
            features += piece.lengths
        outer = 1 + varint_sizes(features)
        lengths = outer + features
        offsets = np.concatenate([[0], np.cumsum(lengths + FRAME_HEAD + FRAME_TAIL)])
        out = self._room(int(offsets[-1]))
        starts = offsets[:-1] + FRAME_HEAD
        for width in np.unique(outer).tolist():
            which = np.flatnonzero(outer == width)
            block = np.full((len(which), width), TAG_FEATURES, np.uint8)
            put_varints(block, 1, features[which])
            overlapping(out, width)[starts[which]] = rows_of(block)
        at = starts + outer
        for piece in pieces:
            piece.write(out, at)
            at = at + piece.lengths
        self._frame(out, offsets, lengths)
        return Encoded(out, offsets)

    def pieces(self, batch: pa.RecordBatch) -> Iterator[Encoded]:
        """The records of a batch in order, as they are best written: some or all at a time."""
        if batch.num_rows:
            yield self.encode(batch)

    def _take_matrices(self, pieces: Sequence[_Block | _Ragged], count: int) -> None:
        blocks = [piece for piece in pieces if isinstance(piece, _Block)]
        for block in blocks:
            block.use(self._matrices.get(block.template), count)
        self._matrices = {block.template: block.matrix for block in blocks}

    def _room(self, size: int) -> np.ndarray:
        if len(self._buffer) < size:
            self._buffer = np.empty(size + size // 8, np.uint8)
        return self._buffer[:size]

    @staticmethod
    def _frame(out: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        heads, ends = offsets[:-1], offsets[1:] - FRAME_TAIL
        overlapping(out, 8)[heads] = lengths.astype(np.uint64)
        numbers = overlapping(out, 4)
        numbers[heads + 8] = _mask(_crc_of_lengths(lengths))
        view, crc = memoryview(out), crc32c.crc32c
        payloads = zip((heads + FRAME_HEAD).tolist(), ends.tolist(), strict=True)
        numbers[ends] = _mask(np.fromiter((crc(view[a:b]) for a, b in payloads), np.uint32, len(ends)))
