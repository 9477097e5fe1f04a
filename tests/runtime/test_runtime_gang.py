"""The local gang runner with small commands in the place of launchers."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from trainers.job.plan import Plan
from trainers.job.record import JobRecord, JobState
from trainers.runtime.local_gang import LocalGang, main, run_gang


def with_command(plan: Plan, **scripts: str) -> Plan:
    """The plan with a script for each role."""
    replicas = tuple(
        dataclasses.replace(r, command=("python", "-c", scripts[r.role.value])) for r in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)


FINISH = """
import os
from trainers.job.record import JobRecord, JobState
print(os.environ["TRAINYARD_ROLE"], os.environ["EXTRA"])
JobRecord.open(os.environ["TRAINYARD_JOB"]).finish(JobState.SUCCEEDED, step=3)
"""

# Leaves with a code the first time, and with 0 when it is started again.
ONCE = """
import os, pathlib, sys
mark = pathlib.Path(os.environ["TRAINYARD_JOB"], "came-" + os.environ["TRAINYARD_ROLE"])
there = mark.exists()
mark.touch()
sys.exit(0 if there else {code})
"""


def test_a_gang_runs_to_its_end(jobs: Any) -> None:
    plan = with_command(jobs.plan(), chief=FINISH)
    result = run_gang(plan, seconds=30, env={"EXTRA": "word"})
    assert result.exit_codes == {"chief-0": 0}
    assert result.outcome is not None
    assert (result.outcome.state, result.outcome.step) == (JobState.SUCCEEDED, 3)
    assert 0 < result.seconds < 30
    assert (Path(plan.job.output) / "pods" / "chief-0.log").read_text() == "chief word\n"


@pytest.mark.parametrize(
    ("code", "retries", "expected"),
    [(87, 1, 0), (87, 0, 87), (81, 1, 81), (88, 0, 88), (88, 1, 0), (-9, 1, 0)],
)
def test_who_may_be_retried_is(jobs: Any, code: int, retries: int, expected: int) -> None:
    script = ONCE.format(code=code) if code > 0 else ONCE.replace("sys.exit(0 if there else {code})", KILL)
    result = run_gang(with_command(jobs.plan(), chief=script), seconds=30, retries=retries)
    assert result.exit_codes == {"chief-0": expected}
    assert result.outcome is None


KILL = "there or os.kill(os.getpid(), 9)"


def test_what_still_runs_is_killed(jobs: Any) -> None:
    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1)
    sleep = "import time; time.sleep(60)"
    began = time.monotonic()
    with LocalGang(with_command(plan, chief=sleep, worker="pass", ps=sleep)) as gang:
        gang.start()
        result = gang.wait(0.5)
    assert result.exit_codes == {"worker-0": 0, "chief-0": -9, "ps-0": -9}
    assert time.monotonic() - began < 20


def test_a_plan_from_a_file(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTRA", "word")
    monkeypatch.setattr("trainers.runtime.local_gang.signal.signal", lambda *_: None)
    plan = with_command(jobs.plan(), chief=FINISH)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.to_dict()))
    assert main(["--plan", str(file), "--seconds", "30"]) == 0
    said, outcome = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["exit_codes"] == {"chief-0": 0}
    assert outcome["state"] == "SUCCEEDED"
    assert JobRecord.open(plan.job.output).state is JobState.SUCCEEDED
