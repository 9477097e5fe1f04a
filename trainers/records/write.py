"""Files of a dataset, each whole or not there: shards written beside their place and renamed into it."""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from pathlib import Path

from trainers.records.manifest import Shard

__all__ = ["TEMP_SUFFIX", "ShardWriter", "shard_name", "temp_path"]

TEMP_SUFFIX = ".tmp"


def shard_name(split: str, index: int, shards: int) -> str:
    """The name of a shard: train-00000-of-00002.tfrecord."""
    return f"{split}-{index:05d}-of-{shards:05d}.tfrecord"


def temp_path(path: Path) -> Path:
    """A hidden name beside `path` that no other process picks."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")


class ShardWriter:
    """Writes one shard: `write` framed records, then `commit`, or `abort`.

    `compression` is "", "GZIP" or "ZLIB", of the whole file, as TensorFlow reads it; level 1, since levels
    above cost several times as much for some per cent. `bytes` and the SHA-256 are of the file as it lies there.
    """

    def __init__(self, folder: Path, split: str, name: str, compression: str = "") -> None:
        self.path = folder / name
        self.split = split
        self.records = 0
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._temp = temp_path(self.path)
        self._file = self._temp.open("xb", buffering=0)
        # A gzip header made by zlib holds no time: the same records are the same bytes.
        window = {"GZIP": 31, "ZLIB": 15}.get(compression)
        self._compress = zlib.compressobj(1, wbits=window) if window else None

    def write(self, view: memoryview, records: int) -> None:
        """Append framed records."""
        self.records += records
        self._append(memoryview(self._compress.compress(view)) if self._compress else view)

    def _append(self, view: memoryview) -> None:
        self._digest.update(view)
        self.bytes += len(view)
        while view:  # a raw file may take less than all
            view = view[self._file.write(view) :]

    def commit(self) -> Shard:
        """Put the shard in its place."""
        if self._compress:
            self._append(memoryview(self._compress.flush()))
        os.fsync(self._file.fileno())
        self._file.close()
        self._temp.replace(self.path)
        return Shard(self.split, self.path.name, self.records, self.bytes, self._digest.hexdigest())

    def abort(self) -> None:
        """Leave nothing behind; nothing happens after a commit."""
        self._file.close()
        self._temp.unlink(missing_ok=True)
