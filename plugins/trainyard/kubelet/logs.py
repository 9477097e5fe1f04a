"""Containers' output: taken from a pipe line by line, stamped, kept in a file, followed live.

A line of a file is `<30 byte stamp> F <text>`, or `P` for a piece of a line that was too long or had no end,
which is what container runtimes write. One thread takes the output of all containers, so an idle container
costs nothing, and followers are woken by a condition, not by a poll.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from trainyard.kubelet.clock import log_stamp

__all__ = ["LogFile", "LogPump", "read_log", "tail"]

log = logging.getLogger(__name__)

STAMP = 30
MAX_LINE = 16 * 1024  # as containerd cuts lines
_CHUNK = 64 * 1024
_HEARTBEAT = 2.0  # seconds after which a silent follower gets b"", so that the server can see whether it left


class LogFile:
    """The log of one run of one container: appended by the pump, read by many."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed = threading.Condition()
        self.closed = False
        self.settled = False
        self._partial = b""
        self._file = path.open("ab")

    def feed(self, data: bytes) -> None:
        """Append output; a line without an end waits for it."""
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        stamp = log_stamp(time.time_ns())
        out: list[bytes] = []
        for line in lines:
            out += _pieces(stamp, line, b"F")
        while len(self._partial) >= MAX_LINE:
            out.append(stamp + b" P " + self._partial[:MAX_LINE] + b"\n")
            self._partial = self._partial[MAX_LINE:]
        if out:
            self._append(b"".join(out))

    def close(self) -> None:
        """Write what is left and tell followers that no more comes."""
        if self.closed:
            return
        if self._partial:
            self._append(log_stamp(time.time_ns()) + b" P " + self._partial + b"\n")
            self._partial = b""
        self._file.close()
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def settle(self) -> None:
        """Let followers go: the pod's status now says how the run ended.

        A follower reads the status next. Let go at the log's end, it would find "running", wait, and follow again.
        """
        with self.changed:
            self.settled = True
            self.changed.notify_all()

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        with self.changed:
            self.changed.notify_all()


def _pieces(stamp: bytes, line: bytes, last: bytes) -> Iterator[bytes]:
    while len(line) > MAX_LINE:
        yield stamp + b" P " + line[:MAX_LINE] + b"\n"
        line = line[MAX_LINE:]
    yield stamp + b" " + last + b" " + line + b"\n"


class LogPump:
    """Takes the output of all containers on one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._todo: deque[tuple[str, int, LogFile]] = deque()
        self._thread = threading.Thread(target=self._run, name="kubelet-logs", daemon=True)
        self._thread.start()

    def add(self, fd: int, file: LogFile) -> None:
        """Move what comes from the pipe `fd` into `file` until its end; takes over `fd`."""
        self._ask("add", fd, file)

    def finish(self, fd: int, file: LogFile) -> None:
        """Take what is in the pipe now and close, though somebody may still hold its other end."""
        self._ask("finish", fd, file)

    def stop(self) -> None:
        """End the thread; what was added is closed."""
        self._ask("stop", -1, None)  # type: ignore[arg-type]
        self._thread.join()

    def _ask(self, what: str, fd: int, file: LogFile) -> None:
        with self._lock:
            self._todo.append((what, fd, file))
        # A full pipe means that the thread is about to wake anyway.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def _run(self) -> None:
        open_files: dict[int, LogFile] = {}
        running = True
        while running:
            for key, _ in self._selector.select():
                if key.fd == self._wake_r:
                    os.read(self._wake_r, 4096)
                    running = self._serve(open_files)
                elif key.fd in open_files:
                    self._take(key.fd, open_files)
        for fd in list(open_files):
            self._close(fd, open_files)
        self._selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _serve(self, open_files: dict[int, LogFile]) -> bool:
        while True:
            with self._lock:
                if not self._todo:
                    return True
                what, fd, file = self._todo.popleft()
            if what == "stop":
                return False
            if what == "add":
                os.set_blocking(fd, False)
                open_files[fd] = file
                self._selector.register(fd, selectors.EVENT_READ)
            elif open_files.get(fd) is file:
                while self._take(fd, open_files):
                    pass
                if open_files.get(fd) is file:
                    self._close(fd, open_files)

    def _take(self, fd: int, open_files: dict[int, LogFile]) -> bool:
        """Move one chunk; False when there was none."""
        try:
            data = os.read(fd, _CHUNK)
            if data:
                open_files[fd].feed(data)
                return True
        except BlockingIOError:
            return False
        except OSError as e:
            # A full disk must not end the logs of the other containers.
            log.error("the log %s ends here: %s", open_files[fd].path, os.strerror(e.errno or errno.EIO))
        self._close(fd, open_files)
        return False

    def _close(self, fd: int, open_files: dict[int, LogFile]) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        file = open_files.pop(fd)
        try:
            file.close()
        except OSError as e:
            log.error("could not end the log %s: %s", file.path, e)


def read_log(
    path: Path,
    live: LogFile | None = None,
    *,
    follow: bool = False,
    timestamps: bool = False,
    since: float | None = None,
    tail_lines: int | None = None,
    limit: int | None = None,
) -> Iterator[bytes]:
    """The log as the API hands it out, in chunks; with `follow`, until `live` is settled.

    `since` is in seconds since 1970; `limit` in bytes of the answer. Yields b"" now and then while nothing comes.
    """
    first = log_stamp(int(since * 1_000_000_000)) if since is not None else b""
    start = _tail_offset(path, tail_lines) if tail_lines is not None else 0
    left = limit
    for raw in _chunks(path, live if follow else None, start):
        data = _render(raw, first, timestamps)
        if left is not None:
            data = data[:left]
            left -= len(data)
        if data or not raw:
            yield data
        if left == 0:
            return


def _chunks(path: Path, live: LogFile | None, start: int) -> Iterator[bytes]:
    """Whole lines of the file as they come."""
    with path.open("rb") as f:
        f.seek(start)
        rest = b""
        while True:
            # Asked before reading: what was written before the end is then read for sure.
            closed = live is None or live.settled
            data = f.read(_CHUNK)
            if data:
                head, newline, rest_new = (rest + data).rpartition(b"\n")
                if newline:
                    yield head + newline
                rest = rest_new
            elif closed:
                return
            else:
                assert live is not None
                with live.changed:
                    position = f.tell()
                    grown = live.changed.wait_for(
                        lambda at=position: live.settled or os.fstat(f.fileno()).st_size > at, _HEARTBEAT
                    )
                if not grown:
                    yield b""


def _render(raw: bytes, first: bytes, timestamps: bool) -> bytes:
    out: list[bytes] = []
    middle = False  # of a line that came in pieces
    for line in raw.split(b"\n")[:-1]:
        if line[:STAMP] < first:
            continue
        whole = line[STAMP + 1 : STAMP + 2] == b"F"
        if timestamps and not middle:
            out.append(line[: STAMP + 1])
        out.append(line[STAMP + 3 :])
        if whole:
            out.append(b"\n")
        middle = not whole
    return b"".join(out)


def _tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin; reads from the end."""
    with path.open("rb") as f:
        position = f.seek(0, os.SEEK_END)
        if lines <= 0:
            return position
        found, data = 0, b""
        while position > 0:
            step = min(_CHUNK, position)
            position -= step
            f.seek(position)
            data = f.read(step) + data
            found = data.count(b"\n")
            if found > lines:
                break
        if found <= lines:
            return position
        at = len(data)
        for _ in range(lines + 1):
            at = data.rfind(b"\n", 0, at)
        return position + at + 1


def tail(path: Path, *, lines: int, size: int) -> str:
    """The last lines of a log as text, at most `size` bytes; "" when there is no log."""
    try:
        data = b"".join(read_log(path, tail_lines=lines))
    except FileNotFoundError:
        return ""
    return data[-size:].decode(errors="replace")
