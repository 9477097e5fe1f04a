"""The frames of a TFRecord file, walked without TensorFlow: to say where a damaged file is damaged.

A record is its length (u64, little-endian), the length's masked CRC-32C, its bytes, and their masked CRC-32C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import crc32c

__all__ = ["Damage", "find_damage", "frames", "masked_crc"]

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")


def masked_crc(data: bytes | memoryview) -> int:
    """The CRC of TFRecord's frame: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Damage(NamedTuple):
    """Where a file is damaged: the record's number from 0, the frame's first byte, and what is wrong."""

    record: int
    offset: int
    problem: str


def frames(path: Path) -> Iterator[bytes | Damage]:
    """The records of a file; a Damage, and nothing more, where it is damaged."""
    number = offset = 0
    left = path.stat().st_size
    with path.open("rb") as f:
        while left:
            head = f.read(_HEAD.size)
            if len(head) < _HEAD.size:
                yield Damage(number, offset, "the file ends within a record's head")
                return
            length, crc = _HEAD.unpack(head)
            if masked_crc(head[:8]) != crc:
                yield Damage(number, offset, "the checksum of a record's length is wrong")
                return
            size = _HEAD.size + length + _TAIL.size
            if size > left:
                yield Damage(number, offset, "the file ends within a record")
                return
            data = f.read(length)
            if masked_crc(data) != _TAIL.unpack(f.read(_TAIL.size))[0]:
                yield Damage(number, offset, "a record's checksum is wrong")
                return
            yield data
            number += 1
            offset += size
            left -= size


def find_damage(path: Path) -> Damage | None:
    """The first damage of a file, or None."""
    for frame in frames(path):
        if isinstance(frame, Damage):
            return frame
    return None
