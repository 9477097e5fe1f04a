"""What was spooled is what MLflow holds, once, whatever was killed or cut in between."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mlflow_server import BreakingLine, MlflowServer
from trainers.job.files import read_json
from trainers.job.observations import Evaluation, add_evaluation
from trainers.job.record import JobRecord, JobState
from trainers.runtime.deliver import ENV_URI, Undelivered, deliver, undelivered
from trainers.runtime.spooled import Position, batches
from trainers.runtime.tracker import TrackerAway, connect
from trainers.runtime.tracking import RUN, Spool

Points = dict[str, list[tuple[float, int, int]]]


def spooled(folder: Path) -> Points:
    """What the spools hold, by metric."""
    found: Points = {}
    for batch in batches(folder, Position(folder / "none")):
        for line in batch.lines:
            if line.kind == "metric":
                found.setdefault(str(line.value["key"]), []).append(line.identity)
    return {key: sorted(points) for key, points in found.items()}


def held(url: str, folder: Path) -> Points:
    """What MLflow holds of a job's run; asked of its own client, line by line."""
    import mlflow

    client = mlflow.MlflowClient(url)
    run = client.get_run(str((read_json(folder / RUN) or {})["run_id"]))
    return {
        key: sorted((m.value, m.timestamp, m.step) for m in client.get_metric_history(run.info.run_id, key))
        for key in run.data.metrics
    }


def write(folder: Path, rng: random.Random, first: int, steps: int) -> None:
    """Some of a training's lines."""
    clock = iter(range(first, first + 10 * steps))
    spool = Spool(folder, clock=lambda: 1_700_000_000 + next(clock))
    system = Spool(folder, "system-worker-0", clock=lambda: 1_700_000_000 + next(clock))
    for step in range(first, first + steps):
        spool.metrics({"loss": rng.random(), "examples_per_s": rng.uniform(1, 1e5)}, step=step)
        if rng.random() < 0.2:
            system.metrics({"system/worker-0/cpu_utilization_percentage": rng.uniform(0, 400)}, step=step)
        if rng.random() < 0.1:
            add_evaluation(
                folder, Evaluation(step, {"accuracy": rng.random()}, 10, 0.1, at=1_700_000_000 + step)
            )
    spool.params({"steps": first + steps, f"from_{first}": 1})  # "steps" changes, which MLflow would refuse
    spool.tags({"at": first})


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cut_lines(server: MlflowServer, make_job: Callable[..., Path], seed: int) -> None:
    """A third of all requests fails, half of these after MLflow has done what they say."""
    rng = random.Random(seed)
    folder = make_job()
    line = BreakingLine(
        server.port, lambda _: rng.choice(["pass", "pass", "pass", "pass", "before", "after"])
    )
    failures = 0
    try:
        for part in range(6):
            write(folder, rng, 1000 * part, rng.randint(1, 700))
            for _ in range(rng.randint(1, 4)):
                try:
                    deliver(folder, environ={ENV_URI: line.url})
                except Undelivered:
                    failures += 1
    finally:
        line.close()
    deliver(folder, environ={ENV_URI: server.url})
    assert failures > 0
    assert held(server.url, folder) == spooled(folder)
    import mlflow

    client = mlflow.MlflowClient(server.url)
    run = client.get_run(str((read_json(folder / RUN) or {})["run_id"]))
    assert run.data.params["steps"] == str(_first_steps(folder))
    assert len(run.data.params) == 7
    assert run.data.tags["at"] == "5000"
    # One run, though its making was cut as well: it is found again by its key.
    key = run.data.tags["trainyard.key"]
    same = client.search_runs([run.info.experiment_id], f"tags.`trainyard.key` = '{key}'")
    assert len(same) == 1
    assert not undelivered(folder)


def _first_steps(folder: Path) -> int:
    lines = [json.loads(line) for line in (folder / "tracking" / "spool.jsonl").read_text().splitlines()]
    return next(int(line["value"]) for line in lines if line.get("param") == "steps")


def test_server_and_delivery_killed(tmp_path: Path, make_job: Callable[..., Path]) -> None:
    """Real processes, real SIGKILLs: the server twice, the delivery all the time, while lines are written."""
    rng = random.Random(7)
    folder = make_job()
    server = MlflowServer(tmp_path / "mlflow").start()
    env = {**os.environ, ENV_URI: server.url}
    command = [sys.executable, "-m", "trainers.runtime.deliver", "--job", str(folder), "--every", "0.02"]
    written = 0
    try:
        for round_ in range(8):
            process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
            until = time.monotonic() + rng.uniform(0.3, 1.5)
            while time.monotonic() < until:
                write(folder, rng, written, 200)
                written += 200
                time.sleep(0.02)
                if round_ in (2, 5) and server.process is not None and server.process.poll() is None:
                    server.kill()  # in the middle of whatever it does
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if round_ in (3, 6):
                server.start()
        JobRecord.open(folder).finish(JobState.SUCCEEDED)
        done = subprocess.run([*command, "--once"], env=env, timeout=120, check=False)
        assert done.returncode == 0
        assert held(server.url, folder) == spooled(folder)
        assert not undelivered(folder)
        assert connect(server.url).run(str((read_json(folder / RUN) or {})["run_id"]))["status"] == "FINISHED"  # type: ignore[index]
    finally:
        server.kill()


class Careless:
    """A tracker that takes everything as often as it is sent, and breaks as it is told."""

    def __init__(self, fates: list[str]) -> None:
        self.fates = iter(fates)
        self.metrics: list[tuple[str, float, int, int]] = []
        self.runs: list[str] = []
        self.statuses: list[str] = []

    def _meet(self, do: Callable[[], Any]) -> Any:
        fate = next(self.fates, "pass")
        if fate == "before":
            raise TrackerAway("cut before")
        result = do()
        if fate == "after":
            raise TrackerAway("cut after")
        return result

    def experiment(self, name: str) -> str:
        return "1"

    def find_run(self, experiment_id: str, key: str) -> str | None:
        return str(self._meet(lambda: self.runs.index(key))) if key in self.runs else None

    def create_run(self, experiment_id: str, name: str, tags: Any, at: float) -> str:
        def make() -> str:
            self.runs.append(tags["trainyard.key"])
            return str(len(self.runs) - 1)

        return str(self._meet(make))

    def run(self, run_id: str) -> dict[str, Any]:
        return {"status": "RUNNING", "deleted": False, "experiment_id": "1", "params": {}}

    def log(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        rows = [(m["key"], m["value"], m["timestamp"], m["step"]) for m in metrics]
        self._meet(lambda: self.metrics.extend(rows))

    def history(self, run_id: str, key: str) -> set[tuple[float, int, int]]:
        return {(value, at, step) for name, value, at, step in self.metrics if name == key}

    def set_status(self, run_id: str, status: str, at: float | None) -> None:
        self._meet(lambda: self.statuses.append(status))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    st.lists(st.sampled_from(["pass", "before", "after"]), max_size=30),
)
def test_nothing_twice_even_where_mlflow_would_take_it_twice(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], fates: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    job = _bare_job(folder)
    tracker, at = Careless(fates), iter(range(10**9))
    spool = Spool(job, clock=lambda: next(at))
    for count in [*parts, *[0] * (len(fates) + 1)]:
        for step in range(count):
            spool.metrics({"loss": step / 7}, step=step)
        try:
            deliver(job, tracker=tracker, environ={ENV_URI: "http://mlflow"})
        except Undelivered:
            continue
    sent = [(value, when, step) for _, value, when, step in tracker.metrics]
    lines = [json.loads(line) for line in spool.path.read_text().splitlines()]
    assert sent == [(line["value"], line["at"], line["step"]) for line in lines]
    assert len(tracker.runs) == 1


def _bare_job(folder: Path) -> Path:
    from trainers.job.plan import Cluster, make_plan
    from trainers.job.spec import TrainingJob

    job = TrainingJob("digits", "trainers.models.digits", inputs={"records": "r"}, output=str(folder / "job"))
    JobRecord.create(make_plan(job, Cluster.process([1]), gang="digits"))
    return folder / "job"
