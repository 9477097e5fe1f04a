"""The loop on parameter servers, with a coordinator of threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from trainers.job.record import Heartbeat, JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.async_servers import train_on_servers
from trainers.runtime.checkpoints import NotFinite
from trainers.runtime.heartbeat import Progress
from trainers.runtime.loop import CheckpointEvery, LeftEarly, Loop
from trainers.runtime.strategies import SetUp


class Remote:
    """A RemoteValue whose closure runs when it is scheduled."""

    _status = RemoteValueStatus.READY

    def __init__(self, fn: Any, args: Any) -> None:
        self._error: BaseException | None = None
        try:
            self._value = fn(*args)
        except Exception as e:  # noqa: BLE001 - the closure's own, raised by fetch
            self._error = e

    def _get_error(self) -> BaseException | None:
        return self._error

    def fetch(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class Coordinator:
    """ClusterCoordinator as far as the loop uses it."""

    def schedule(self, fn: Any, args: Any) -> Any:
        return Remote(fn, args)


def server_loop(run: Any, target: int, **options: Any) -> Loop:
    return Loop(
        run=run,
        target=target,
        progress=Progress(target, 1),
        every=CheckpointEvery(options.pop("every", None)),
        checkpoints=options.pop("checkpoints", None),
        stop=threading.Event(),
        save_now=threading.Event(),
        started=lambda: None,
    )


class Saved:
    """Checkpoints that remember their steps."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.steps: list[int] = []

    def save(self, step: int) -> None:
        self.last = step
        self.steps.append(step)


def test_lanes_make_exactly_the_asked_steps() -> None:
    made: list[int] = []
    lock = threading.Lock()

    def run(_iterator: Any, k: Any, _told: Any) -> tuple[float, float, None]:
        with lock:
            made.append(int(k))
        time.sleep(0.002)
        return 0.5, 0.0, None

    saved: Any = Saved()
    loop = server_loop(run, 1003, every=250, checkpoints=saved)
    assert train_on_servers(loop, SetUp(None, workers=3, coordinator=Coordinator()), None, 3) == 1003
    assert sum(made) == 1000
    assert max(made) > 1
    assert saved.steps[-1] == 1003
    assert len(saved.steps) >= 3
    assert loop.progress.trained_steps == 1000


@pytest.mark.parametrize(
    ("loss", "error", "raised"),
    [(float("nan"), None, NotFinite), (0.0, ConnectionError("lost"), ConnectionError)],
)
def test_what_one_lane_raises_ends_the_loop(loss: float, error: Exception | None, raised: type) -> None:
    def run(_iterator: Any, _k: Any, _told: Any) -> tuple[float, float, None]:
        if error:
            raise error
        return loss, 0.0, None

    loop = server_loop(run, 100)
    with pytest.raises(raised):
        train_on_servers(loop, SetUp(None, workers=1, coordinator=Coordinator()), None, 0)


def test_a_loop_on_servers_saves_when_told_and_leaves_when_asked() -> None:
    saved: Any = Saved()

    def run(_iterator: Any, _k: Any, _told: Any) -> tuple[float, float, None]:
        time.sleep(0.01)
        if loop.progress.step >= 3 and not saved.steps:
            loop.save_now.set()
        if loop.progress.step >= 20:
            loop.stop.set()
        return 0.5, 0.0, None

    loop = server_loop(run, 10_000, checkpoints=saved)
    with pytest.raises(LeftEarly):
        train_on_servers(loop, SetUp(None, workers=1, coordinator=Coordinator()), None, 0)
    first, *_, last = saved.steps
    assert 3 <= first < 20 <= last


def test_a_parameter_server_that_is_asked_to_leave_gets_a_checkpoint(jobs: Any) -> None:
    from trainers.runtime.run import _Run

    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("ps", 0, phase="leaving"))
    run = _Run(record, plan, plan.replica(RoleKind.CHIEF, 0))
    run._watch_for_leaving_servers()
    assert run.save_now.wait(10)
    run.stop.set()


def test_steps_whose_worker_dies_before_it_tells_of_them_are_made_and_counted() -> None:
    import tensorflow as tf

    made: list[int] = []

    class Forgetful(Remote):
        def fetch(self) -> Any:
            if len(made) == 2:
                raise tf.errors.UnavailableError(None, None, "Socket closed")
            return super().fetch()

    class Losing(Coordinator):
        def schedule(self, fn: Any, args: Any) -> Any:
            return Forgetful(fn, args)

    def run(_iterator: Any, k: Any, _told: Any) -> tuple[float, float, None]:
        made.append(int(k))
        return 0.5, 0.0, None

    loop = server_loop(run, 40)
    assert train_on_servers(loop, SetUp(None, workers=1, coordinator=Losing()), None, 0) == 40
    assert sum(made) == 40
    assert loop.progress.loss == 0.5
