"""Asynchronous training on parameter servers: a coordinator hands K steps at a time to whichever worker is free.

A worker that dies has its steps done by another one; the coordinator does that. One that hangs, stopped or cut off
without a word, does not: its steps are handed out again once all others are done, and do not count if they come in
after all. The target is met exactly, and nobody waits for it longer than the patience says.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

from trainers.runtime.checkpoints import not_finite
from trainers.runtime.loop import Loop
from trainers.runtime.steps import StepSize
from trainers.runtime.strategies import SetUp

__all__ = ["locate", "train_on_servers"]

log = logging.getLogger(__name__)

_LANES = 2  # closures in flight a worker: one runs while the next one is on its way
PATIENCE = 10.0  # seconds after which steps are handed out again, and at least
_PATIENT_CALLS = 5  # times what the longest call so far has taken


def locate(run: Any) -> Any:
    """`steps.make_run`'s function, hearing [index of the worker that ran it, seconds that it took]."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def located(iterator: Any, k: Any, told: Any = None) -> Any:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            loss, waited, _ = run(iterator, k, told)
        with tf.control_dependencies([loss]):
            took = tf.timestamp() - began
        return loss, waited, tf.stack([tf.cast(worker, tf.float64), took])

    return located


class _Share:
    """The steps of one closure, and when it was asked for."""

    def __init__(self, steps: int, began: float) -> None:
        self.steps = steps
        self.began = began
        self.revoked = False


class _Shares:
    """The steps that are left, handed out to lanes; exactly the target, no closure counted twice."""

    def __init__(self, step: int, target: int) -> None:
        self._lock = threading.Lock()
        self._given = step
        self._target = target
        self._out: set[_Share] = set()
        self._longest = 0.0
        self.done = step

    def take(self, most: int, now: float) -> _Share | None:
        """A share for the next closure; None when all are handed out."""
        with self._lock:
            k = max(0, min(most, self._target - self._given))
            if k == 0:
                return None
            self._given += k
            share = _Share(k, now)
            self._out.add(share)
            return share

    def finish(self, share: _Share, now: float) -> bool:
        """Count a closure's steps; False when others have been asked to make them."""
        with self._lock:
            if share.revoked:
                return False
            self._out.discard(share)
            self._longest = max(self._longest, now - share.began)
            self.done += share.steps
            return True

    def revoke(self, now: float) -> int:
        """Take back, when nothing else is left to do, the shares that are overdue; how many."""
        with self._lock:
            if self._given < self._target:
                return 0
            patience = max(PATIENCE, _PATIENT_CALLS * self._longest)
            overdue = [share for share in self._out if now - share.began > patience]
            for share in overdue:
                share.revoked = True
                self._out.discard(share)
                self._given -= share.steps
            return len(overdue)

    @property
    def all_given(self) -> bool:
        """Whether nothing is left to hand out."""
        with self._lock:
            return self._given >= self._target


def train_on_servers(loop: Loop, set_up: SetUp, iterator: Any, step: int) -> int:
    """Train from `step` to the target on parameter servers, asynchronously; the number of finished steps.

    Each worker has lanes, threads that schedule one closure of K steps at a time and wait for it: a worker that
    hangs blocks its own lanes only. A closure whose worker dies is run again by another one (the coordinator
    does that), counted once. Raises what the first lane raises: a lost parameter server as
    tf.errors.UnavailableError, an error of the user's code as itself.
    """
    import tensorflow as tf

    shares = _Shares(step, loop.target)
    stragglers = loop.stragglers
    ended = threading.Event()
    woken = threading.Event()
    errors: list[BaseException] = []
    lanes = _LANES * set_up.workers
    nothing = tf.zeros([0], tf.float32)

    def lane() -> None:
        size = StepSize(most=100)
        first = True
        try:
            while not ended.is_set():
                # Near the end closures become small, so that no lane waits long for the last one.
                fair = max(1, (loop.target - shares.done) // lanes)
                share = shares.take(1 if first else min(size.value, fair, loop.every.most), loop.clock())
                if share is None:
                    return
                k = share.steps
                args = (iterator, tf.constant(k, tf.int32), nothing)
                loss, waited, heard = set_up.coordinator.schedule(loop.run, args=args).fetch()
                took = loop.clock() - share.began
                if stragglers is not None and heard is not None:
                    worker, seconds = heard.numpy().tolist()
                    stragglers.gave(int(worker), seconds / k)
                if not math.isfinite(float(loss)):
                    raise not_finite("loss", shares.done + k)
                if not shares.finish(share, loop.clock()):
                    log.info("%s steps that others have made meanwhile came in late: not counted", k)
                    return
                if not first:
                    size.measured(took / _LANES / k)
                first = False
                loop.progress.advance(k, float(loss), float(waited), took / _LANES)
                woken.set()
        except BaseException as e:  # noqa: BLE001 - handed to the main thread, which raises it
            errors.append(e)
            ended.set()
        finally:
            woken.set()

    def start_lanes(count: int) -> None:
        for _ in range(count):
            threading.Thread(target=lane, name="lane", daemon=True).start()

    start_lanes(lanes)
    begun = False
    try:
        while not errors and shares.done < loop.target:
            woken.wait(0.05)
            woken.clear()
            if stragglers is not None:
                if shares.all_given:
                    stragglers.excuse_all()  # there may be nothing to do for them
                stragglers.look()
            overdue = shares.revoke(loop.clock())
            if overdue:
                log.warning("steps that a worker has had for too long are handed out again")
                start_lanes(overdue)
            if shares.done > step and not begun:
                begun = True
                loop.started()
            if not errors:
                # Workers go on while it is written, as asynchronous training allows.
                loop.after(shares.done, leave=loop.stop.is_set())
    finally:
        ended.set()
    if errors:
        raise errors[0]
    loop.save_last(shares.done)
    return shares.done
