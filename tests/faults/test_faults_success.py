"""A real gang that loses a worker for good, and arrives without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.conftest import LIMIT
from trainers.job.observations import warnings
from trainers.job.record import JobState
from trainers.runtime.success import given_up

pytestmark = pytest.mark.slow


def test_the_job_arrives_without_a_worker_that_was_given_up(gang: Callable) -> None:
    """Worker 1 is killed each time it comes, then the chief once: its next life knows that nobody comes."""
    run = gang(workers=2, ps=1, steps=2400, checkpoint_every=800, caps={"INFRA": 1})
    run.start()
    run.until_step(100)
    killed: set[int] = set()

    def lost() -> bool:
        attempt = run.record.attempts("worker", 1)[-1]
        if attempt.ended is None and attempt.pid not in killed:
            run.kill_trainer("worker", 1)
            killed.add(attempt.pid)
        return 1 in given_up(run.record.folder)

    run.until(lost)
    run.until(lambda: "worker-1" in run.exit_codes)
    at = run.record.heartbeat("chief", 0).step
    run.until_step(at + 100)  # it goes on
    run.kill_trainer("chief")
    result = run.wait(LIMIT)

    assert result.outcome is not None, run.log("chief-0")
    assert (result.outcome.state, result.outcome.step) == (JobState.SUCCEEDED, 2400), result.outcome
    # A failed task of its own, and no other.
    assert result.exit_codes == {"ps-0": 0, "worker-0": 0, "worker-1": 87, "chief-0": 0}
    # Should a worker die while the chief fetches what it has done, TensorFlow has the chief begin anew, too.
    *struck, last = [a.failure_class for a in run.record.attempts("chief", 0)]
    assert (set(struck) - {"PEER_LOST"}, last) == ({"INFRA"}, None)
    assert len(run.record.attempts("worker", 0)) == 1
    attempts = run.record.attempts("worker", 1)
    assert {(a.signal, a.failure_class) for a in attempts} == {(9, "INFRA")}
    assert len(attempts) == len(killed) >= 2
    (marker,) = given_up(run.record.folder).values()
    assert "ended by SIGKILL (failure 2 of its class)" in marker.reason
    (warning,) = (w for w in warnings(run.record.folder) if "given up" in w.text)
    assert warning.by == "worker-1"
    assert run.leftovers() == []
