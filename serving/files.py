"""Files that are whole or absent: atomic writes, exclusive creation, durable paths, locks. Stdlib only."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serving.errors import StoreBusy

__all__ = ["create_exclusive", "fsync_path", "locked", "write_atomic"]

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def fsync_path(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(path: Path, data: bytes, mode: int) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content; readers see the old one or the new one, whenever this is killed."""
    temporary = _temporary(path, data, mode)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink()
        raise
    fsync_path(path.parent)


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create a file with its whole content; False where it exists already."""
    temporary = _temporary(path, data, 0o644)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        # A file system without hard links (some object store mounts): exclusive, but not whole if killed here.
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    finally:
        temporary.unlink()
    fsync_path(path.parent)
    return True


@contextmanager
def locked(
    path: Path,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold a lock file while inside; raises StoreBusy, naming the holder, after `timeout_s` seconds.

    The kernel's lock decides, and falls with its process, even by kill -9; the pid and start time written
    into the file are for people.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = clock() + timeout_s
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)  # less the process's mask
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() >= deadline:
                    raise StoreBusy(
                        f"{path} is held by {_holder(handle)} for more than {timeout_s:g} s",
                        hint="wait for it to finish, or end that process",
                    ) from None
                sleep(0.02)
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps(_self()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _self() -> dict[str, object]:
    started: float | None = None
    with suppress(OSError, IndexError, ValueError):
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf(
            "SC_CLK_TCK"
        )
    return {"pid": os.getpid(), "host": socket.gethostname(), "started_s_after_boot": started}


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
