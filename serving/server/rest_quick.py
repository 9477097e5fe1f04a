"""Which requests are answered so quickly that another thread is not worth its hand-over.

A request for a small model takes some 0.3 ms of work, and handing it to a thread and back 0.1 ms and two wake-ups,
which on a busy machine are longer than all the rest. Where a model's own run is most of an answer, threads are worth
it: it doesn't hold the interpreter's lock. So a path is quick by the CPU time of its answers, after a number of them,
and no longer after a slow one: one that slows down holds up the others by one answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["QUICK_BYTES", "QuickCalls"]

QUICK_BYTES = 256 << 10
"""The largest body of a request that may be quick: time spent on reading goes with it."""
_QUICK_S = 0.0008  # CPU time of an answer, on average
_SLOW_CPU_S, _SLOW_S = 0.005, 0.05  # of one answer, and by the clock: threads of a pool wait for each other
_KNOWN = 20  # answers before a path may be quick, and about as many as the average remembers
_PATHS = 1000  # clients may ask for what is not there


class _Path(NamedTuple):
    answers: int = 0
    average: float = 0.0


class QuickCalls:
    """The paths that are quick; none where `ever` is false, as where answers wait for a batch."""

    def __init__(
        self,
        *,
        ever: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._ever = ever
        self._clock = clock
        self._cpu = cpu
        self._paths: dict[str, _Path] = {}

    def has(self, path: str) -> bool:
        """Whether this path has shown to be quick."""
        known = self._paths.get(path)
        return known is not None and known.answers >= _KNOWN and known.average <= _QUICK_S

    def timed(self, path: str, respond: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes]:
        """Status and body of `respond()`, with a note of how long it took."""
        begun, used = self._clock(), self._cpu()
        answer = respond()
        if self._ever:
            self._note(path, self._cpu() - used, self._clock() - begun)
        return answer

    def _note(self, path: str, used: float, took: float) -> None:
        # Of two threads that write at the same time one is forgotten: it is a matter of one answer.
        if used > _SLOW_CPU_S or took > _SLOW_S:
            self._paths.pop(path, None)
        elif path in self._paths or len(self._paths) < _PATHS:
            answers, average = self._paths.get(path, _Path())
            answers = min(answers + 1, _KNOWN)
            self._paths[path] = _Path(answers, average + (used - average) / answers)
