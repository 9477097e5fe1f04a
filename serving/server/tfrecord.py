"""Reading and framing TFRecords (warm-up requests, request logs) without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import crc32c

__all__ = ["CorruptRecord", "framed", "read_records"]

_MASK = 0xA282EAD8


class CorruptRecord(ValueError):
    """A record's checksum or length is wrong."""


def _masked(data: bytes) -> int:
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """A record as it stands in a file: length, checksum of the length, data, checksum of the data."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked(length)), data, struct.pack("<I", _masked(data))))


def read_records(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    """Yield the records of a file, each of at most `max_bytes`; checks every CRC-32C."""
    with path.open("rb") as file:
        at = 0
        while header := file.read(12):
            if len(header) < 12:
                raise CorruptRecord(f"{path} ends within a record header at byte {at}")
            length, crc = struct.unpack("<QI", header)
            if _masked(header[:8]) != crc:
                raise CorruptRecord(f"{path} has a corrupt record length at byte {at}")
            if length > max_bytes:
                raise CorruptRecord(f"{path} has a record of {length} bytes at byte {at}, over {max_bytes}")
            data, footer = file.read(length), file.read(4)
            if len(data) < length or len(footer) < 4:
                raise CorruptRecord(f"{path} ends within the record at byte {at}")
            if _masked(data) != struct.unpack("<I", footer)[0]:
                raise CorruptRecord(f"{path} has a corrupt record at byte {at}")
            yield data
            at += 16 + length
