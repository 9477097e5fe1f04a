"""Asynchronous training on parameter servers: a coordinator hands K steps at a time to whichever worker is free.

A worker that dies has its steps done by another one; the coordinator does that. One that hangs, stopped or cut off
without a word, does not: its steps are handed out again once all others are done, and do not count if they come in
after all. The target is met exactly, and nobody waits for it longer than the patience says.

Where checkpoints are asked for by steps, no step beyond the next one is handed out before it is written: what a
lost server repeats is never more than one interval. Where they come by time, workers go on while one is written.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

from trainers.runtime.checkpoints import not_finite
from trainers.runtime.loop import Loop
from trainers.runtime.steps import StepSize
from trainers.runtime.strategies import SetUp

__all__ = ["locate", "train_on_servers"]

log = logging.getLogger(__name__)

_LANES = 2  # closures in flight a worker: one runs while the next one is on its way
PATIENCE = 5.0  # seconds after which steps are handed out again, and at least
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


def _is_made(remote: Any) -> bool:
    """Whether a closure ran to its end, so that only what it gave has gone with the worker that holds it."""
    return remote._status.name == "READY" and remote._get_error() is None


class _Share:
    """The steps of one closure, and when it was asked for."""

    def __init__(self, steps: int, began: float) -> None:
        self.steps = steps
        self.began = began
        self.revoked = False


class _Shares:
    """The steps that are left, handed out to lanes; exactly the target, no closure counted twice.

    None beyond `limit` is handed out; `allow` moves it.
    """

    def __init__(self, step: int, target: int, limit: int) -> None:
        self._lock = threading.Condition()
        self._given = step
        self._target = target
        self._limit = min(limit, target)
        self._out: set[_Share] = set()
        self._longest = 0.0
        self._ended = False
        self.done = step

    @property
    def left(self) -> int:
        """Steps that are not done yet, up to the limit."""
        with self._lock:
            return self._limit - self.done

    def take(self, most: int, clock: Callable[[], float]) -> _Share | None:
        """A share for the next closure, waited for at the limit; None when all are handed out."""
        with self._lock:
            while self._given >= self._limit and self._given < self._target and not self._ended:
                self._lock.wait()
            k = max(0, min(most, self._limit - self._given))
            if k == 0 or self._ended:
                return None
            self._given += k
            share = _Share(k, clock())
            self._out.add(share)
            return share

    def allow(self, limit: int) -> None:
        """Hand out up to `limit`, or to the target."""
        with self._lock:
            self._limit = max(self._limit, min(limit, self._target))
            self._lock.notify_all()

    def end(self) -> None:
        """Let go of whoever waits; nothing is handed out any more."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()

    def finish(self, share: _Share, took: float | None) -> bool:
        """Count a closure's steps, made in `took` seconds (None: it also traced, so its time says nothing).

        False when others have been asked to make them.
        """
        with self._lock:
            if share.revoked:
                return False
            self._out.discard(share)
            self._longest = max(self._longest, took or 0.0)
            self.done += share.steps
            return True

    def revoke(self, now: float) -> int:
        """Take back, when nothing else is left to do, the shares that are overdue; how many."""
        with self._lock:
            if self._given < self._limit:
                return 0
            patience = max(PATIENCE, _PATIENT_CALLS * self._longest)
            overdue = [share for share in self._out if now - share.began > patience]
            for share in overdue:
                share.revoked = True
                self._out.discard(share)
                self._given -= share.steps
            self._lock.notify_all()
            return len(overdue)

    @property
    def all_given(self) -> bool:
        """Whether nothing is left to hand out."""
        with self._lock:
            return self._given >= self._target


class _Lanes:
    """Threads that each schedule one closure at a time and wait for it; what one raises ends all."""

    def __init__(self, loop: Loop, set_up: SetUp, iterator: Any, shares: _Shares) -> None:
        self._loop = loop
        self._coordinator = set_up.coordinator
        self._iterator = iterator
        self._shares = shares
        self._count = _LANES * set_up.workers
        self.ended = threading.Event()
        self.woken = threading.Event()
        self.errors: list[BaseException] = []

    def start(self, count: int | None = None) -> None:
        """Start lanes, as many as workers want where no number is given."""
        for _ in range(self._count if count is None else count):
            threading.Thread(target=self._lane, name="lane", daemon=True).start()

    def _lane(self) -> None:
        size = StepSize(most=100)
        first = True
        try:
            while not self.ended.is_set():
                # Near the limit closures become small, so that no lane waits long for the last one.
                fair = max(1, self._shares.left // self._count)
                most = 1 if first else min(size.value, fair, self._loop.every.most)
                share = self._shares.take(most, self._loop.clock)
                if share is None:
                    return
                took = self._run(share, first=first)
                if not first:
                    size.measured(took / _LANES / share.steps)
                first = False
                self.woken.set()
        except BaseException as e:  # noqa: BLE001 - handed to the main thread, which raises it
            self.errors.append(e)
            self.ended.set()
        finally:
            self.woken.set()

    def _run(self, share: _Share, *, first: bool) -> float:
        """Have a share's steps made, and count them; the seconds that it took."""
        import tensorflow as tf

        loop = self._loop
        args = (self._iterator, tf.constant(share.steps, tf.int32), tf.zeros([0], tf.float32))
        remote = self._coordinator.schedule(loop.run, args=args)
        try:
            loss, waited, heard = remote.fetch()
        except tf.errors.OpError:
            if not _is_made(remote):
                raise
            took = loop.clock() - share.began
            if self._shares.finish(share, None if first else took):
                loop.progress.advance(share.steps, None)
            return took
        took = loop.clock() - share.began
        if loop.stragglers is not None:
            worker, seconds = heard
            loop.stragglers.gave(int(worker), float(seconds) / share.steps)
            loop.progress.workers.gave(loop.stragglers.names[int(worker)], share.steps)
        if not math.isfinite(float(loss)):
            raise not_finite("loss", self._shares.done + share.steps)
        if self._shares.finish(share, None if first else took):
            loop.progress.advance(share.steps, float(loss), float(waited), took / _LANES)
        else:
            log.info("%s steps that others have made meanwhile came in late: not counted", share.steps)
        return took


def train_on_servers(loop: Loop, set_up: SetUp, iterator: Any, step: int) -> int:
    """Train from `step` to the target on parameter servers, asynchronously; the number of finished steps.

    A worker that hangs blocks its own lanes only. A closure whose worker dies is run again by another one (the
    coordinator does that), counted once. Raises what the first lane raises: a lost parameter server as
    tf.errors.UnavailableError, an error of the user's code as itself.
    """
    shares = _Shares(step, loop.target, loop.every.next(step))
    lanes = _Lanes(loop, set_up, iterator, shares)
    lanes.start()
    begun = False
    try:
        while not lanes.errors and shares.done < loop.target:
            lanes.woken.wait(0.05)
            lanes.woken.clear()
            if shares.done > step and not begun:
                begun = True
                loop.started()
            _watch_workers(loop, lanes, shares)
            if not lanes.errors:
                done = shares.done
                loop.after(done, leave=loop.stop.is_set())
                shares.allow(loop.every.next(done))
    finally:
        lanes.ended.set()
        shares.end()
    if lanes.errors:
        raise lanes.errors[0]
    loop.save_last(shares.done)
    return shares.done


def _watch_workers(loop: Loop, lanes: _Lanes, shares: _Shares) -> None:
    """Name those that straggle; have what is overdue made by others when nothing else is left to do."""
    if loop.stragglers is not None:
        if shares.all_given:
            loop.stragglers.excuse_all()  # there may be nothing to do for them
        loop.stragglers.look()
    overdue = shares.revoke(loop.clock())
    if overdue:
        log.warning("steps that a worker has had for too long are handed out again")
        lanes.start(overdue)
