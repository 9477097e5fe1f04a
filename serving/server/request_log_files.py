"""The files of a request log: `<folder>/<model>/<version>/<time>-<pid>-<n>.tfrecord`.

An open file is a dot file under a lock; closing it makes it durable and gives it its name, so what has a name
is whole. A file whose writer was killed is found by its free lock, cut after its last whole record, and named.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from serving.server.tfrecord import CorruptRecord, framed, read_records

__all__ = ["LogFiles"]

log = logging.getLogger(__name__)

_SUFFIX = ".tfrecord"
_LARGEST_RECORD = 1 << 31

Key = tuple[str, int]


@dataclass
class _Open:
    handle: int
    path: Path  # the dot file
    opened: float
    size: int = 0


class LogFiles:
    """Appends records by model and version; for one thread.

    A file is closed at `max_bytes` or `max_age_s` after its first record. Above `keep_bytes` in all, the
    oldest closed files are removed. `append` and `close` raise OSError; a record whose write failed leaves no
    trace in its file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_age_s: float,
        keep_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._open: dict[Key, _Open] = {}
        self._number = 0

    def append(self, model: str, version: int, record: bytes) -> None:
        """Write one record; a file that it fills is closed."""
        key = (model, version)
        file = self._open.get(key)
        if file is None:
            file = self._open[key] = self._create(key)
        data = framed(record)
        try:
            _write(file.handle, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.handle, file.size)
                os.lseek(file.handle, file.size, os.SEEK_SET)
            raise
        file.size += len(data)
        if file.size >= self._max_bytes:
            self._close(key)

    def _create(self, key: Key) -> _Open:
        folder = self._folder / _component(key[0]) / str(key[1])
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            self._number += 1
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._clock()))
            path = folder / f".{stamp}-{os.getpid()}-{self._number}{_SUFFIX}"
            try:  # requests are users' data: for this user's eyes only
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:  # another replica on the same folder, with the same pid in its container
                continue
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _Open(handle, path, self._clock())

    def next_due(self) -> float | None:
        """Seconds until a file is old enough to be closed; None where none is open."""
        if not self._open:
            return None
        return max(0.0, min(f.opened for f in self._open.values()) + self._max_age_s - self._clock())

    def close_old(self) -> None:
        """Close the files that are old enough."""
        for key in [k for k, f in self._open.items() if self._clock() - f.opened >= self._max_age_s]:
            self._close(key)

    def close(self) -> None:
        """Close all files."""
        for key in list(self._open):
            self._close(key)

    def _close(self, key: Key) -> None:
        file = self._open.pop(key)
        try:
            os.fsync(file.handle)
            _give_name(file.path, empty=file.size == 0)
        finally:
            os.close(file.handle)
        self._make_room()

    def recover(self) -> int:
        """Name what killed writers left open; returns how many files. Raises OSError."""
        found = 0
        for path in sorted(self._folder.glob(f"*/*/.*{_SUFFIX}")):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                whole = _whole_bytes(path)
                os.ftruncate(handle, whole)
                os.fsync(handle)
                _give_name(path, empty=whole == 0)
                found += 1
            except BlockingIOError:
                pass  # its writer lives
            finally:
                os.close(handle)
        return found

    def _make_room(self) -> None:
        files = []
        for path in self._folder.glob(f"*/*/*{_SUFFIX}"):
            if not path.name.startswith("."):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:  # never the one just written
            if total <= self._keep_bytes:
                return
            log.warning("request log is over %d bytes, removing its oldest file %s", self._keep_bytes, path)
            path.unlink(missing_ok=True)
            total -= size


def _component(model: str) -> str:
    """A model's name as one folder, whatever a config file calls it."""
    name = quote(model, safe="")[:200]
    return name if name.strip(".") else name.replace(".", "%2E")


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _give_name(path: Path, *, empty: bool) -> None:
    if empty:
        path.unlink()
        return
    name, number = path.name[1:], 0
    while True:
        target = path.with_name(name)
        if not target.exists():
            path.rename(target)
            return
        number += 1
        name = f"{path.name[1:].removesuffix(_SUFFIX)}-{number}{_SUFFIX}"


def _whole_bytes(path: Path) -> int:
    """Length of a file's whole records; what a killed writer left behind them is not counted."""
    total = 0
    with suppress(CorruptRecord):
        for record in read_records(path, max_bytes=_LARGEST_RECORD):
            total += 16 + len(record)
    return total
