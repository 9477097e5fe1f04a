"""The frames of a TFRecord file, walked without TensorFlow: to say where a damaged file is damaged.

A record is its length (u64, little-endian), the length's masked CRC-32C, its bytes, and their masked CRC-32C.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import crc32c

__all__ = ["HEAD", "TAIL", "Damage", "find_damage", "frames", "masked_crc", "read_frames"]

HEAD = struct.Struct("<QI")
TAIL = struct.Struct("<I")
LONGEST = 1 << 30  # bytes of a record
_PIECE = 1 << 20


def masked_crc(data: bytes | memoryview) -> int:
    """The CRC of TFRecord's frame: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Damage(NamedTuple):
    """Where a file is damaged: the record's number from 0, the frame's first byte, and what is wrong."""

    record: int
    offset: int
    problem: str


def frames(path: Path, compression: str = "") -> Iterator[bytes | Damage]:
    """The records of a file; a Damage, and nothing more, where it is damaged.

    `compression` is "", "GZIP" or "ZLIB"; offsets are then those of the decompressed bytes.
    """
    with path.open("rb") as raw:
        yield from read_frames(raw, compression, path.stat().st_size)


def read_frames(raw: IO[bytes], compression: str = "", size: int | None = None) -> Iterator[bytes | Damage]:
    """The same of an open file, of `size` bytes where that is known."""
    read = _Inflated(raw, compression).read if compression else raw.read
    longest = LONGEST if compression or size is None else min(size, LONGEST)
    number = offset = 0
    problem = ""
    while not problem:
        try:
            head = read(HEAD.size)
            if not head:
                return
            if len(head) < HEAD.size:
                problem = "the file ends within a record's head"
                break
            length, crc = HEAD.unpack(head)
            if masked_crc(head[:8]) != crc:
                problem = "the checksum of a record's length is wrong"
                break
            if length > LONGEST:
                problem = f"a record has {length} bytes, more than {LONGEST >> 30} GB"
                break
            # No more than the file holds is asked for, or a wrong length would take that much memory.
            data = read(min(length, longest))
            tail = read(TAIL.size)
        except zlib.error as e:
            problem = f"the compressed data is damaged: {e}"
            break
        if len(data) < length or len(tail) < TAIL.size:
            problem = "the file ends within a record"
        elif masked_crc(data) != TAIL.unpack(tail)[0]:
            problem = "a record's checksum is wrong"
        else:
            yield data
            number += 1
            offset += HEAD.size + length + TAIL.size
    yield Damage(number, offset, problem)


def find_damage(path: Path, compression: str = "") -> Damage | None:
    """The first damage of a file, or None."""
    for frame in frames(path, compression):
        if isinstance(frame, Damage):
            return frame
    return None


class _Inflated:
    """The decompressed bytes of a gzip or zlib file, which may be of several members."""

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self._raw = raw
        self._window = {"GZIP": 31, "ZLIB": 15}[compression]
        self._inflate = zlib.decompressobj(self._window)
        self._ready = bytearray()
        self._begun = False

    def read(self, size: int) -> bytes:
        while len(self._ready) < size:
            # No more than a piece at a time, however small it was packed.
            more = self._inflate.unconsumed_tail or self._inflate.unused_data or self._raw.read(_PIECE)
            if self._inflate.eof:
                if not more:
                    break
                self._inflate = zlib.decompressobj(self._window)
            elif not more:
                if self._begun:
                    raise zlib.error("it ends too early")
                break
            self._begun = True
            self._ready += self._inflate.decompress(more, _PIECE)
        out = bytes(self._ready[:size])
        del self._ready[:size]
        return out
