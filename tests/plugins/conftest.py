"""A process kubelet, and the part of a task's context that operators use; no Airflow database anywhere."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainyard.kubelet import FakeCluster
from trainyard.operators.step import StepOperator

RUN_ID = "manual__2026-01-01T00:00:00+00:00"


class TaskInstance:
    """What operators ask of a task instance: who it is, and XCom."""

    def __init__(self, task_id: str, *, map_index: int = -1, try_number: int = 1) -> None:
        self.dag_id = "pipeline"
        self.task_id = task_id
        self.run_id = RUN_ID
        self.map_index = map_index
        self.try_number = try_number
        self.max_tries = 10
        self.start_date = None
        self.xcom: dict[str, Any] = {}
        self.others: dict[tuple[str, str], Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        """Keep a value, which must be JSON as in Airflow."""
        self.xcom[key] = json.loads(json.dumps(value))

    def xcom_pull(self, *, task_ids: str, key: str, map_indexes: Sequence[int] | None = None) -> Any:
        """Another task's value."""
        found = self.others.get((task_ids, key))
        return found if map_indexes is None else [(found or {}).get(i) for i in map_indexes]


class StateStore(dict[str, Any]):
    """Airflow's task state store: outlasts the tries of one task instance."""

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self[key] = json.loads(json.dumps(value))


def make_context(operator: Any, *, params: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A context for `operator.execute`; the same `store` says that it is a later try."""
    store = options.pop("store", None)
    ti = TaskInstance(operator.task_id, **options)
    ti.task = operator
    return {
        "ti": ti,
        "task": operator,
        "run_id": RUN_ID,
        "params": params or {},
        "dag": operator.dag if operator.has_dag() else SimpleNamespace(max_active_tasks=16, parent_dag=None),
        "dag_run": SimpleNamespace(triggering_user_name="ada"),
        "task_state_store": StateStore() if store is None else store,
    }


@pytest.fixture
def context_of() -> Callable[..., dict[str, Any]]:
    """Makes the context of a task: `context_of(operator, params={...}, map_index=0, store=...)`."""
    return make_context


@pytest.fixture(scope="session")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as running:
        yield running


@pytest.fixture
def pipelines(cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment that tasks run in; the storage root."""
    storage = tmp_path / "storage"
    storage.mkdir()
    monkeypatch.setenv("AIRFLOW_CONN_TRAINYARD_KUBERNETES", cluster.airflow_connection)
    monkeypatch.setenv("TRAINYARD_STORAGE", str(storage))
    monkeypatch.setenv("TRAINYARD_MODEL_SERVER", "127.0.0.1:1")
    monkeypatch.setenv("TRAINYARD_MODEL_CONFIG", str(storage / "serving" / "models.config"))
    for name in (
        "TRAINYARD_NAMESPACE",
        "TRAINYARD_DEFERRABLE",
        "TRAINYARD_STORAGE_CLAIM",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)
    return storage


@pytest.fixture
def step(tmp_path: Path, pipelines: Path) -> Callable[..., StepOperator]:
    """Makes a StepOperator that runs the source of a `main(spec)` in a pod."""

    def make(source: str, spec: dict[str, Any] | None = None, **options: Any) -> StepOperator:
        text = f"""
import os, sys, time
from trainers.job import errors
from trainers.job.termination import run_step
def main(spec):
{textwrap.indent(textwrap.dedent(source), "    ")}
if __name__ == "__main__":
    sys.exit(run_step(main))
"""
        (tmp_path / "a_step.py").write_text('"""A step of a test."""\n' + text)
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        options.setdefault("task_id", "step")
        return StepOperator(module="a_step", spec=spec or {}, env_vars={"PYTHONPATH": path}, **options)

    return make
