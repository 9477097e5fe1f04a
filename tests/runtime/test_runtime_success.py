"""The success rules: workers that are given up, how many must be left, and what ends the job when fewer are."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launching import Run, message
from trainers.job.failures import FailureClass
from trainers.job.observations import warnings
from trainers.job.plan import Plan
from trainers.job.record import Attempt, Heartbeat, JobRecord, JobState
from trainers.job.spec import RoleKind, Strategy, Success, TrainingJob, standard_roles
from trainers.runtime import success
from trainers.runtime.replica import Replica
from trainers.runtime.strategies import check_supported
from trainers.runtime.success import given_up, needed_workers, steppable_workers

SYNC = {"kind": "parameter_server", "sync": True, "backup_workers": 1}
KILLED = "os.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def _message(termination_log: Path) -> None:
    """Every launcher here writes its termination message to the test's file."""


def job_of(strategy: Any, rule: Success, workers: int, least: int | None = None) -> TrainingJob:
    kind = Strategy.from_dict(strategy)
    roles = [
        dataclasses.replace(role, min_replicas=least) if role.kind is RoleKind.WORKER else role
        for role in standard_roles(kind, workers=workers, ps=1)
    ]
    return TrainingJob("job", "trainer", roles=tuple(roles), strategy=kind, success=rule, output="/nowhere")


@pytest.mark.parametrize(
    ("strategy", "rule", "workers", "least", "needed", "steps"),
    [
        ("parameter_server", Success(), 4, None, 1, 1),
        ("parameter_server", Success(), 4, 3, 3, 3),
        (SYNC, Success(), 4, None, 3, 3),
        (SYNC, Success(), 4, 2, 3, 3),
        (SYNC, Success(), 4, 4, 4, 4),
        ("parameter_server", Success("fraction", 0.5), 3, None, 2, 1),
        ("parameter_server", Success("fraction", 0.55), 20, None, 11, 1),
        ("parameter_server", Success("fraction", 0.01), 3, None, 1, 1),
        ("parameter_server", Success("fraction", 0.5), 4, 3, 3, 3),
        (SYNC, Success("fraction", 0.5), 4, None, 3, 3),
        ("parameter_server", Success("all_workers"), 4, 2, 4, 2),
        ("local", Success("all_workers"), 0, None, 0, 0),
        ("mirrored", Success("fraction", 0.5), 0, None, 0, 0),
    ],
)
def test_how_many_workers_a_rule_needs(
    strategy: Any, rule: Success, workers: int, least: int | None, needed: int, steps: int
) -> None:
    job = job_of(strategy, rule, workers, least)
    check_supported(job)
    assert (needed_workers(job), steppable_workers(job)) == (needed, steps)


def test_all_reduce_keeps_the_rules_that_need_every_peer() -> None:
    for rule in (Success(), Success("all_workers"), Success("fraction", 1.0)):
        check_supported(job_of("multi_worker", rule, 2))


def gang_of(jobs: Any, workers: int, strategy: Any = "parameter_server", **more: Any) -> Plan:
    """A gang that has met, as far as the record knows, and may restart once."""
    plan = jobs.plan(
        strategy=strategy, workers=workers, ps=1, caps={"INFRA": 1, "STALLED": 1}, checkpoint_every=10, **more
    )
    record = JobRecord.open(plan.job.output)
    for replica in plan.replicas:
        record.beat(Heartbeat(replica.role.value, replica.index, phase="training", step=3))
    return plan


def lose(plan: Plan, index: int, tmp_path: Path, script: str = KILLED) -> Run:
    run = Run(plan, script, role="worker", index=index, log=tmp_path / f"log-{index}")
    assert run() == 87
    return run


def test_the_job_goes_on_without_a_worker_that_was_given_up(
    jobs: Any, tmp_path: Path, termination_log: Path
) -> None:
    plan = gang_of(jobs, 2)
    run = lose(plan, 1, tmp_path)
    record = run.record
    assert record.outcome() is None
    assert len(run.scripts.children) == 2
    assert record.generation().number == 1  # the others go on as they are
    assert list(given_up(record.folder)) == [1]
    failure = given_up(record.folder)[1]
    assert failure == message(termination_log).failure  # a failed task of its own
    assert failure.reason == "the trainer process was ended by SIGKILL (failure 2 of its class)"
    (warning,) = warnings(record.folder)
    assert (warning.by, warning.text) == ("worker-1", f"it was given up: INFRA: {failure.reason}")
    assert "the job goes on with 1 workers, 1 are needed" in run.log.read_text()
    # Nobody waits for it at a start.
    assert Replica(record, RoleKind.PS, 0).missing_peers() == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Success("all_workers"), "success rule all_workers needs 2 of 2 workers, 1 is left"),
        (Success("fraction", 0.6), "success rule fraction 0.6 needs 2 of 2 workers, 1 is left"),
    ],
)
def test_too_few_that_are_left_end_the_job(jobs: Any, tmp_path: Path, rule: Success, words: str) -> None:
    record = lose(gang_of(jobs, 2, success=rule), 1, tmp_path).record
    outcome = record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.state is JobState.FAILED
    failure = outcome.failure
    assert (failure.failure_class, failure.replica) == (FailureClass.INFRA, "worker-1")
    assert failure.code == "runtime.too_few_workers"
    why = "INFRA: the trainer process was ended by SIGKILL (failure 2 of its class)"
    assert failure.reason == f"{words}: worker-1 was given up ({why})"
    assert 'success rule "chief" goes on with fewer workers' in failure.hint


def test_the_last_worker_ends_the_job_with_the_class_of_its_own_failure(jobs: Any, tmp_path: Path) -> None:
    plan = gang_of(jobs, 3, success=Success("fraction", 0.5))
    assert lose(plan, 2, tmp_path).record.outcome() is None
    run = Run(plan, "fail('STALLED', 'no step')", role="worker", log=tmp_path / "log")
    assert run() == 85
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.STALLED
    assert (
        "needs 2 of 3 workers, 1 is left: worker-0 was given up (STALLED: no step" in outcome.failure.reason
    )
    assert "; worker-2 was given up (INFRA: " in outcome.failure.reason


def test_synchronous_steps_need_as_many_as_they_take(jobs: Any, tmp_path: Path) -> None:
    plan = gang_of(jobs, 3, SYNC)
    record = lose(plan, 1, tmp_path).record
    assert record.outcome() is None
    assert record.generation().number == 1  # it was the spare one
    lose(plan, 0, tmp_path)
    outcome = record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert "success rule chief needs 2 of 3 workers, 1 is left" in outcome.failure.reason


def test_steps_that_wait_for_a_restarted_worker_take_it_in_again(jobs: Any, tmp_path: Path) -> None:
    """One that has come again takes part in the next generation only; with another given up, it is needed."""
    plan = gang_of(jobs, 3, SYNC)
    record = JobRecord.open(plan.job.output)
    record.write_attempt(Attempt("worker", 2, 1, 1, 1, started=1.0, ended=2.0, failure_class="INFRA"))
    lose(plan, 0, tmp_path)
    assert record.outcome() is None
    assert (record.generation().number, record.generation().by) == (2, "worker-0")
    # And in that one nobody is spare any more: the next that dies is waited for, so all begin again.
    script = f"if attempt == 1: {KILLED}\ndone()"
    assert Run(plan, script, role="worker", index=1, log=tmp_path / "log")() == 0
    assert (record.generation().number, record.generation().by) == (3, "worker-1")


def test_a_worker_that_comes_again_is_not_given_up_any_more(jobs: Any, tmp_path: Path) -> None:
    plan = gang_of(jobs, 2)
    record = lose(plan, 1, tmp_path).record
    script = """
    from trainers.runtime.success import given_up
    assert not given_up(record.folder)
    done()
    """
    assert Run(plan, script, role="worker", index=1, log=tmp_path / "log")() == 0
    assert dict(given_up(record.folder)) == {}


def test_two_that_are_given_up_at_once_do_not_count_on_each_other(
    jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts only when both have written their markers, and so both see that nobody is left."""
    plan = gang_of(jobs, 2)
    both = threading.Barrier(2, timeout=60.0)
    count = success.given_up

    def counted(folder: Path) -> Any:
        both.wait()
        return count(folder)

    monkeypatch.setattr(success, "given_up", counted)
    runs = [Run(plan, KILLED, role="worker", index=i, log=tmp_path / f"log-{i}") for i in range(2)]
    codes: list[int] = []
    threads = [threading.Thread(target=lambda run=run: codes.append(run())) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [87, 87]
    outcome = runs[0].record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert "needs 1 of 2 workers, 0 are left" in outcome.failure.reason
    for run in runs:  # one card
        assert outcome.failure.reason in run.log.read_text()


def test_the_mistakes_of_users_end_the_job_at_once(jobs: Any, tmp_path: Path) -> None:
    plan = gang_of(jobs, 2)
    run = Run(plan, "fail('USER', 'boom')", role="worker", log=tmp_path / "log")
    assert run() == 81
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason == "boom"
    assert dict(given_up(run.record.folder)) == {}


def test_out_of_memory_is_given_up_after_its_retry_with_more(jobs: Any, tmp_path: Path) -> None:
    plan = gang_of(jobs, 2)
    script = "fail('OOM', 'too big')"
    first = Run(plan, script, role="worker", log=tmp_path / "log")
    assert first() == 84
    assert dict(given_up(first.record.folder)) == {}  # a pod with more memory comes
    assert Run(plan, script, role="worker", log=tmp_path / "log")() == 84
    assert first.record.outcome() is None
    assert list(given_up(first.record.folder)) == [0]


def test_a_job_that_is_opened_again_has_given_nobody_up(jobs: Any, tmp_path: Path) -> None:
    plan = gang_of(jobs, 2, success=Success("all_workers"))
    folder = lose(plan, 1, tmp_path).record.folder
    assert list(given_up(folder)) == [1]
    JobRecord.create(plan)
    assert dict(given_up(folder)) == {}
    assert list(given_up(folder / "history" / "0001")) == [1]
