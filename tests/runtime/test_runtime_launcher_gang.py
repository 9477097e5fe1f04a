"""The launcher as one of a gang: peers that do not come, new generations, lost peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launching import Run, message
from trainers.job.record import Heartbeat, JobRecord, JobState


@pytest.fixture(autouse=True)
def _message(termination_log: Path) -> None:
    """Every launcher here writes its termination message to the test's file."""


def test_a_stalled_chief_of_a_gang_begins_a_new_generation(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1, budgets={"stall": 0.3, "start": 5.0})
    record = JobRecord.open(plan.job.output)
    for role in ("worker", "ps"):
        record.beat(Heartbeat(role, 0))
    script = "beat(4)\nif attempt == 1: time.sleep(60)\ndone()"
    run = Run(plan, script, log=tmp_path / "log")
    assert run() == 0
    generation = record.generation()
    assert (generation.number, generation.by) == (2, "chief-0")
    assert generation.reason.startswith("STALLED: no step for")


def test_a_new_generation_starts_the_trainer_again_without_charge(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("worker", 0))
    record.beat(Heartbeat("chief", 0))
    script = """
    if os.environ["TRAINYARD_GENERATION"] == "1":
        record.next_generation(1, by="worker-0", reason="STALLED: test")
        time.sleep(60)
    done()
    time.sleep(60)
    """
    run = Run(plan, script, role="ps", log=tmp_path / "log")
    assert run() == 0
    first, second = record.attempts("ps", 0)
    assert (first.generation, second.generation) == (1, 2)
    assert first.failure_class is None


def test_a_gang_that_stays_partial_is_left(jobs: Any, tmp_path: Path, termination_log: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=2, ps=1, budgets={"start": 0.3})
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("worker", 1))
    run = Run(plan, "time.sleep(60)", log=tmp_path / "log")
    assert run() == 86
    failure = message(termination_log).failure
    assert failure is not None
    assert failure.reason == "worker-0, ps-0 did not come within 0.3 s"
    assert record.outcome() is None


def test_a_server_whose_chief_is_gone_for_good_leaves(
    jobs: Any, tmp_path: Path, termination_log: Path
) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1, budgets={"start": 1.0})
    record = JobRecord.open(plan.job.output)
    for role in ("worker", "chief"):
        record.beat(Heartbeat(role, 0, phase="training"))
    run = Run(plan, "time.sleep(60)", role="ps", log=tmp_path / "log")
    assert run() == 86
    failure = message(termination_log).failure
    assert failure is not None
    assert failure.reason == "chief-0 has given no sign of life for 1 s"


def test_a_chief_that_comes_back_does_not_wait_for_a_lost_worker(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1, budgets={"start": 0.1})
    record = JobRecord.open(plan.job.output)
    record.set_state(JobState.STARTING)
    record.set_state(JobState.RUNNING)
    run = Run(plan, "time.sleep(0.5); done()", log=tmp_path / "log")
    assert run() == 0


def test_a_dead_peer_begins_a_new_generation_for_all(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="multi_worker", workers=1)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0))
    script = "attempt == 1 and os.kill(os.getpid(), 9)\ndone()"
    run = Run(plan, script, role="worker", log=tmp_path / "log")
    assert run() == 0
    generation = record.generation()
    assert (generation.number, generation.by) == (2, "worker-0")
    assert [a.generation for a in record.attempts("worker", 0)] == [1, 2]


def test_who_lost_a_peer_is_not_charged_when_the_peer_says_so(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="multi_worker", workers=1, caps={"PEER_LOST": 0})
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("worker", 0))
    script = """
    if attempt == 1:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.3)
            record.next_generation(1, by="worker-0", reason="INFRA: killed")
            os._exit(0)
        fail("PEER_LOST", "connection reset")
    done()
    """
    run = Run(plan, script, log=tmp_path / "log")
    assert run() == 0
    first, second = record.attempts("chief", 0)
    assert (first.failure_class, first.reason) == (None, "a peer was lost: connection reset")
    assert second.generation == 2


def test_a_lost_peer_that_says_nothing_is_charged(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="multi_worker", workers=1, caps={"PEER_LOST": 0})
    JobRecord.open(plan.job.output).beat(Heartbeat("worker", 0))
    run = Run(plan, "fail('PEER_LOST', 'connection reset')", log=tmp_path / "log")
    assert run() == 86
