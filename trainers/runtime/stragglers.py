"""Workers that are silent or slow, named in the record while they are.

    <job>/stragglers.json    {"worker-1": {"since": 1767225600.0, "reason": "silent", "silent_s": 12.1, ...}}

A worker is *silent* that owes work and has given none for a while (stopped, swapping, cut off, or dead and not back
yet), and *slow* whose steps take several times the median of the others'. An entry goes when the worker recovers.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainers.job.files import read_json, write_json

__all__ = ["Straggler", "Stragglers", "read_stragglers", "straggler_file"]

log = logging.getLogger(__name__)

SILENT_SECONDS = 3.0  # at least; and as long as ten of the others' steps take
SILENT_STEPS = 10
SLOW_TIMES = 3.0  # the median of the others
_SMOOTHING = 0.3  # the weight of the latest step time


def straggler_file(folder: Path | str) -> Path:
    """Where a job's stragglers are named."""
    return Path(folder) / "stragglers.json"


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A worker that holds up others, or would.

    `since` is in epoch seconds; `reason` is "silent" or "slow"; `silent_s` how long it had been silent when it was
    named, `step_s` what a step takes it and `median_step_s` what it takes the others, all in seconds.
    """

    since: float
    reason: str
    silent_s: float | None = None
    step_s: float | None = None
    median_step_s: float | None = None


def read_stragglers(folder: Path | str) -> dict[str, Straggler]:
    """The workers of a job that are named now, by replica ("worker-1")."""
    data = read_json(straggler_file(folder)) or {}
    known = {field.name for field in dataclasses.fields(Straggler)}
    return {name: Straggler(**{k: v for k, v in s.items() if k in known}) for name, s in data.items()}


class Stragglers:
    """Watches the workers `names` of the job in `folder`; for several threads.

    `gave` notes work that came from a worker, `excuse` that one owes none; `look` judges. Until a worker has given
    its first, it is not judged: it may still be tracing or reading.
    """

    def __init__(
        self,
        folder: Path | str,
        names: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._file = straggler_file(folder)
        self.names = tuple(names)
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._moved: list[float | None] = [None] * len(names)
        self._step_seconds: list[float | None] = [None] * len(names)
        self._counts = [0] * len(names)
        self._given = [0] * len(names)
        self._named: dict[str, Straggler] = {}
        self._file.unlink(missing_ok=True)  # what an earlier chief thought

    @property
    def named(self) -> Mapping[str, Straggler]:
        """Those that are named now."""
        return dict(self._named)

    def gave(self, worker: int, step_seconds: float) -> None:
        """Note work that came from worker number `worker`, at so many seconds a step."""
        with self._lock:
            self._moved[worker] = self._clock()
            self._counts[worker] += 1
            before = self._step_seconds[worker]
            if self._counts[worker] <= 2 or before is None:
                self._step_seconds[worker] = step_seconds  # the first one also warmed up
            else:
                self._step_seconds[worker] = before + _SMOOTHING * (step_seconds - before)

    def counted(self, worker: int, count: int, step_seconds: float) -> None:
        """Note that a worker has given `count` pieces of work in all, the last one at so many seconds a step."""
        if count > self._given[worker]:
            self._given[worker] = count
            self.gave(worker, step_seconds)

    def excuse(self, worker: int) -> None:
        """Note that a worker owes nothing at the moment."""
        with self._lock:
            if self._moved[worker] is not None:
                self._moved[worker] = self._clock()

    def excuse_all(self) -> None:
        """Note that nobody owes anything at the moment."""
        for worker in range(len(self.names)):
            self.excuse(worker)

    def look(self) -> None:
        """Name those that straggle now, and no longer those that have recovered; in the log, too."""
        with self._lock:
            found = {name: s for i, name in enumerate(self.names) if (s := self._judge(i, name)) is not None}
            before, self._named = self._named, found
        if found.keys() == before.keys():
            return
        for name in sorted(found.keys() - before.keys()):
            log.warning("straggler %s: %s", name, _told(found[name]))
        for name in sorted(before.keys() - found.keys()):
            log.info("%s is no straggler any more", name)
        try:
            write_json(self._file, {name: dataclasses.asdict(s) for name, s in found.items()})
        except OSError as e:
            log.warning("could not write %s: %s", self._file, e)

    def _judge(self, worker: int, name: str) -> Straggler | None:
        moved, mine = self._moved[worker], self._step_seconds[worker]
        if moved is None or mine is None:
            return None
        others = [s for i, s in enumerate(self._step_seconds) if s is not None and i != worker]
        median = statistics.median(others) if others else None
        silent = self._clock() - moved
        since = self._named[name].since if name in self._named else None
        if silent > max(SILENT_SECONDS, SILENT_STEPS * (median if median is not None else mine)):
            return Straggler(
                since or self._now() - silent, "silent", round(silent, 1), _digits(mine), _digits(median)
            )
        # Enough of its steps, so that a slow start is not taken for a slow worker.
        if median is not None and self._counts[worker] > 5 and mine > SLOW_TIMES * median:
            return Straggler(since or self._now(), "slow", None, _digits(mine), _digits(median))
        return None


def _digits(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.3g}")


def _told(straggler: Straggler) -> str:
    if straggler.reason == "silent":
        return f"it owes work and has given none for {straggler.silent_s:.1f} s"
    return f"a step takes it {straggler.step_s:g} s, the others {straggler.median_step_s:g} s"
