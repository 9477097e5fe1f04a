"""Asynchronous training on parameter servers: a coordinator hands K steps at a time to whichever worker is free."""

from __future__ import annotations

import math
import threading
from typing import Any

from trainers.runtime.checkpoints import not_finite
from trainers.runtime.loop import Loop
from trainers.runtime.steps import StepSize
from trainers.runtime.strategies import SetUp

__all__ = ["train_on_servers"]

_LANES = 2  # closures in flight a worker: one runs while the next one is on its way


class _Shares:
    """The steps that are left, handed out to lanes; exactly the target, no closure counted twice."""

    def __init__(self, step: int, target: int) -> None:
        self._lock = threading.Lock()
        self._given = step
        self._target = target
        self.done = step

    def take(self, most: int) -> int:
        """Steps for the next closure, 0 when all are handed out."""
        with self._lock:
            k = max(0, min(most, self._target - self._given))
            self._given += k
            return k

    def finish(self, k: int) -> int:
        """Count a closure's steps; all finished steps."""
        with self._lock:
            self.done += k
            return self.done


def train_on_servers(loop: Loop, set_up: SetUp, iterator: Any, step: int) -> int:
    """Train from `step` to the target on parameter servers, asynchronously; the number of finished steps.

    Each worker has lanes, threads that schedule one closure of K steps at a time and wait for it: a worker that
    hangs blocks its own lanes only. A closure whose worker dies is run again by another one (the coordinator
    does that), counted once. Raises what the first lane raises: a lost parameter server as
    tf.errors.UnavailableError, an error of the user's code as itself.
    """
    import tensorflow as tf

    shares = _Shares(step, loop.target)
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
                k = shares.take(1 if first else min(size.value, fair, loop.every.most))
                if k == 0:
                    return
                began = loop.clock()
                args = (iterator, tf.constant(k, tf.int32), nothing)
                loss, waited, _ = set_up.coordinator.schedule(loop.run, args=args).fetch()
                took = loop.clock() - began
                if not math.isfinite(float(loss)):
                    raise not_finite("loss", shares.done + k)
                shares.finish(k)
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

    threads = [threading.Thread(target=lane, name=f"lane-{i}", daemon=True) for i in range(lanes)]
    for thread in threads:
        thread.start()
    begun = False
    try:
        while not errors and (shares.done < loop.target or any(thread.is_alive() for thread in threads)):
            woken.wait(0.05)
            woken.clear()
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
