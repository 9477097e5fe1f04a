"""File locks: they keep runs of one dataset apart, and let its slices work side by side."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["exclusive", "shared"]


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path` alone; yields whether it is held.

    False only where the file system knows no locks: there, unique temporary names and renames still keep
    every file whole, but another run's files must not be cleared away. The kernel gives the lock of a killed
    process back; the file is removed by its last holder. `waiting` is called once when another run holds it.
    """
    fd, held = _acquire(path, waiting, fcntl.LOCK_EX)
    try:
        yield held
    finally:
        if held:
            path.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def shared(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path` together with others who hold it so, and with nobody who holds it alone.

    The last of them removes the file.
    """
    fd, held = _acquire(path, waiting, fcntl.LOCK_SH)
    try:
        yield held
    finally:
        if held:
            with contextlib.suppress(BlockingIOError):  # others hold it: it is theirs to remove
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, path):
                    path.unlink(missing_ok=True)
        os.close(fd)


def _acquire(path: Path, waiting: Callable[[], None], kind: int) -> tuple[int, bool]:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)  # less the process's mask
        try:
            held = _lock(fd, waiting, kind)
            # The holder before us may have removed the file that we waited for; then it guards nothing.
            if not held or _same_file(fd, path):
                return fd, held
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, waiting: Callable[[], None], kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(fd, kind)
    except OSError:
        return False
    return True


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
