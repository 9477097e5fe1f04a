"""A command of one's own in place of a trainer, on the whole platform: plain Python that adds up over sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from trainyard.platform import Platform

from trainers.job.record import JobRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def line(platform: Platform, run_dag: Callable[..., Any]) -> Any:
    """A run of the docs' example, one of whose workers was killed once there was a checkpoint."""
    killed: list[int] = []

    def kill(run_id: str) -> None:
        for path in platform.storage.glob("jobs/line_weekly/*/checkpoints/line.json"):
            for attempt in JobRecord(path.parents[1]).attempts("worker", 1):
                if not killed and attempt.ended is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(attempt.pid, signal.SIGKILL)
                        killed.append(attempt.pid)

    run = run_dag("line_weekly", {"workers": 2, "steps": 250, "pause": 0.05}, meanwhile=kill)
    print(run.timeline())
    assert run.state == "success", run.explain()
    assert len(killed) == 1
    return run


def test_its_replicas_are_as_many_as_the_form_says(line: Any) -> None:
    replicas = {name: state for name, state in line.states().items() if name.startswith("train.replica")}
    assert replicas == {f"train.replica[{name}]": "success" for name in ("worker-0", "worker-1", "chief-0")}


def test_what_it_found_is_handed_on(line: Any) -> None:
    verdict = line.xcom("train.verdict")
    assert verdict["step"] == 250
    assert verdict["metrics"]["w"] == pytest.approx(3, abs=0.05)
    assert line.xcom("tell").startswith("y = 3.00 x + 2.00 after 250 steps")


def test_the_killed_worker_began_again_with_the_others(line: Any) -> None:
    record = JobRecord.open(line.xcom("train.verdict")["job"])
    assert (record.generation().number, record.generation().by) == (2, "worker-1")
    assert {(a.role, a.index, a.generation) for a in record.attempts()} == {
        (role, index, generation)
        for role, index in (("chief", 0), ("worker", 0), ("worker", 1))
        for generation in (1, 2)
    }


def test_the_command_line_shows_it(line: Any, platform: Platform) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINYARD_", "MLFLOW_"))}
    job = "/".join(line.xcom("train.verdict")["job"].split("/")[-2:])
    for verb, words in (
        ("plan", ("custom", "python -m line_by_sockets")),
        ("show", ("SUCCEEDED", "250 steps", "the command was ended by SIGKILL")),
        ("logs", ("[chief-0] rank 0 is done: y = 3.0",)),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "trainyard.cli", "jobs", verb, job],
            env={**environ, "TRAINYARD_HOME": str(platform.settings.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for text in words:
            assert text in done.stdout


def test_mlflow_has_its_metrics(line: Any, platform: Platform) -> None:
    import httpx

    with httpx.Client(
        base_url=f"{platform.urls['mlflow']}/api/2.0/mlflow", trust_env=False, timeout=60
    ) as http:
        found = http.get("/experiments/get-by-name", params={"experiment_name": "line"}).raise_for_status()
        experiment = found.json()["experiment"]["experiment_id"]
        runs = http.post("/runs/search", json={"experiment_ids": [experiment]}).raise_for_status().json()
    data = next(run["data"] for run in runs["runs"] if run["info"]["status"] == "FINISHED")
    assert {"loss", "w", "b"} <= {row["key"] for row in data["metrics"]}
    assert {"trainyard.command"} <= {row["key"] for row in data["tags"]}
