"""Which jobs run, who drives them, and how their servers are waited for."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tests.runtime.clock import Clock
from trainers.job.errors import PeerLostError
from trainers.job.spec import RoleKind, Strategy, Success, TrainingJob, standard_roles
from trainers.runtime.strategies import UnsupportedJob, check_supported, drives_steps, wait_for_servers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"strategy": Strategy.from_dict("multi_worker"), "success": Success("fraction", 0.5)},
            "success rule fraction 0.5 can't be kept under multi_worker: every all-reduce step needs every peer",
        ),
    ],
)
def test_what_can_not_be_kept_is_refused(change: dict[str, Any], message: str) -> None:
    strategy = change.get("strategy", Strategy.from_dict("parameter_server"))
    roles = standard_roles(strategy, workers=1, ps=1)
    success = change.get("success", Success())
    job = TrainingJob("job", "trainer", roles=roles, strategy=strategy, success=success, output="/nowhere")
    with pytest.raises(UnsupportedJob, match=message):
        check_supported(job)


def test_who_drives_steps() -> None:
    for kind, worker in (("parameter_server", False), ("multi_worker", True)):
        strategy = Strategy.from_dict(kind)
        roles = standard_roles(strategy, workers=1, ps=1)
        job = TrainingJob("job", "trainer", roles=roles, strategy=strategy, output="/nowhere")
        check_supported(job)
        assert drives_steps(job, RoleKind.CHIEF)
        assert drives_steps(job, RoleKind.WORKER) is worker
        assert not drives_steps(job, RoleKind.EVALUATOR)


class Waiting(threading.Event):
    """An event whose waits move a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0.0
        return self.is_set()


@pytest.mark.parametrize(
    ("up", "needed", "expected", "seconds"),
    [
        ({"p0": 0, "w0": 0, "w1": 0}, 2, ["w0", "w1"], 0.0),
        ({"p0": 3, "w0": 0, "w1": 5}, 2, ["w0", "w1"], 5.0),
        ({"p0": 0, "w0": 0, "w1": 99}, 1, ["w0"], 10.0),  # the grace time for those beyond the needed
        ({"p0": 0, "w0": 0, "w1": 12}, 2, ["w0", "w1"], 12.0),
    ],
)
def test_servers_are_waited_for(
    up: dict[str, float], needed: int, expected: list[str], seconds: float
) -> None:
    clock = Clock()
    found = wait_for_servers(
        ["p0"],
        ["w0", "w1"],
        needed_workers=needed,
        budget=60.0,
        grace=10.0,
        stop=Waiting(clock),
        clock=clock,
        answers=lambda address: clock.now >= up[address],
    )
    assert found == expected
    assert clock.now == pytest.approx(seconds, abs=0.2)


def test_nobody_waits_for_a_worker_that_is_given_up() -> None:
    clock = Clock()
    options: dict[str, Any] = {"needed_workers": 2, "budget": 60.0, "grace": 20.0, "clock": clock}
    found = wait_for_servers(
        ["p0"],
        ["w0", "w1"],
        stop=Waiting(clock),
        answers=lambda address: address != "w0",
        gone=lambda: ["w0"] if clock.now >= 3 else [],
        **options,
    )
    assert found == ["w1"]
    assert clock.now == pytest.approx(3.0, abs=0.2)


def test_servers_that_do_not_answer_are_named() -> None:
    clock = Clock()
    options: dict[str, Any] = {"needed_workers": 1, "budget": 5.0, "grace": 1.0, "clock": clock}
    with pytest.raises(PeerLostError, match=r"no answer from p0, w0 within 5 s"):
        wait_for_servers(["p0"], ["w0"], stop=Waiting(clock), answers=lambda _: False, **options)
    stop = Waiting(clock)
    stop.set()
    clock.now = 0.0
    with pytest.raises(PeerLostError, match="asked to leave"):
        wait_for_servers(["p0"], ["w0"], stop=stop, answers=lambda _: False, **options)


def test_a_port_answers_when_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options: dict[str, Any] = {
            "needed_workers": 0,
            "budget": 0.0,
            "grace": 0.0,
            "stop": threading.Event(),
        }
        assert wait_for_servers([address], [], **options) == []
    with pytest.raises(PeerLostError):
        wait_for_servers([address], [], **options)
