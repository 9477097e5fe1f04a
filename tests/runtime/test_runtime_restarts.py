"""Which failures count, how long a replica waits before it starts again, and the deadline of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.launching import Run, message
from trainers.job.failures import Failure, FailureClass
from trainers.job.record import Attempt, Heartbeat, JobRecord, JobState
from trainers.job.spec import RoleKind
from trainers.runtime.blame import blame
from trainers.runtime.ends import MemoryKills
from trainers.runtime.message_files import MessageFiles
from trainers.runtime.restarts import back_off_of, counted, saved_step


@pytest.fixture(autouse=True)
def _message(termination_log: Path) -> None:
    """Every launcher here writes its termination message to the test's file."""


def attempt(number: int, cls: str | None, step: int | None, lived: float = 60.0) -> Attempt:
    return Attempt("chief", 0, number, 1, 1, 1000.0, 1000.0 + lived, failure_class=cls, last_step=step)


def test_a_failure_counts_until_a_later_step_is_saved() -> None:
    attempts = [attempt(1, "INFRA", 90), attempt(2, "PEER_LOST", 120), attempt(3, None, 130)]
    assert counted(attempts, 0) == 2
    assert counted(attempts, 90, FailureClass.INFRA) == 1  # nothing that was not there then
    assert counted(attempts, 100, FailureClass.INFRA) == 0
    assert counted(attempts, 100) == 1
    assert counted([attempt(1, "OOM", 1)], 100, FailureClass.OOM) == 1
    assert counted([attempt(1, "INFRA", None)], 0) == 1
    assert counted([attempt(1, "INFRA", None)], 1) == 0


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 100)), max_size=12), st.integers(0, 60))
def test_waits_grow_and_end(lives: list[tuple[int, float]], saved: int) -> None:
    attempts = [attempt(n, "INFRA", step, lived) for n, (step, lived) in enumerate(lives)]
    pause = back_off_of(attempts, saved, first=0.2, most=10.0)
    assert 0.2 <= pause <= 10.0
    # One more that fails at once never makes the wait shorter.
    assert back_off_of([*attempts, attempt(99, "INFRA", 50, 0.1)], saved, first=0.2, most=10.0) >= pause


def test_a_trainer_that_dies_at_once_again_and_again_waits_though_others_make_progress() -> None:
    quick = [attempt(n, "INFRA", 1, lived=2.0) for n in range(8)]
    assert counted(quick, 100) == 0
    assert back_off_of(quick, 100, first=0.2, most=10.0) == 10.0
    assert back_off_of([*quick, attempt(9, "INFRA", 1)], 100, first=0.2, most=10.0) == 0.2


def test_the_step_of_the_newest_checkpoint(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    assert saved_step(record) == 0
    (tmp_path / "checkpoints").mkdir()
    state = tmp_path / "checkpoints" / "checkpoint"
    state.write_text('model_checkpoint_path: "step-40"\nall_model_checkpoint_paths: "step-20"\n')
    assert saved_step(record) == 40
    state.write_bytes(b"\xff\xfe")
    assert saved_step(record) == 0


SAVES = """
folder = record.folder / "checkpoints"
folder.mkdir(exist_ok=True)
def save(step):
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "step-{step}"\\n')
"""


def test_a_long_job_outlives_many_failures(jobs: Any, tmp_path: Path) -> None:
    """Seven kills with a cap of one, each after another checkpoint; then one step that never works."""
    script = f"{SAVES}beat(10 * attempt)\nsave(10 * attempt - 5)\n" + (
        "if attempt <= 7: os.kill(os.getpid(), signal.SIGKILL)\ndone()"
    )
    assert Run(jobs.plan("progress", caps={"INFRA": 1}), script, log=tmp_path / "log")() == 0

    script = f"{SAVES}beat(100)\nsave(95)\nos.kill(os.getpid(), signal.SIGKILL)"
    run = Run(jobs.plan("stuck", caps={"INFRA": 1}), script, log=tmp_path / "log2")
    assert run() == 87
    assert len(run.record.attempts()) == 2
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason == "the trainer process was ended by SIGKILL (failure 2 of its class)"


def test_a_job_that_takes_too_long_saves_and_ends(jobs: Any, tmp_path: Path, termination_log: Path) -> None:
    script = """
    def leave(*_):
        beat(6, "saving")
        fail("PREEMPTED", "was asked to leave at step 6")
    signal.signal(signal.SIGTERM, leave)
    beat(5)
    time.sleep(60)
    """
    run = Run(jobs.plan(budgets={"total": 2.5}), script, log=tmp_path / "log")
    assert run() == 85
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.state is JobState.FAILED
    failure = outcome.failure
    assert (failure.code, failure.replica, failure.last_step) == ("runtime.overdue", "chief-0", 6)
    assert failure.reason == "the job is not done within its total budget of 2.5 s (step 5)"
    assert "raise budgets.total" in failure.card()
    assert message(termination_log).failure == failure
    assert len(run.record.attempts()) == 1


def test_servers_end_a_job_that_is_overdue_and_has_no_chief(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1, budgets={"total": 0.5})
    run = Run(plan, "time.sleep(60)", role="ps", log=tmp_path / "log")
    assert run() == 85
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.replica == "ps-0"


def test_out_of_memory_of_a_worker_is_charged_to_the_worker(
    jobs: Any, tmp_path: Path, termination_log: Path
) -> None:
    import tensorflow as tf

    error = tf.errors.ResourceExhaustedError(
        None,
        None,
        "OOM when allocating tensor with shape[9] and type float on "
        "/job:worker/replica:0/task:1/device:CPU:0 by allocator cpu",
    )
    failure = blame(error, role="chief", index=0)
    assert (failure.failure_class, failure.replica) == (FailureClass.OOM, "worker-1")

    plan = jobs.plan(strategy="parameter_server", workers=2, ps=1)
    record = JobRecord.open(plan.job.output)
    for role, index in (("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)):
        record.beat(Heartbeat(role, index))
    script = """
    if attempt == 1:
        beat(7)
        termination.write_failure(Failure(FailureClass.OOM, "too big", code="test", role="worker", index=0))
        sys.exit(84)
    done()
    """
    chief = Run(plan, script, log=tmp_path / "chief")
    assert chief() == 0
    first, _ = record.attempts("chief", 0)
    assert (first.failure_class, first.reason) == (None, "OOM: too big")
    generation = record.generation()
    assert (generation.number, generation.blamed) == (2, "worker-0")

    other = jobs.plan("other", strategy="parameter_server", workers=1, ps=1)
    JobRecord.open(other.job.output).beat(Heartbeat("chief", 0, step=7))
    script = (
        "record.next_generation(1, by='chief-0', reason='OOM: too big', blamed='worker-0')\ntime.sleep(60)"
    )
    run = Run(other, script, role="worker", log=tmp_path / "worker")
    assert run() == 84
    said = message(termination_log).failure
    assert said is not None
    assert (said.failure_class, said.replica, said.last_step) == (FailureClass.OOM, "worker-0", 7)


def test_the_kernel_s_memory_kills_are_counted(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).since() == 0
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    kills = MemoryKills(tmp_path)
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert kills.since() == 1


def test_what_killed_processes_left_is_removed_at_the_next_start(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan()
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0))
    half = record.folder / "heartbeats" / ".chief-0.json.123.abcd.tmp"
    half.write_text("{")
    messages = MessageFiles(record.folder, plan.gang, "chief-0")
    said = messages.new(1)
    of_another_platform = MessageFiles(tmp_path / "elsewhere", plan.gang, "chief-0").new(1)
    assert Run(plan, "done()", log=tmp_path / "log")() == 0
    assert not half.exists()
    assert not said.exists()
    assert messages.left() == []
    assert of_another_platform.exists()
    of_another_platform.unlink()


def test_a_failure_without_a_step_says_so() -> None:
    assert "last step:  none" in Failure(FailureClass.INFRA, "gone", role=RoleKind.PS.value, index=0).card()
