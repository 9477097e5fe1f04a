"""What each replica printed, kept in the job's folder: it outlasts pods, nodes and a cluster's log rotation.

    logs/worker-1.log      the latest lines of a replica, over all its processes and pods
    logs/worker-1.log.1    those before, up to `KEEP` files of `MOST_BYTES` each

Each line begins with the time at which its launcher read it, so that those of several replicas can be put in order.
"""

from __future__ import annotations

import collections
import datetime as dt
import heapq
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = [
    "KEEP",
    "MOST_BYTES",
    "LogLine",
    "LogTail",
    "ReplicaLog",
    "read_logs",
    "replicas_with_logs",
    "stamp",
]

MOST_BYTES = 16 << 20
KEEP = 3

LogLine = tuple[str, str, str]
"""(time as ISO 8601 in UTC, replica, text)."""


class ReplicaLog:
    """Appends a replica's lines; a disk that takes none loses them, and says so once it takes some again."""

    def __init__(
        self,
        job_folder: Path,
        replica: str,
        *,
        now: Callable[[], float] = time.time,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.path = _path(job_folder, replica)
        self._now = now
        self._most = most_bytes
        self._lost = 0

    def write(self, data: bytes) -> None:
        """Append whole lines; never raises for a full or missing disk."""
        lines = data.splitlines()
        if not lines:
            return
        moment = stamp(self._now()).encode()
        if self._lost:
            lines.insert(0, f"({self._lost} lines before this one could not be kept)".encode())
        try:
            self._append(b"".join(moment + b" " + line + b"\n" for line in lines))
        except OSError:
            self._lost += len(data.splitlines())
        else:
            self._lost = 0

    def _append(self, data: bytes) -> None:
        self.path.parent.mkdir(exist_ok=True)
        # Opened each time: a pod before this one may still write its last words, and a shared disk may come back.
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            size = os.fstat(handle).st_size
        finally:
            os.close(handle)
        if size >= self._most:
            for number in range(KEEP - 1, 0, -1):
                older = _numbered(self.path, number - 1)
                if older.exists():
                    older.replace(_numbered(self.path, number))


def stamp(seconds: float) -> str:
    """A moment (seconds since 1970) as lines of a log have it: ISO 8601 in UTC, to the millisecond."""
    when = dt.datetime.fromtimestamp(seconds, dt.timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _path(job_folder: Path, replica: str) -> Path:
    return job_folder / "logs" / f"{replica}.log"


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def replicas_with_logs(job_folder: Path) -> list[str]:
    """The replicas that have printed something, by name."""
    return sorted(path.name.removesuffix(".log") for path in (job_folder / "logs").glob("*.log"))


def read_logs(
    job_folder: Path,
    replicas: Iterable[str],
    *,
    tail: int | None = None,
    is_over: Callable[[], bool] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """The lines of replicas in order of time; the last `tail` of them.

    With `is_over` it goes on with what is written from then on, until that says True and nothing more comes.
    """
    readers = [LogTail(job_folder, replica) for replica in replicas]
    lines: Iterable[LogLine] = heapq.merge(*(reader.old() for reader in readers))
    yield from lines if tail is None else collections.deque(lines, maxlen=tail)
    while is_over is not None:
        over = is_over()  # asked first: what was written before the end is read after it
        new = sorted((line for reader in readers for line in reader.new()), key=lambda line: line[0])
        yield from new
        if over:
            return
        if not new:
            sleep(0.3)


class LogTail:
    """One replica's files, as they are written and put aside: `old` once, then `new` as often as one likes."""

    def __init__(self, job_folder: Path, replica: str) -> None:
        self._path = _path(job_folder, replica)
        self._replica = replica
        self._inode: int | None = None
        self._at = 0
        self._rest = b""

    def old(self) -> Iterator[LogLine]:
        """What is there, the oldest file first."""
        for number in range(KEEP - 1, 0, -1):
            try:
                data = _numbered(self._path, number).read_bytes()
            except FileNotFoundError:
                continue
            yield from self._lines(data)
        yield from self.new()

    def new(self) -> list[LogLine]:
        """What was written since."""
        found: list[LogLine] = []
        try:
            with self._path.open("rb") as f:
                inode = os.fstat(f.fileno()).st_ino
                if self._inode not in (None, inode):
                    found += self._moved_on()
                self._inode = inode
                f.seek(self._at)
                data = self._rest + f.read()
                self._at = f.tell()
        except FileNotFoundError:
            return found  # nothing yet, or just put aside
        whole, _, self._rest = data.rpartition(b"\n")
        return [*found, *self._lines(whole)]

    def _moved_on(self) -> list[LogLine]:
        """The end of the file that was read until it was put aside."""
        for number in range(1, KEEP):
            path = _numbered(self._path, number)
            try:
                with path.open("rb") as f:
                    if os.fstat(f.fileno()).st_ino == self._inode:
                        f.seek(self._at)
                        data = self._rest + f.read()
                        self._at, self._rest = 0, b""
                        return list(self._lines(data))
            except FileNotFoundError:
                continue
        self._at, self._rest = 0, b""
        return []

    def _lines(self, data: bytes) -> Iterator[LogLine]:
        for line in data.split(b"\n"):
            if line:
                moment, _, text = line.decode(errors="backslashreplace").partition(" ")
                yield moment, self._replica, text
