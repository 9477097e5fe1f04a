"""Two launchers of one replica: that of a node which is cut off, and the one of the pod that has its place."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launching import Run, message
from trainers.job.record import JobRecord, JobState

TAKEN = "another pod has taken this one's place"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("beat(3); time.sleep(60)", id="while its trainer runs"),
        pytest.param(
            "beat(3)\nwhile record.place_of(role, index) != 'another': time.sleep(0.01)\nos.kill(os.getpid(), 9)",
            id="as its trainer dies",
        ),
    ],
)
def test_a_launcher_whose_place_is_taken_ends_its_trainer_and_writes_no_more(
    jobs: Any, tmp_path: Path, termination_log: Path, script: str
) -> None:
    run = Run(jobs.plan(), script, log=tmp_path / "log")
    heartbeat = run.record.heartbeat("chief", 0)

    def take_its_place() -> None:
        nonlocal heartbeat
        while (heartbeat := run.record.heartbeat("chief", 0)) is None or heartbeat.step != 3:
            time.sleep(0.01)
        run.record.take_place("chief", 0, "another")

    taking = threading.Thread(target=take_its_place)
    taking.start()
    assert run() == 88  # PREEMPTED
    taking.join()
    failure = message(termination_log).failure
    assert failure is not None
    assert (failure.failure_class.value, failure.code) == ("PREEMPTED", "runtime.replaced")
    assert len(run.scripts.children) == 1, "it starts no other one"
    assert run.record.heartbeat("chief", 0) == heartbeat
    assert run.record.outcome() is None
    assert run.record.place_of("chief", 0) == "another"


def test_the_newer_one_of_two_launchers_goes_on(jobs: Any, tmp_path: Path, termination_log: Path) -> None:
    plan = jobs.plan()
    script = "for step in range(1, 10_000):\n    beat(step)\n    time.sleep(0.05)\n    if GO: done(); break"
    older = Run(plan, script.replace("GO", "False"), log=tmp_path / "older.log")
    codes: list[int] = []
    first = threading.Thread(target=lambda: codes.append(older()))
    first.start()
    while not older.record.attempts():
        time.sleep(0.01)
    gate = tmp_path / "go"
    newer = Run(plan, script.replace("GO", f"os.path.exists({str(gate)!r})"), log=tmp_path / "newer.log")
    second = threading.Thread(target=lambda: codes.append(newer()))
    second.start()
    first.join()
    assert codes == [88]
    assert TAKEN in older.log.read_text()
    gate.touch()
    second.join()
    assert codes == [88, 0]
    outcome = newer.record.outcome()
    assert outcome is not None
    assert outcome.state is JobState.SUCCEEDED
    assert [attempt.number for attempt in newer.record.attempts()] == [1, 2]


def test_who_could_not_say_so_is_not_sent_away_by_the_one_before(
    jobs: Any, tmp_path: Path, termination_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: whose place it is, is not known then."""
    plan = jobs.plan()
    JobRecord.open(plan.job.output).take_place("chief", 0, "the one before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JobRecord, "take_place", full)
    run = Run(plan, "beat(1); time.sleep(0.5); done()", log=tmp_path / "log")
    assert run() == 0
    assert "could not write whose place it is" in run.log.read_text()


def test_a_plan_that_is_made_anew_sends_nobody_away(jobs: Any, tmp_path: Path, termination_log: Path) -> None:
    script = "import pathlib\n(pathlib.Path(record.folder) / 'places' / 'chief-0.json').unlink()\nbeat(1)\n"
    run = Run(jobs.plan(), f"{script}time.sleep(0.5)\ndone()", log=tmp_path / "log")
    assert run() == 0
