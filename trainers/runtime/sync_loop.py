"""The loop of synchronous training on parameter servers: turns, a few in each call, until the target.

What a turn is, and what runs where, see `sync_servers`.
"""

from __future__ import annotations

import concurrent.futures
import math

from trainers.runtime.checkpoints import not_finite
from trainers.runtime.loop import LeftEarly, Loop
from trainers.runtime.steps import StepSize
from trainers.runtime.stragglers import Stragglers
from trainers.runtime.sync_servers import Board, SyncServers, Turns
from trainers.runtime.worker_steps import WorkerSteps

__all__ = ["train_in_turns"]

_PATIENCE = 2.0  # seconds that a call may take before it is looked at whether it waits for somebody


def train_in_turns(loop: Loop, servers: SyncServers, step: int) -> int:
    """Train from `step` to the target synchronously; the number of finished steps.

    A turn waits for its gradients as long as the launcher's stall watch does. Raises NotFinite for a loss that is
    NaN or infinite, what a worker's closure raised, and LeftEarly after the checkpoint when asked to leave.
    """
    size = StepSize(most=500)
    first = True
    begin = step
    gradients_used = 0
    failed: BaseException | None = None
    servers.start()
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="turns") as pool:
        try:
            while step < loop.target:
                if failed is not None:
                    raise failed
                k = min(1 if first else size.value, loop.target - step, loop.room(step))
                began = loop.clock()
                call = pool.submit(servers.run, k)
                failed = _wait(call, loop, servers, begin)
                turns = call.result()
                took = loop.clock() - began
                if not math.isfinite(turns.loss):
                    raise not_finite("loss", step + turns.done)
                step += turns.done
                if first:
                    loop.started()  # the first call also traced: its time says nothing
                else:
                    size.measured(took / turns.done)
                first = False
                gradients_used += sum(turns.used)
                loop.progress.gradients_used = gradients_used
                board = servers.board()
                loop.progress.gradients_dropped = max(0, sum(board.pushed) - gradients_used)
                if loop.stragglers is not None:
                    _watch_workers(board, loop.stragglers, loop.progress.workers)
                loop.progress.advance(turns.done, turns.loss, turns.waited, took)
                loop.after(step, leave=loop.stop.is_set())
        finally:
            pool.shutdown(wait=False)
    loop.save_last(step)
    return step


def _wait(
    call: concurrent.futures.Future[Turns], loop: Loop, servers: SyncServers, begin: int
) -> BaseException | None:
    """Wait for a call, saving and leaving meanwhile where asked; what a worker raised where that did not stop it."""
    began = loop.clock()
    failed: BaseException | None = None
    while not concurrent.futures.wait([call], timeout=0.1).done:
        if loop.stragglers is not None and loop.clock() - began > _PATIENCE:
            _watch_workers(servers.board(), loop.stragglers, loop.progress.workers)
        try:
            servers.raise_errors()
        except Exception as e:
            # The data may have ended with this very turn.
            if not concurrent.futures.wait([call], timeout=1.0).done:
                raise
            failed = e
        if loop.stop.is_set() or loop.save_now.is_set():
            servers.pause()
            if loop.clock() - began > _PATIENCE:
                _save_while_waiting(loop, servers, begin)
    return failed


def _watch_workers(board: Board, stragglers: Stragglers, known: WorkerSteps) -> None:
    for worker, (last, pushed, seconds) in enumerate(
        zip(board.last, board.pushed, board.seconds, strict=True)
    ):
        stragglers.counted(worker, pushed, seconds)
        known.has_given(stragglers.names[worker], pushed)
        if last >= board.turn:
            stragglers.excuse(worker)  # it has given its gradient, and waits for others
    stragglers.look()


def _save_while_waiting(loop: Loop, servers: SyncServers, begin: int) -> None:
    """Save, and leave if asked to, in the middle of a call that waits for gradients; later if it does not."""
    turn = servers.at_rest()
    if turn is None:
        return
    loop.save(begin + turn)
    if servers.at_rest() != turn:
        return  # a gradient came while it was written: once more
    loop.save_now.clear()
    if loop.stop.is_set():
        raise LeftEarly(f"was asked to leave at step {begin + turn}")
