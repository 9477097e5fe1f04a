"""The training loops: ours, because Keras 3's `fit` runs neither on parameter servers nor on all-reduce workers.

In-graph strategies (local, mirrored, multi_worker) call one function for K steps. For parameter servers see
`async_servers` and `sync_servers`. All finish exactly the asked number of steps; logging and heartbeats are on
threads of their own, checkpoints between calls.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from trainers.job.errors import TrainyardError
from trainers.job.failures import FailureClass
from trainers.runtime.checkpoints import Checkpoints, not_finite
from trainers.runtime.heartbeat import Progress
from trainers.runtime.space import DiskFull, is_full, no_room, room_patience
from trainers.runtime.steps import StepSize
from trainers.runtime.stragglers import Stragglers
from trainers.runtime.summaries import TrainSummaries

__all__ = ["CheckpointEvery", "LeftEarly", "Loop", "train_in_graph"]

log = logging.getLogger(__name__)


class LeftEarly(TrainyardError):
    """The replica was asked to leave, and has saved a checkpoint."""

    code = "runtime.preempted"
    failure_class = FailureClass.PREEMPTED


class CheckpointEvery:
    """When the next checkpoint is due: after a number of steps, or else so that writing takes 2 % of the time.

    By time, the pause is 50 times what the last one cost, from 5 to 600 s: what a killed replica repeats stays
    small where checkpoints are cheap, and training is not held up where they are dear. `loss_every` steps a loss
    is noted, so no call goes past them either.
    """

    SHARE = 0.02
    LEAST, MOST = 5.0, 600.0

    def __init__(
        self,
        steps: int | None,
        *,
        loss_every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._loss_every = loss_every
        self._clock = clock
        self._pause = self.LEAST
        self._last_step = 0
        self._last_time = clock()
        self._not_before = clock()

    def postpone(self) -> None:
        """Try again in a moment: this one could not be written."""
        self._not_before = self._clock() + self.LEAST

    def saved(self, step: int, *, cost: float = 0.0) -> None:
        """Note a checkpoint at `step` that took `cost` seconds to write."""
        self._last_step, self._last_time = step, self._clock()
        self._pause = min(max(cost / self.SHARE, self.LEAST), self.MOST)

    def due(self, step: int) -> bool:
        """Whether to write one now."""
        if self._clock() < self._not_before:
            return False
        if self._steps is not None:
            return step // self._steps > self._last_step // self._steps
        return self._clock() - self._last_time >= self._pause

    @property
    def most(self) -> int:
        """The most steps in one call: a quarter of those between two, so that none comes much later than it is due."""
        return min(max(1, self._steps // 4) if self._steps else 1 << 30, self._loss_every or 1 << 30)

    def next(self, step: int) -> int:
        """The step of the next one after `step`; a step very far off when it is due by time."""
        return (step // self._steps + 1) * self._steps if self._steps else step + (1 << 30)

    def room(self, step: int) -> int:
        """Steps until the next one, or a loss to note, is due; very many when it is due by time."""
        # From the step alone: all-reduce peers must come to the same number.
        return min(every - step % every for every in (self._steps, self._loss_every, 1 << 30) if every)


@dataclasses.dataclass
class Loop:
    """What both loops work with.

    `run` is `steps.make_run`'s; `save` is None where another replica writes the checkpoints; `stop` asks to save
    and leave; `save_now` asks for a checkpoint; `started` is called after the first finished call, `saved` after each
    checkpoint with the seconds that all have taken.
    """

    run: Any
    target: int
    progress: Progress
    every: CheckpointEvery
    checkpoints: Checkpoints | None
    stop: threading.Event
    save_now: threading.Event
    started: Callable[[], None]
    saved: Callable[[float], None] | None = None
    summaries: TrainSummaries | None = None
    stragglers: Stragglers | None = None
    checkpoint_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def save(self, step: int, *, patience: float = 0.0) -> None:
        """Write a checkpoint, if this replica writes them, and take the time.

        On a full disk it waits `patience` seconds for room, then raises DiskFull.
        """
        if self.checkpoints is None or self.checkpoints.last == step:
            return
        began = self.clock()
        self.progress.enter("saving")
        while True:
            try:
                self.checkpoints.save(step)
                break
            except Exception as e:
                if not is_full(e):
                    raise
                self.checkpoints.discard(step)
                if self.clock() - began >= patience:
                    raise no_room(self.checkpoints.folder, step, self.checkpoints.last) from None
                log.warning(
                    "no room for the checkpoint of step %s in %s: waiting for it",
                    step,
                    self.checkpoints.folder,
                )
                time.sleep(1.0)
        self.progress.enter("training")
        cost = self.clock() - began
        self.every.saved(step, cost=cost)
        self.checkpoint_seconds += cost
        if self.saved is not None:
            self.saved(self.checkpoint_seconds)

    def room(self, step: int) -> int:
        """Steps until something is due at a step of its own; all-reduce peers come to the same number."""
        room = self.every.room(step)
        return room if self.summaries is None else min(room, self.summaries.room(step))

    def save_last(self, step: int) -> None:
        """Write the last checkpoint; on a full disk it waits a while for room."""
        self.save(step, patience=room_patience())

    def after(self, step: int, *, leave: bool) -> None:
        """What is due between two calls: figures for TensorBoard, leave, or save. Raises LeftEarly."""
        if self.summaries is not None:
            self.summaries.after(step)
        if leave:
            self.save(step, patience=room_patience() / 4)
            raise LeftEarly(f"was asked to leave at step {step}")
        if self.save_now.is_set() or (self.every.due(step) and step < self.target):
            self.save_now.clear()
            try:
                self.save(step)
            except DiskFull as e:
                log.warning("%s; training goes on", e.message)
                self.progress.enter("training")
                self.every.postpone()


def train_in_graph(loop: Loop, iterator: Any, step: int) -> int:
    """Train from `step` to the target; the number of finished steps.

    All-reduce peers tell each other how long a step took and whether they shall leave, so that all pack the same
    number of steps and leave at the same one. Raises NotFinite for a loss that is NaN or infinite, and LeftEarly
    after the checkpoint when asked to leave.
    """
    import tensorflow as tf

    size = StepSize(most=500)
    first = True
    step_time = 0.0
    while step < loop.target:
        k = min(1 if first else size.value, loop.target - step, loop.room(step))
        told = tf.constant([step_time, float(loop.stop.is_set())], tf.float32)
        began = loop.clock()
        loss, waited, heard = loop.run(iterator, tf.constant(k, tf.int32), told)
        mean = float(loss)
        took = loop.clock() - began
        if not math.isfinite(mean):
            raise not_finite("loss", step + k)
        step += k
        if first:
            loop.started()  # the first call also traced and compiled: its time says nothing
        else:
            step_time = took / k
        first = False
        mean_step_time, leave = heard.numpy().tolist()
        if mean_step_time > 0:
            size.measured(mean_step_time)
        loop.progress.advance(k, mean, float(waited), took)
        loop.after(step, leave=leave > 0)
    loop.save_last(step)
    return step
