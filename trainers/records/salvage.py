"""Damaged shards: what is wrong with them, and what readers that were asked to go on can still have of them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainers.records.errors import DatasetCorrupt
from trainers.records.frames import HEAD, TAIL, find_damage, masked_crc
from trainers.records.manifest import Manifest

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Salvage", "damage_of", "pieces", "salvage"]

_CHUNK = 1 << 22


class Salvage(NamedTuple):
    """Where the whole records of a file lie: the first byte and the bytes of each one's data, int64."""

    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def nothing(cls) -> Salvage:
        """No record."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))


def salvage(path: Path) -> Salvage:
    """The whole records of a file without compression.

    A record whose data are damaged is passed over. Where a length is damaged, the next record is the next
    place at which a length, its checksum, the data, and theirs agree.
    """
    starts: list[int] = []
    sizes: list[int] = []
    if not path.stat().st_size:
        return Salvage.nothing()
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, end = 0, len(data)
        while at + HEAD.size + TAIL.size <= end:
            size = _size_at(data, at, end)
            if size is None:
                at = _next(data, at + 1, end)
                continue
            first = at + HEAD.size
            if _is_whole(data, first, size):
                starts.append(first)
                sizes.append(size)
            at = first + size + TAIL.size
    return Salvage(np.array(starts, np.int64), np.array(sizes, np.int64))


def _size_at(data: mmap.mmap, at: int, end: int) -> int | None:
    """The length of the record at a place, when its checksum agrees and the file is long enough."""
    size, crc = HEAD.unpack_from(data, at)
    if masked_crc(data[at : at + 8]) != crc or at + HEAD.size + size + TAIL.size > end:
        return None
    return int(size)


def _is_whole(data: mmap.mmap, first: int, size: int) -> bool:
    with memoryview(data) as view, view[first : first + size] as record:
        return bool(masked_crc(record) == TAIL.unpack_from(data, first + size)[0])


def _next(data: mmap.mmap, at: int, end: int) -> int:
    """The next place where a whole record begins, or the end."""
    while at < end:
        chunk = np.frombuffer(data[at : at + _CHUNK + HEAD.size], np.uint8)
        if len(chunk) < HEAD.size:
            return end
        # A length below 4 GB has four zero bytes: few places are left to compute checksums for.
        count = min(_CHUNK, len(chunk) - HEAD.size + 1)
        zero = np.ones(count, bool)
        for i in range(4, 8):
            zero &= chunk[i : i + count] == 0
        for place in np.flatnonzero(zero).tolist():
            size = _size_at(data, at + place, end)
            if size is not None and _is_whole(data, at + place + HEAD.size, size):
                return int(at + place)
        at += count
    return end


def pieces(path: str, found: Salvage) -> tf.data.Dataset:
    """The whole records of a damaged file, which is held in memory; ops only, so that any worker can run it."""
    import tensorflow as tf

    plain = tf.autograph.experimental.do_not_convert  # no control flow over tensors: traces faster

    def cut(everything: tf.Tensor) -> tf.data.Dataset:
        places = tf.data.Dataset.from_tensor_slices((tf.constant(found.starts), tf.constant(found.sizes)))
        return places.map(plain(lambda start, size: tf.strings.substr(everything, start, size)))

    return tf.data.Dataset.from_tensors(path).map(tf.io.read_file).flat_map(plain(cut))


def damage_of(manifest: Manifest, compression: str) -> DatasetCorrupt | None:
    """What is wrong with the first damaged shard of a dataset, with record and byte; None when all are whole."""
    for shard in manifest.shards:
        path = manifest.folder / shard.file
        if not path.exists():
            return DatasetCorrupt(str(path), "is not there, though its manifest names it")
        found = find_damage(path, compression)
        if found is not None:
            return DatasetCorrupt(
                str(path), f"is damaged at record {found.record}, byte {found.offset}: {found.problem}"
            )
    try:
        manifest.verify()
    except DatasetCorrupt as e:
        return e
    return None
