"""Airflow's REST API, as much of it as the platform's clients use; the only place that speaks it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import httpx

from trainers.job.errors import ConfigError, InfraError

__all__ = ["AirflowClient", "AirflowError", "AirflowRefused", "AirflowUnreachable", "DagRun", "TaskInstance"]

_PAGE = 100
_LAST_DAG_SECONDS = 20.0


class AirflowError(InfraError):
    """Airflow answered with an error that no better class says."""

    code = "airflow.error"


class AirflowUnreachable(AirflowError):
    """Nobody answered."""

    code = "airflow.unreachable"


class AirflowRefused(ConfigError):
    """Airflow refused what was asked (400, 404, 409, 422); `status` is HTTP's, `detail` Airflow's own words."""

    code = "airflow.refused"

    def __init__(self, status: int, detail: str, *, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.status = status
        self.detail = detail


@dataclass(frozen=True)
class DagRun:
    """A run as the API shows it; times are Unix seconds."""

    dag_id: str
    run_id: str
    state: str
    queued: float | None
    started: float | None
    ended: float | None

    @property
    def is_over(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ("success", "failed")


@dataclass(frozen=True)
class TaskInstance:
    """A task of a run as the API shows it; times are Unix seconds, `map_index` -1 where it isn't mapped."""

    task_id: str
    map_index: int
    label: str
    state: str
    try_number: int
    queued: float | None
    started: float | None
    ended: float | None
    operator: str = ""

    @property
    def name(self) -> str:
        """What people call it: "train.worker[worker-1]"."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.label or self.map_index}]"

    @property
    def seconds(self) -> float | None:
        """How long the last try ran, None before it ran and while it runs."""
        return None if self.started is None or self.ended is None else self.ended - self.started


class AirflowClient:
    """Logs in with user and password when it has to; every call raises one of this module's errors.

    `transport` is httpx's seam for tests.
    """

    def __init__(
        self,
        url: str,
        user: str,
        password: str,
        *,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._login = {"username": user, "password": password}
        # A proxy of the environment can't reach loopback.
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False, transport=transport)
        self._token = ""
        self._clock = clock
        self._sleep = sleep

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def dag(self, dag_id: str) -> dict[str, Any]:
        """The DAG as the scheduler knows it, with its timetable's next date."""
        return self._call("GET", f"/api/v2/dags/{quote(dag_id)}/details")

    def dag_ids(self) -> list[str]:
        """The ids of all DAGs that load."""
        dags = self._call("GET", "/api/v2/dags", params={"limit": _PAGE, "exclude_stale": True})["dags"]
        return sorted(dag["dag_id"] for dag in dags)

    def import_errors(self, *, since: float = 0.0) -> dict[str, str]:
        """What stands in the way of DAG files at or after `since` (Unix seconds), the traceback by file name."""
        errors = self._call("GET", "/api/v2/importErrors", params={"limit": _PAGE})["import_errors"]
        return {e["filename"]: e["stack_trace"] for e in errors if (_unix(e["timestamp"]) or 0.0) >= since}

    def wait_for_dag(
        self, dag_id: str, *, parsed_after: float = 0.0, seconds: float = 120.0
    ) -> dict[str, Any]:
        """The DAG, once the dag-processor has read its file at or after `parsed_after` (Unix seconds).

        Raises:
            AirflowRefused: it did not load in time; the message holds import errors or the DAGs there are.
        """
        begun = self._clock()
        deadline = begun + seconds
        asked = others = False
        while True:
            try:
                dag = self.dag(dag_id)
            except AirflowRefused as refused:
                if refused.status != 404:
                    raise
                if not others and self.dag_ids():
                    # Files are parsed one after the other: it is here soon, or nowhere.
                    others, deadline = True, min(deadline, self._clock() + _LAST_DAG_SECONDS)
            else:
                if (_unix(dag.get("last_parsed_time")) or 0.0) >= parsed_after:
                    return dag
                if not asked:
                    self._ask_for_parse(dag["file_token"])
                    asked = True
            late = self._clock() >= deadline
            errors = self.import_errors(since=parsed_after)
            # Of a file that goes by another name it is not sure that it would hold the DAG.
            if errors and (late or any(dag_id in PurePath(name).stem for name in errors)):
                raise self._not_importable(dag_id, errors)
            if late:
                there = ", ".join(self.dag_ids()) or "none"
                what = f"there is no DAG {dag_id!r} after {self._clock() - begun:.0f} s"
                raise AirflowRefused(404, what, hint=f"there are: {there}")
            self._sleep(0.5)

    def trigger(
        self,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        logical_date: str | None = None,
    ) -> DagRun:
        """Start a run with this form input; it waits while the DAG is paused.

        Raises:
            AirflowRefused: the input was refused (400), naming the field; or a run has this date (409).
        """
        body = {"logical_date": logical_date, "conf": dict(conf or {})} | (
            {"dag_run_id": run_id} if run_id else {}
        )
        return _dag_run(self._call("POST", f"/api/v2/dags/{quote(dag_id)}/dagRuns", json=body))

    def set_paused(self, dag_id: str, paused: bool) -> None:
        """Pause a DAG's schedule, or let it go on."""
        self._call("PATCH", f"/api/v2/dags/{quote(dag_id)}", json={"is_paused": paused})

    def run(self, dag_id: str, run_id: str) -> DagRun:
        """The run as it is now."""
        return _dag_run(self._call("GET", _run_path(dag_id, run_id)))

    def unfinished(self, dag_id: str) -> list[DagRun]:
        """The runs of a DAG that are queued or running, oldest first."""
        params = {"state": ["queued", "running"], "order_by": "run_after", "limit": _PAGE}
        page = self._call("GET", f"/api/v2/dags/{quote(dag_id)}/dagRuns", params=params)
        return [_dag_run(value) for value in page["dag_runs"]]

    def fail_run(self, dag_id: str, run_id: str) -> None:
        """Have Airflow fail a run: its running tasks are ended, its pods deleted."""
        self._call("PATCH", _run_path(dag_id, run_id), json={"state": "failed"})

    def tasks(self, dag_id: str, run_id: str) -> list[TaskInstance]:
        """All task instances of a run, mapped ones each for itself."""
        tasks: list[TaskInstance] = []
        while True:
            params = {"limit": _PAGE, "offset": len(tasks)}
            page = self._call("GET", f"{_run_path(dag_id, run_id)}/taskInstances", params=params)
            tasks += [_task_instance(value) for value in page["task_instances"]]
            if not page["task_instances"] or len(tasks) >= page["total_entries"]:
                return tasks

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any | None:
        """The value that a task pushed, None when it pushed none."""
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{quote(task_id)}/xcomEntries/{quote(key)}"
        try:
            return self._call("GET", path, params={"map_index": map_index, "deserialize": True})["value"]
        except AirflowRefused as refused:
            if refused.status == 404:
                return None
            raise

    def xcom_keys(self, dag_id: str, run_id: str) -> list[tuple[str, int, str]]:
        """Task, map index and key of every value that a run's tasks have pushed."""
        found: list[tuple[str, int, str]] = []
        while True:
            params = {"limit": _PAGE, "offset": len(found)}
            page = self._call(
                "GET", f"{_run_path(dag_id, run_id)}/taskInstances/~/xcomEntries", params=params
            )
            found += [(entry["task_id"], entry["map_index"], entry["key"]) for entry in page["xcom_entries"]]
            if not page["xcom_entries"] or len(found) >= page["total_entries"]:
                return found

    def task_log(self, dag_id: str, run_id: str, task: TaskInstance) -> list[dict[str, Any]]:
        """The events of a task's last try: each with "event", errors with "error_detail"."""
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{quote(task.task_id)}/logs/{task.try_number}"
        content = self._call("GET", path, params={"map_index": task.map_index})["content"]
        return [event if isinstance(event, dict) else {"event": str(event)} for event in content]

    def page(self, dag_id: str, run_id: str, task: TaskInstance | None = None) -> str:
        """The address of a run's page, or of a task's in it."""
        url = f"{self.url}/dags/{quote(dag_id)}/runs/{quote(run_id)}"
        if task is None:
            return url
        mapped = f"/mapped/{task.map_index}" if task.map_index >= 0 else ""
        return f"{url}/tasks/{quote(task.task_id)}{mapped}"

    def _ask_for_parse(self, file_token: str) -> None:
        """Put a DAG file first in the dag-processor's line; one that is in the line already is refused."""
        try:
            self._call("PUT", f"/api/v2/parseDagFile/{quote(file_token)}")
        except AirflowRefused as refused:
            if refused.status != 409:
                raise

    @staticmethod
    def _not_importable(dag_id: str, errors: Mapping[str, str]) -> AirflowRefused:
        text = "\n".join(f"{name}:\n{trace.rstrip()}" for name, trace in errors.items())
        what = f"{dag_id!r} did not load; Airflow could not import\n{text}"
        return AirflowRefused(404, what, hint="fix the file")

    def _call(self, method: str, path: str, **request: Any) -> Any:
        response = self._authorized(method, path, **request)
        if response.status_code == 401:  # the token ran out, or the api-server has other keys now
            self._token = ""
            response = self._authorized(method, path, **request)
        if response.status_code == 401:
            raise AirflowError(
                f"Airflow at {self.url} does not take its own token", hint="make down, then make up"
            )
        return response.json() if response.content else None

    def _authorized(self, method: str, path: str, **request: Any) -> httpx.Response:
        if not self._token:
            login = self._send("POST", "/auth/token", json=self._login)
            if login.status_code == 401:
                raise AirflowError(
                    f"Airflow at {self.url} does not take the password of {self._login['username']}",
                    hint="another Airflow listens there, or the password file was changed: make down, then make up",
                )
            self._token = login.json()["access_token"]
        return self._send(method, path, headers={"Authorization": f"Bearer {self._token}"}, **request)

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise AirflowUnreachable(
                f"Airflow does not answer at {self.url}: {error}", hint="`trainyard status` says how it is"
            ) from error
        if response.status_code in (400, 403, 404, 409, 422):
            raise AirflowRefused(response.status_code, _detail(response))
        if response.status_code >= 500:
            raise AirflowError(
                f"Airflow failed at {method} {path}: {response.status_code} {_detail(response)}"
            )
        return response


def _detail(response: httpx.Response) -> str:
    """Airflow's own words about an error: a text, or pydantic's list of wrong fields."""
    try:
        detail = response.json().get("detail", response.text)
    except ValueError:
        return response.text
    if isinstance(detail, Sequence) and not isinstance(detail, str):
        return "; ".join(
            f"{'.'.join(str(part) for part in item['loc'][1:])}: {item['msg']}" for item in detail
        )
    return str(detail)


def _run_path(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id)}"


def _dag_run(value: Mapping[str, Any]) -> DagRun:
    return DagRun(
        dag_id=value["dag_id"],
        run_id=value["dag_run_id"],
        state=value["state"],
        queued=_unix(value.get("queued_at")),
        started=_unix(value.get("start_date")),
        ended=_unix(value.get("end_date")),
    )


def _task_instance(value: Mapping[str, Any]) -> TaskInstance:
    label = value.get("rendered_map_index") or ""
    return TaskInstance(
        task_id=value["task_id"],
        map_index=value["map_index"],
        # Until a mapped task has its label, Airflow gives the bare index for it.
        label=label if label != str(value["map_index"]) else "",
        state=value["state"] or "none",
        try_number=value.get("try_number") or 0,
        queued=_unix(value.get("queued_when")),
        started=_unix(value.get("start_date")),
        ended=_unix(value.get("end_date")),
        operator=value.get("operator") or "",
    )


def _unix(text: str | None) -> float | None:
    """Unix seconds of an RFC 3339 time of Airflow's."""
    if text is None:
        return None
    whole, _, fraction = text.removesuffix("Z").removesuffix("+00:00").partition(".")
    return datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp() + float(
        f"0.{fraction or 0}"
    )
