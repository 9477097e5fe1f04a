"""All-reduce peers, of which one after the other is killed, or asked to leave."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.conftest import LIMIT, assert_arrived

pytestmark = pytest.mark.slow


def test_the_chief_a_launcher_and_a_peer_that_is_asked_to_leave(gang: Callable) -> None:
    """All begin again from the last checkpoint, each time; who is only a witness is not charged."""
    run = gang("multi_worker", workers=1, steps=1500, checkpoint_every=100, retries=2)
    run.start()
    run.until_step(110)

    run.recover(lambda: run.kill_trainer("chief"))
    first = run.record.attempts("chief", 0)[0]
    assert (first.signal, first.failure_class) == (9, "INFRA")
    assert run.record.attempts("worker", 0)[0].failure_class is None

    run.recover(lambda: run.signal("worker-0", signal.SIGKILL))
    assert len(run.record.attempts("worker", 0)) >= 3

    # All save and leave at the same step; the one that was asked goes with its pod, free of charge.
    run.recover(lambda: run.signal("worker-0", signal.SIGTERM))
    asked = [a for a in run.record.attempts("worker", 0) if a.failure_class == "PREEMPTED"]
    assert len(asked) == 1
    assert f"from step {asked[0].reason.rpartition(' ')[2]} to" in run.log("chief-0")

    assert_arrived(run, run.wait(LIMIT), 1500, every=100)
    charged = [a.failure_class for a in run.record.attempts("worker", 0) if a.failure_class]
    assert charged == ["PREEMPTED"]
