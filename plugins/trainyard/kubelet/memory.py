"""Memory limits: what a container's processes really hold, measured; over the limit, all of them are killed.

RLIMIT_AS limits address space, which TensorFlow reserves by the tens of gigabytes and never uses, so it is of no
use here. Resident memory is summed over the process tree; as pages shared by forked processes would count many
times, a sum over the limit is confirmed by the proportional share (PSS), which is exact but dear to read.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import psutil

__all__ = ["MemoryWatcher", "resident"]

log = logging.getLogger(__name__)

_MEASURE_EVERY = 0.2  # seconds
_TREE_EVERY = 1.0  # finding all descendants reads every process of the machine
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


@dataclasses.dataclass
class _Watched:
    pid: int
    limit: int
    exceeded: Callable[[int], None]
    processes: list[psutil.Process] = dataclasses.field(default_factory=list)


class MemoryWatcher:
    """One thread for all containers with a limit; it sleeps while there is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: dict[int, _Watched] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, pid: int, limit: int, exceeded: Callable[[int], None]) -> None:
        """Call `exceeded(bytes)` once, when the tree of `pid` holds more than `limit` bytes."""
        with self._changed:
            self._watched[pid] = _Watched(pid, limit, exceeded)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kubelet-memory", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, pid: int) -> None:
        """Stop watching that process."""
        with self._changed:
            self._watched.pop(pid, None)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        next_tree = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopped)
                self._changed.wait_for(lambda: self._stopped, _MEASURE_EVERY)
                if self._stopped:
                    return
                watched = list(self._watched.values())
            renew = time.monotonic() >= next_tree
            if renew:
                next_tree = time.monotonic() + _TREE_EVERY
            for entry in watched:
                if renew or not entry.processes:
                    entry.processes = _tree(entry.pid)
                used = resident(entry.processes, entry.limit)
                if used > entry.limit:
                    with self._changed:
                        ours = self._watched.pop(entry.pid, None)
                    if ours is not None:
                        entry.exceeded(used)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except _GONE:
        return []


def resident(processes: list[psutil.Process], limit: int) -> int:
    """Bytes that the processes hold together: resident pages, or their share of them where that sum is over `limit`."""
    total = _sum(processes, share=False)
    if total > limit:
        total = min(total, _sum(processes, share=True))
    return total


def _sum(processes: list[psutil.Process], *, share: bool) -> int:
    total = 0
    for process in processes:
        try:
            if share:
                full = process.memory_full_info()
                total += getattr(full, "pss", full.uss)  # PSS is Linux's; elsewhere what is its own
            else:
                total += process.memory_info().rss
        except _GONE:
            continue
    return total
