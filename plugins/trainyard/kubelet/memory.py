"""Memory limits: what a container's processes really hold, measured; over the limit, all of them are killed.

RLIMIT_AS limits address space, which TensorFlow reserves by the tens of gigabytes and never uses, so it is of no
use here. Resident memory is summed over the process tree; as pages shared by forked processes would count many
times, a sum over the limit is confirmed by the proportional share (PSS), which is exact but dear to read.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection

import psutil

from trainyard.kubelet.processes import with_descendants

__all__ = ["MemoryWatcher", "resident"]

log = logging.getLogger(__name__)

_MEASURE_EVERY = 0.2  # seconds
_TREE_EVERY = 1.0  # finding all descendants reads every process of the machine
# Times as long as a round took, before the next: a thousand containers get a tenth of a core, too.
_REST = 10.0
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
        next_tree = pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopped)
                self._changed.wait_for(lambda: self._stopped, max(_MEASURE_EVERY, pause))
                if self._stopped:
                    return
                watched = list(self._watched.values())
            begun = time.monotonic()
            if begun >= next_tree or not all(entry.processes for entry in watched):
                trees = _trees({entry.pid for entry in watched})
                for entry in watched:
                    entry.processes = trees[entry.pid]
                next_tree = begun + max(_TREE_EVERY, _REST * (time.monotonic() - begun))
            for entry in watched:
                used = resident(entry.processes, entry.limit)
                if used > entry.limit:
                    with self._changed:
                        ours = self._watched.pop(entry.pid, None)
                    if ours is not None:
                        entry.exceeded(used)
            pause = _REST * (time.monotonic() - begun)


def _trees(pids: Collection[int]) -> dict[int, list[psutil.Process]]:
    """Each of these processes with all its descendants, by one look at the machine; [] for one that is gone."""
    known: dict[int, psutil.Process] = {}
    children: collections.defaultdict[int, list[psutil.Process]] = collections.defaultdict(list)
    for process in psutil.process_iter():
        try:
            children[process.ppid()].append(process)
        except _GONE:
            continue
        known[process.pid] = process
    return {pid: with_descendants([known[pid]], children) if pid in known else [] for pid in pids}


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
