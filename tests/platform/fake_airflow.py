"""An Airflow of plain values with the client's methods: for tests of what is built on the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.platform.airflow_api import AirflowRefused, DagRun, TaskInstance

DAG: dict[str, Any] = {
    "dag_id": "d",
    "is_paused": True,
    "params": {"steps": {"value": 1}, "workers": {"value": 2}},
    "next_dagrun_run_after": None,
    "next_dagrun_logical_date": None,
}


def task(
    task_id: str, state: str = "success", begin: float = 0.0, end: float | None = 1.0, **more: Any
) -> TaskInstance:
    values: dict[str, Any] = {"map_index": -1, "label": "", "try_number": 1, "queued": begin, **more}
    return TaskInstance(task_id=task_id, state=state, started=begin, ended=end, **values)


def run_of(state: str = "running", ended: float | None = None) -> DagRun:
    return DagRun("d", "manual__1", state, 0.0, 0.0, ended)


class FakeAirflow:
    """Runs go through `states`, one a look; `refuse` maps a logical date (or "") to the error of a trigger."""

    def __init__(
        self,
        states: list[tuple[str, list[TaskInstance]]] | None = None,
        *,
        xcoms: Mapping[tuple[str, str], Any] | None = None,
        log: list[dict[str, Any]] | None = None,
        refuse: Mapping[str, AirflowRefused] | None = None,
        dag: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = "http://airflow"
        self.states = states or [("success", [])]
        self.xcoms = xcoms or {}
        self.log = log or []
        self.refuse = refuse or {}
        self.dag_value = {**DAG, **(dag or {})}
        self.calls: list[Any] = []
        self.others: list[DagRun] = []

    def wait_for_dag(self, dag_id: str, **_: Any) -> dict[str, Any]:
        return {**self.dag_value, "dag_id": dag_id}

    def trigger(self, dag_id: str, conf: Any, *, run_id: str, logical_date: str | None = None) -> DagRun:
        self.calls.append(("trigger", dag_id, dict(conf), logical_date))
        if error := self.refuse.get(logical_date or ""):
            raise error
        return DagRun(dag_id, run_id, "queued", 0.0, None, None)

    def set_paused(self, dag_id: str, paused: bool) -> None:
        self.calls.append(("paused", paused))

    def run(self, dag_id: str, run_id: str) -> DagRun:
        state = self.states[0][0]
        return DagRun(dag_id, run_id, state, 0.0, 0.0, 100.0 if state in ("success", "failed") else None)

    def tasks(self, dag_id: str, run_id: str) -> list[TaskInstance]:
        tasks = self.states[0][1]
        if len(self.states) > 1:
            self.states.pop(0)
        return tasks

    def unfinished(self, dag_id: str) -> list[DagRun]:
        return self.others

    def fail_run(self, dag_id: str, run_id: str) -> None:
        self.calls.append(("failed", run_id))

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any:
        return self.xcoms.get((task_id, key))

    def xcom_keys(self, dag_id: str, run_id: str) -> list[tuple[str, int, str]]:
        return [(task_id, -1, key) for task_id, key in self.xcoms]

    def task_log(self, dag_id: str, run_id: str, one: TaskInstance) -> list[dict[str, Any]]:
        return self.log

    def page(self, dag_id: str, run_id: str, one: TaskInstance | None = None) -> str:
        return f"{self.url}/dags/{dag_id}/runs/{run_id}" + (f"/tasks/{one.task_id}" if one else "")
