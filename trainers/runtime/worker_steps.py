"""What the workers of a parameter server have done, as their chief knows it: they are passive themselves.

    <job>/workers.json    {"worker-0": {"steps": 1200, "examples_per_s": 5100.0}}

Steps are those done in this life of the chief.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["WorkerSteps"]

_SMOOTHING = 5.0  # seconds over which a rate is averaged, as the whole job's


class WorkerSteps:
    """Counts steps by worker; for several threads. `batch_size` is of one step of one worker."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.batch_size = 1
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._looked: dict[str, tuple[float, int]] = {}

    def gave(self, worker: str, steps: int) -> None:
        """Note steps that a worker ("worker-0") has done."""
        with self._lock:
            self._set(worker, self._steps.get(worker, 0) + steps)

    def has_given(self, worker: str, steps: int) -> None:
        """Note all the steps that a worker has done so far."""
        with self._lock:
            self._set(worker, steps)

    def _set(self, worker: str, steps: int) -> None:
        self._looked.setdefault(worker, (self._clock(), steps))  # the first share also warmed up
        self._steps[worker] = steps

    def values(self) -> dict[str, dict[str, Any]]:
        """By worker {"steps", "examples_per_s"}; the rate is None until there were two looks."""
        now = self._clock()
        with self._lock:
            for worker, steps in self._steps.items():
                before, had = self._looked[worker]
                if now - before <= 0:
                    continue
                rate = (steps - had) / (now - before)
                new = 1 - math.exp(-(now - before) / _SMOOTHING)
                known = self._rates.get(worker)
                self._rates[worker] = rate if known is None else known + new * (rate - known)
                self._looked[worker] = (now, steps)
            return {
                worker: {
                    "steps": steps,
                    "examples_per_s": round(self._rates[worker] * self.batch_size, 1)
                    if worker in self._rates
                    else None,
                }
                for worker, steps in sorted(self._steps.items())
            }
