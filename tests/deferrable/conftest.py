"""One embedded platform with deferrable tasks, behind a door to its process kubelet that can be shut."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from kubernetes import client, config
from trainyard.platform import Platform, Settings
from trainyard.platform.airflow_api import DagRun, TaskInstance

from trainers.job import labels

HANG = 900.0
"""Seconds after which a test that waits says for what; a hundred tasks on a machine that others use take minutes."""


def wait_for(what: str, done: Callable[[], Any], *, seconds: float = HANG) -> Any:
    """What `done` says once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
    return found


class Airflow:
    """The platform as these tests use it."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.client = platform.airflow
        self.namespace = platform.settings.namespace
        self.core = client.CoreV1Api(config.new_client_from_config(str(platform.settings.kubeconfig)))

    def begin(self, dag_id: str = "waiting", **conf: Any) -> Gang:
        """Trigger a run."""
        self.client.wait_for_dag(dag_id)
        self.client.set_paused(dag_id, False)
        return Gang(self, self.client.trigger(dag_id, conf))

    def component(self, name: str) -> dict[str, Any]:
        """A component's entry in platform.json."""
        return next(row for row in self.platform.state["services"] if row["name"] == name)

    def kill(self, name: str) -> None:
        """kill -9 of a component and all its processes; its supervisor starts it again, which is waited for."""
        before = self.component(name)
        root = psutil.Process(before["pid"])
        for process in [root, *root.children(recursive=True)]:
            os.kill(process.pid, signal.SIGKILL)

        def back() -> bool:
            now = self.component(name)
            return now["state"] == "ready" and now["pid"] != before["pid"]

        wait_for(f"{name} is back", back)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A component that takes connections and says nothing."""
        pid = self.component(name)["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


class Gang:
    """One run of the DAG `waiting`, or another of its kind."""

    def __init__(self, airflow: Airflow, run: DagRun) -> None:
        self.airflow = airflow
        self.client = airflow.client
        self.dag_id, self.run_id = run.dag_id, run.run_id
        self.name = labels.gang_name(run.dag_id, run.run_id)

    def tasks(self, task_id: str = "train.replica") -> list[TaskInstance]:
        """The task instances of one task, in the order of the map."""
        found = [t for t in self.client.tasks(self.dag_id, self.run_id) if t.task_id == task_id]
        return sorted(found, key=lambda t: t.map_index)

    def pods(self, phase: str = "") -> dict[str, str]:
        """Name and uid of the run's pods, those in a phase."""
        selector = f"dag_id={self.dag_id},run_id={_label(self.run_id)}"
        rows = self.airflow.core.list_namespaced_pod(self.airflow.namespace, label_selector=selector).items
        return {p.metadata.name: p.metadata.uid for p in rows if not phase or p.status.phase == phase}

    def services(self) -> list[str]:
        """The run's Services."""
        rows = self.airflow.core.list_namespaced_service(self.airflow.namespace).items
        return [row.metadata.name for row in rows if row.metadata.name == self.name]

    def deferred(self, count: int, task_id: str = "train.replica") -> dict[str, str]:
        """Wait until `count` tasks are deferred and their pods run; the pods."""

        def are() -> bool:
            tasks = self.client.tasks(self.dag_id, self.run_id)
            failed = [(t.name, self.log(t)[-8:]) for t in tasks if t.state == "failed"]
            assert not failed, failed
            return [t.state for t in tasks if t.task_id == task_id].count("deferred") == count

        wait_for(f"{count} tasks are deferred", are)
        wait_for(f"{count} pods run", lambda: len(self.pods("Running")) == count)
        return self.pods("Running")

    def ends(self, state: str) -> list[TaskInstance]:
        """Wait for the run's end, which has to be this; all its tasks."""

        def over() -> Any:
            run = self.client.run(self.dag_id, self.run_id)
            return run if run.is_over else None

        run = wait_for("the run ends", over)
        tasks = self.client.tasks(self.dag_id, self.run_id)
        assert run.state == state, [(t.name, t.state, self.log(t)[-8:]) for t in tasks if t.state == "failed"]
        return tasks

    def log(self, task: TaskInstance) -> list[str]:
        """The lines of a task's log, as Airflow's page has them; of an error its text is one."""
        rows = self.client.task_log(self.dag_id, self.run_id, task)
        return [str(text) for row in rows for text in (row["event"], *_errors(row))]

    def numbers(self, task: TaskInstance) -> list[int]:
        """The numbers N of the lines "number N" in a task's log."""
        found = (re.search(r"number (\d+)$", line) for line in self.log(task))
        return [int(match[1]) for match in found if match]

    def patch(self, path: str, body: dict[str, Any]) -> None:
        """PATCH or POST of a part of the run, as Airflow's page does it."""
        self.client._call("PATCH", f"/api/v2/dags/{self.dag_id}/dagRuns/{self.run_id}{path}", json=body)

    def clear(self, task_id: str, map_index: int) -> None:
        """Clear one mapped task instance."""
        body = {
            "dry_run": False,
            "dag_run_id": self.run_id,
            "task_ids": [[task_id, map_index]],
            "only_failed": False,
            "reset_dag_runs": False,
        }
        self.client._call("POST", f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body)

    def out_of_time(self) -> None:
        """Let the run have begun a day ago, by Airflow's own table: no machine is too slow or too quick for that."""
        earlier = "strftime('%Y-%m-%d %H:%M:%S.000000', start_date, '-1 day')"
        command = f"UPDATE dag_run SET start_date = {earlier} WHERE dag_id = ? AND run_id = ?"
        path = self.airflow.platform.settings.airflow_database
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
            assert database.execute(command, (self.dag_id, self.run_id)).rowcount == 1

    def nothing_left(self) -> None:
        """Wait until no pod and no Service of the run is there."""
        wait_for("no pod is left", lambda: not self.pods())
        wait_for("no Service is left", lambda: not self.services())


def _errors(row: dict[str, Any]) -> list[str]:
    return [str(error["exc_value"]) for error in row.get("error_detail") or ()]


def _label(run_id: str) -> str:
    from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value

    return str(make_safe_label_value(run_id))


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """The platform, up."""
    settings = replace(
        Settings.from_environment({}, home=tmp_path_factory.mktemp("platform") / "home"),
        dags=Path(__file__).parent / "dags",
        deferrable=True,
        parallelism=8,
        without=("mlflow", "model-server"),
    )
    with Platform(settings=settings).running() as running:
        yield Airflow(running)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A file that scripts wait for; what a test that failed has left ends by it, too."""
    gate = Gate(tmp_path / "go")
    yield gate
    gate.open()


class Gate:
    """Scripts of pods wait until it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wait = f"while [ ! -e {path} ]; do sleep 0.5; done"

    def open(self) -> None:
        """Let them go on."""
        self.path.touch()
