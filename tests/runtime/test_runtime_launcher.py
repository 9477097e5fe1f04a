"""The launcher against real processes: small scripts in the place of the trainer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launching import Run, message
from trainers.job import labels
from trainers.job.failures import Failure, FailureClass, exit_code_of
from trainers.job.record import Heartbeat, JobRecord, JobState
from trainers.job.spec import RoleKind, Success
from trainers.runtime import launcher as launcher_module
from trainers.runtime.replica import Times


@pytest.fixture(autouse=True)
def _message(termination_log: Path) -> None:
    """Every launcher here writes its termination message to the test's file."""


@pytest.mark.parametrize(
    ("state", "failure", "code"),
    [
        (JobState.SUCCEEDED, None, 0),
        (JobState.FAILED, Failure(FailureClass.DATA, "no data", role="chief", index=0), 82),
        (JobState.CANCELLED, None, 83),
    ],
)
def test_a_replica_of_a_finished_job_leaves_at_once(
    jobs: Any, tmp_path: Path, termination_log: Path, state: JobState, failure: Failure | None, code: int
) -> None:
    plan = jobs.plan()
    JobRecord.open(plan.job.output).finish(state, step=7, failure=failure)
    run = Run(plan, "raise SystemExit('never started')", log=tmp_path / "log")
    assert run() == code
    assert not run.scripts.children
    said = message(termination_log)
    assert said.ok == (code == 0)
    if failure:
        assert said.failure is not None
        assert said.failure.reason == "no data"


def test_a_trainer_that_finishes_the_job(jobs: Any, tmp_path: Path, termination_log: Path) -> None:
    run = Run(jobs.plan(), "print('hello'); beat(10); done()", log=tmp_path / "log")
    assert run() == 0
    assert message(termination_log).result == {"state": "SUCCEEDED", "step": 10, "replica": "chief-0"}
    assert "hello\n" in run.log.read_text()
    (attempt,) = run.record.attempts()
    assert (attempt.exit_code, attempt.failure_class, attempt.last_step) == (0, None, 10)


def test_the_environment_of_a_trainer(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1)
    for role in ("worker", "ps"):
        JobRecord.open(plan.job.output).beat(Heartbeat(role, 0))
    script = "import json; print('ENV', json.dumps(dict(os.environ))); done()"
    run = Run(plan, script, log=tmp_path / "log")
    assert run() == 0
    line = next(line for line in run.log.read_text().splitlines() if line.startswith("ENV "))
    env = json.loads(line[4:])
    assert json.loads(env["TF_CONFIG"])["task"] == {"type": "chief", "index": 0}
    assert env["CUDA_VISIBLE_DEVICES"] == "-1"
    assert env["TRAINYARD_LAUNCHER_PID"] == str(os.getpid())
    assert env[labels.ENV_TERMINATION_LOG] != os.environ[labels.ENV_TERMINATION_LOG]


def test_an_error_of_the_user_ends_the_job_with_its_traceback(
    jobs: Any, tmp_path: Path, termination_log: Path
) -> None:
    script = "beat(3); print('last words'); fail('USER', 'ValueError: boom', 'Traceback\\n  user.py')"
    run = Run(jobs.plan(), script, log=tmp_path / "log")
    assert run() == 81
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.state is JobState.FAILED
    assert outcome.failure.detail == "Traceback\n  user.py"
    assert outcome.failure.last_step == 3
    assert "last words" in outcome.failure.log_tail
    assert message(termination_log).failure == outcome.failure
    assert len(run.record.attempts()) == 1
    assert "FAILED USER (test): job" in run.log.read_text()


def test_a_killed_trainer_is_started_again(jobs: Any, tmp_path: Path) -> None:
    run = Run(
        jobs.plan(),
        "beat(attempt)\nif attempt < 3: os.kill(os.getpid(), signal.SIGKILL)\ndone()",
        log=tmp_path / "log",
    )
    assert run() == 0
    first, second, third = run.record.attempts()
    assert (first.signal, first.failure_class) == (9, "INFRA")
    assert (second.signal, third.exit_code) == (9, 0)
    assert "restart 1 of 5" in run.log.read_text()


def test_a_class_has_a_cap(jobs: Any, tmp_path: Path) -> None:
    run = Run(jobs.plan(caps={"PEER_LOST": 1}), "fail('PEER_LOST', 'gone')", log=tmp_path / "log")
    assert run() == 86
    assert len(run.record.attempts()) == 2
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason == "gone (failure 2 of its class)"


def test_out_of_memory_asks_for_a_new_pod(jobs: Any, tmp_path: Path) -> None:
    run = Run(jobs.plan(), "fail('OOM', 'too big')", log=tmp_path / "log")
    assert run() == 84
    assert run.record.outcome() is None
    assert len(run.record.attempts()) == 1


def test_an_exit_with_0_is_no_success_unless_the_record_says_so(jobs: Any, tmp_path: Path) -> None:
    run = Run(jobs.plan(), "pass", log=tmp_path / "log")
    assert run() == 81
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert "the record does not say that the job is over" in outcome.failure.reason


def test_a_trainer_that_stands_still_dumps_its_stacks_and_is_started_again(jobs: Any, tmp_path: Path) -> None:
    script = """
    def stands_still():
        time.sleep(60)
    if attempt == 1:
        faulthandler.register(signal.SIGUSR1, file=stack_file(record, "chief-0", 1).open("w"), all_threads=True)
        beat(4)
        stands_still()
    done()
    """
    run = Run(jobs.plan(budgets={"stall": 0.4, "start": 5.0}), script, log=tmp_path / "log")
    assert run() == 0
    first, _ = run.record.attempts()
    assert first.failure_class == "STALLED"
    assert "while training (step 4)" in first.reason
    assert "stands_still" in (run.record.folder / "stacks" / "chief-0-0001.txt").read_text()
    assert run.record.generation().number == 1


def test_sigterm_becomes_checkpoint_and_leave(jobs: Any, tmp_path: Path, termination_log: Path) -> None:
    script = """
    def leave(*_):
        beat(6, "saving")
        fail("PREEMPTED", "was asked to leave at step 6")
    signal.signal(signal.SIGTERM, leave)
    beat(5)
    time.sleep(60)
    """
    run = Run(jobs.plan(), script, log=tmp_path / "log")
    terminate_at_step(run, 5)
    assert run() == 88
    failure = message(termination_log).failure
    assert failure is not None
    assert (failure.reason, failure.last_step) == ("was asked to leave at step 6", 6)
    assert run.record.outcome() is None
    beat = run.record.heartbeat("chief", 0)
    assert beat is not None
    assert beat.phase == "left"


def terminate_at_step(run: Run, step: int) -> None:
    """Terminate the launcher once its trainer has come to a step."""

    def wait() -> None:
        while True:
            beat = run.record.heartbeat("chief", 0)
            if beat is not None and beat.step == step:
                break
            time.sleep(0.02)
        run.launcher.terminate()

    threading.Thread(target=wait, daemon=True).start()


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace_time(jobs: Any, tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); beat(5); time.sleep(60)"
    run = Run(jobs.plan(), script, times=Times(poll=0.02, grace=0.3), log=tmp_path / "log")
    terminate_at_step(run, 5)
    assert run() == 88
    (attempt,) = run.record.attempts()
    assert (attempt.failure_class, attempt.reason) == ("PREEMPTED", "no checkpoint within 0.3 s of SIGTERM")


def test_a_parameter_server_stays_until_the_chief_has_saved(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("worker", 0))
    record.beat(Heartbeat("chief", 0, phase="training"))
    run = Run(plan, "time.sleep(60)", role="ps", times=Times(poll=0.02, grace=20.0), log=tmp_path / "log")
    run.launcher.terminate()
    saved_at: list[float] = []

    def save_when_asked() -> None:
        while (beat := record.heartbeat("ps", 0)) is None or beat.phase != "leaving":
            time.sleep(0.02)
        time.sleep(0.5)
        (record.folder / "checkpoints").mkdir()
        (record.folder / "checkpoints" / "checkpoint").write_text("saved")
        saved_at.append(time.monotonic())

    thread = threading.Thread(target=save_when_asked)
    thread.start()
    assert run() == 88
    thread.join()
    assert 0 <= time.monotonic() - saved_at[0] < 5


@pytest.mark.parametrize(
    "script",
    [
        "os.fork() or time.sleep(60); done(); time.sleep(60)",
        "import subprocess; subprocess.Popen(['sleep', '60']); done()",
    ],
)
def test_what_a_trainer_has_started_ends_with_it(jobs: Any, tmp_path: Path, script: str) -> None:
    run = Run(jobs.plan(), script, log=tmp_path / "log")
    assert run() == 0
    assert members(run.scripts.children[0].pid) == []


def members(group: int) -> list[int]:
    """The processes of a group that run; killed ones whose parent has not looked yet do not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({labels.ENV_ROLE: ""}, "TRAINYARD_ROLE must be set"),
        ({labels.ENV_ROLE: "king"}, "name no replica: 'king', '0'"),
        ({labels.ENV_INDEX: "one"}, "name no replica: 'chief', 'one'"),
        ({labels.ENV_INDEX: "3"}, "replica must be one of ['chief-0'], got 'chief-3'"),
        ({labels.ENV_JOB: "/nonexistent"}, "no job in /nonexistent"),
        ({"TRAINYARD_GRACE": "soon"}, "TRAINYARD_GRACE must be a number of seconds, got 'soon'"),
        ({"TRAINYARD_GRACE": "-1"}, "TRAINYARD_GRACE must be seconds of 0 or more, got '-1'"),
    ],
)
def test_a_launcher_without_a_place_says_so(
    jobs: Any,
    termination_log: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    reason: str,
) -> None:
    plan = jobs.plan()
    for key, value in {**plan.replicas[0].env, **env}.items():
        monkeypatch.setenv(key, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launcher_module.main() == exit_code_of(FailureClass.CONFIG)
    finally:
        signal.signal(signal.SIGTERM, before)
    failure = message(termination_log).failure
    assert failure is not None
    assert reason in failure.reason


def test_what_can_not_run_ends_the_job(
    jobs: Any, termination_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = jobs.plan(strategy="multi_worker", workers=1, success=Success("fraction", 0.5))
    for key, value in plan.replica(RoleKind.CHIEF, 0).env.items():
        monkeypatch.setenv(key, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launcher_module.main() == 83
    finally:
        signal.signal(signal.SIGTERM, before)
    outcome = JobRecord.open(plan.job.output).outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert "success rule fraction 0.5" in outcome.failure.reason
