"""The progress of a run, and the thread that writes it to the record and the spool, off the training path."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable

from trainers.job.files import write_json
from trainers.job.record import Heartbeat, JobRecord
from trainers.runtime.curve import LossCurve
from trainers.runtime.tracking import Spool
from trainers.runtime.worker_steps import WorkerSteps

__all__ = ["Progress", "Pulse"]

log = logging.getLogger(__name__)

_SMOOTHING = 5.0  # seconds over which the rate is averaged


class Progress:
    """What is known of a run: where it is, how fast, how well. For many threads at once."""

    def __init__(
        self, target: int, examples_per_step: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.target = target
        self.phase = "starting"
        self.step = 0
        self.loss: float | None = None
        self.trained_steps = 0
        self.curve: LossCurve | None = None
        self.examples_per_step = examples_per_step
        # Of a synchronous parameter_server, in this life of its chief.
        self.gradients_used: int | None = None
        self.gradients_dropped: int | None = None
        self.workers = WorkerSteps(clock=clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._rate: float | None = None  # steps a second
        self._wait: float | None = None
        self._since: float | None = None

    def enter(self, phase: str) -> None:
        """Note what the replica does now."""
        with self._lock:
            self.phase = phase
            if phase == "training":
                self._since = self._clock()

    def begin_at(self, step: int) -> None:
        """Note the step that a checkpoint was restored from."""
        with self._lock:
            self.step = step
        if self.curve is not None:
            self.curve.begin_at(step)

    def advance(self, steps: int, loss: float | None, waited: float = 0.0, busy: float = 0.0) -> None:
        """Note finished steps, their mean loss (None: not known), and of `busy` seconds those `waited` for data."""
        with self._lock:
            now = self._clock()
            self.step += steps
            self.trained_steps += steps
            self.loss = self.loss if loss is None else loss
            if self._since is not None:
                took = max(now - self._since, 1e-6)
                new = 1 - math.exp(-took / _SMOOTHING)
                rate = steps / took
                self._rate = rate if self._rate is None else self._rate + new * (rate - self._rate)
            if busy > 0:
                share = min(1.0, max(0.0, waited / busy))
                self._wait = share if self._wait is None else self._wait + 0.2 * (share - self._wait)
            self._since = now
            step = self.step
        if self.curve is not None and loss is not None:
            self.curve.note(step, loss)

    def values(self) -> dict[str, float | int | str | None]:
        """The fields of a heartbeat."""
        with self._lock:
            rate = self._rate
            return {
                "phase": self.phase,
                "step": self.step,
                "target": self.target,
                "loss": self.loss,
                "examples_per_s": round(rate * self.examples_per_step, 1) if rate else None,
                "input_wait": round(self._wait, 4) if self._wait is not None else None,
                "gradients_dropped": self.gradients_dropped,
                "eta_s": round((self.target - self.step) / rate, 1) if rate else None,
            }


class Pulse:
    """Writes the progress to the record at most every `every` seconds, and to the spool on each new step.

    A record that can't be written for a while (a full disk, a network file system that is away) is a warning:
    training goes on. New steps are then told by the time of the heartbeat's file, which needs no space.
    """

    def __init__(
        self,
        record: JobRecord,
        progress: Progress,
        base: Heartbeat,
        *,
        spool: Spool | None = None,
        every: float = 0.5,
        idle: float = 2.0,
    ) -> None:
        self._record = record
        self._progress = progress
        self._base = base
        self._spool = spool
        self._every = every
        self._idle = idle
        self._stop = threading.Event()
        self._written: dict[str, float | int | str | None] = {}
        self._spooled = -1
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="trainyard-pulse", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def beat(self) -> None:
        """Write now."""
        values = self._progress.values()
        try:
            self._record.beat(dataclasses.replace(self._base, **values))  # type: ignore[arg-type]
            workers = self._progress.workers.values()
            if workers:
                write_json(self._record.folder / "workers.json", workers)
            if self._spool is not None and values["loss"] is not None and values["step"] != self._spooled:
                self._spooled = int(values["step"] or 0)
                self._spool.metrics(
                    {k: values[k] for k in ("loss", "examples_per_s", "input_wait")}, step=self._spooled
                )
        except OSError as e:
            if not self._warned:
                log.warning("could not write the heartbeat: %s; going on", e)
            self._warned = True
            if values["step"] != self._written.get("step"):
                with contextlib.suppress(OSError):
                    self._record.touch_heartbeat(self._base.role, self._base.index)
        else:
            self._warned = False
        self._written = values

    def stop(self) -> None:
        """Write a last time and end."""
        self._stop.set()
        self._thread.join()
        self.beat()

    def _run(self) -> None:
        last = 0.0
        while not self._stop.wait(self._every):
            values = self._progress.values()
            now = time.monotonic()
            if values != self._written or now - last >= self._idle:
                last = now
                self.beat()
