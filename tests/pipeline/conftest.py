"""The whole platform, started once: Airflow's scheduler, the process kubelet, MLflow and the model server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainyard.platform import Platform, Settings

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("platform") / "home"
    dags = tmp_path_factory.mktemp("dags")
    examples = REPO / "docs" / "examples"
    for name in ("wine_checked.py", "flights_on_new_records.py"):
        (dags / name).symlink_to(examples / name)
    for file in (REPO / "dags").glob("*.py"):
        (dags / file.name).symlink_to(file)
    settings = replace(Settings.from_environment({}, home=home), dags=dags)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(examples)  # where the example's trainer module is, for its pods
    try:
        with Platform(settings=settings).running() as running:
            yield running
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Run:
    """A finished run, as a test reads it."""

    def __init__(self, platform: Platform, run: Any, seconds: float) -> None:
        self.client = platform.airflow
        self.dag_id, self.run_id, self.state, self.seconds = run.dag_id, run.run_id, run.state, seconds
        self.tasks = {task.name: task for task in self.client.tasks(run.dag_id, run.run_id)}

    def xcom(self, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """What a task pushed."""
        return self.client.xcom(self.dag_id, self.run_id, task_id, key, map_index)

    def states(self) -> dict[str, str]:
        """Task -> state."""
        return {name: task.state for name, task in self.tasks.items()}

    def timeline(self) -> str:
        """When each task ran, for the test's output."""
        begun = sorted((t.started, name, t) for name, t in self.tasks.items() if t.started is not None)
        rows = [
            f"{t.started - begun[0][0]:7.1f} s  {t.seconds or 0:6.1f} s  {name}  {t.state}"
            for _, name, t in begun
        ]
        return "\n".join([f"{self.dag_id}: {self.seconds:.1f} s from trigger to end, {self.state}", *rows])

    def explain(self) -> str:
        """The timeline, and the log of each failed task: why an assertion did not hold."""
        parts = [self.timeline()]
        for name, task in self.tasks.items():
            if task.state == "failed":
                parts.append(f"--- {name}")
                parts += [
                    str(row)[:2000] for row in self.client.task_log(self.dag_id, self.run_id, task)[-12:]
                ]
        return "\n".join(parts)


@pytest.fixture(scope="session")
def run_dag(platform: Platform) -> Callable[..., Run]:
    """Triggers a DAG, waits for its end and gives the run; `meanwhile` is called with its id again and again."""
    from trainyard.platform.pipeline_run import follow, start_run

    def run(
        dag_id: str,
        conf: dict[str, Any] | None = None,
        *,
        meanwhile: Callable[[str], None] = lambda run_id: None,
    ) -> Run:
        client = platform.airflow
        dag = client.wait_for_dag(dag_id)
        begun = time.monotonic()
        started = start_run(client, dag, conf or {})
        client.set_paused(dag_id, False)
        for snapshot in follow(client, started, platform.storage, sleep=lambda seconds: time.sleep(0.3)):
            meanwhile(started.run_id)
            if snapshot.run.is_over:
                break
            assert time.monotonic() - begun < 400, "the run hangs"
        client.set_paused(dag_id, True)
        return Run(platform, snapshot.run, time.monotonic() - begun)

    return run
