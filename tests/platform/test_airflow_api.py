"""The client of Airflow's REST API against a small Airflow of our own, by httpx's transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from trainyard.platform.airflow_api import (
    AirflowClient,
    AirflowError,
    AirflowRefused,
    AirflowUnreachable,
    TaskInstance,
)

Handler = Callable[[httpx.Request], httpx.Response]
RUN = {
    "dag_id": "d",
    "dag_run_id": "manual__1",
    "state": "running",
    "queued_at": "1970-01-01T00:00:10Z",
    "start_date": "1970-01-01T00:00:11.5Z",
    "end_date": None,
}
TASK = {
    "task_id": "train.replica",
    "map_index": 1,
    "rendered_map_index": "worker-1",
    "state": None,
    "try_number": 0,
    "queued_when": None,
    "start_date": None,
    "end_date": None,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def client_of(handler: Handler, clock: Clock | None = None) -> AirflowClient:
    def with_login(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            assert json.loads(request.content) == {"username": "admin", "password": "secret"}
            return httpx.Response(201, json={"access_token": "token-1"})
        assert request.headers["Authorization"].startswith("Bearer ")
        return handler(request)

    clock = clock or Clock()
    transport = httpx.MockTransport(with_login)
    return AirflowClient(
        "http://airflow", "admin", "secret", transport=transport, clock=clock, sleep=clock.sleep
    )


def answering(*answers: httpx.Response) -> Handler:
    left = list(answers)
    return lambda _: left.pop(0)


def test_trigger_and_read_a_run() -> None:
    asked: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content or b"null")))
        return httpx.Response(200, json=RUN)

    client = client_of(handler)
    run = client.trigger("d", {"steps": 5}, run_id="manual__1", logical_date="2026-01-01T00:00:00Z")
    assert (run.queued, run.started, run.ended, run.is_over) == (10.0, 11.5, None, False)
    assert client.run("d", "manual__1") == run
    client.fail_run("d", "manual__1")
    client.set_paused("d", True)
    assert asked == [
        (
            "POST",
            "/api/v2/dags/d/dagRuns",
            {"logical_date": "2026-01-01T00:00:00Z", "conf": {"steps": 5}, "dag_run_id": "manual__1"},
        ),
        ("GET", "/api/v2/dags/d/dagRuns/manual__1", None),
        ("PATCH", "/api/v2/dags/d/dagRuns/manual__1", {"state": "failed"}),
        ("PATCH", "/api/v2/dags/d", {"is_paused": True}),
    ]


def test_ids_are_quoted_in_addresses() -> None:
    paths: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(200, json=RUN)

    client_of(handler).run("d", "manual__2026-01-01T00:00:00+00:00")
    assert paths == [b"/api/v2/dags/d/dagRuns/manual__2026-01-01T00%3A00%3A00%2B00%3A00"]


def test_a_token_that_ran_out_is_renewed() -> None:
    client = client_of(answering(httpx.Response(401, json={}), httpx.Response(200, json=RUN)))
    assert client.run("d", "manual__1").state == "running"
    with pytest.raises(AirflowError, match="its own token"):
        client_of(lambda _: httpx.Response(401, json={})).run("d", "x")


def test_a_wrong_password() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(401, json={"detail": "Invalid credentials"}))
    client = AirflowClient("http://airflow", "admin", "wrong", transport=transport)
    with pytest.raises(AirflowError, match="password of admin") as caught:
        client.run("d", "x")
    assert "wrong" not in str(caught.value)


def test_unfinished_runs() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.params.get_list("state") == ["queued", "running"]
        return httpx.Response(200, json={"dag_runs": [RUN]})

    assert [run.run_id for run in client_of(handler).unfinished("d")] == ["manual__1"]


def test_pages_of_tasks_and_values() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        offset = int(request.url.params["offset"])
        if request.url.path.endswith("xcomEntries"):
            entries = [{"task_id": "t", "map_index": -1, "key": f"k{offset}"}]
            return httpx.Response(200, json={"xcom_entries": entries, "total_entries": 2})
        tasks = [{**TASK, "map_index": offset}]
        return httpx.Response(200, json={"task_instances": tasks, "total_entries": 3})

    client = client_of(handler)
    assert [task.map_index for task in client.tasks("d", "r")] == [0, 1, 2]
    assert client.tasks("d", "r")[0].name == "train.replica[worker-1]"
    assert client.tasks("d", "r")[0].state == "none"
    assert client.xcom_keys("d", "r") == [("t", -1, "k0"), ("t", -1, "k1")]


@pytest.mark.parametrize(
    ("label", "index", "name"),
    [("", -1, "t"), ("", 3, "t[3]"), ("worker-1", 3, "t[worker-1]"), ("x", -1, "t")],
)
def test_names_of_tasks(label: str, index: int, name: str) -> None:
    assert TaskInstance("t", index, label, "success", 1, None, 1.0, 3.5).name == name
    assert TaskInstance("t", index, label, "success", 1, None, 1.0, 3.5).seconds == 2.5
    assert TaskInstance("t", index, label, "running", 1, None, 1.0, None).seconds is None


def test_values_of_tasks() -> None:
    assert client_of(lambda _: httpx.Response(200, json={"value": {"a": 1}})).xcom("d", "r", "t") == {"a": 1}
    assert client_of(lambda _: httpx.Response(404, json={"detail": "none"})).xcom("d", "r", "t") is None
    with pytest.raises(AirflowRefused):
        client_of(lambda _: httpx.Response(403, json={"detail": "no"})).xcom("d", "r", "t")


def test_a_tasks_log() -> None:
    content = ["plain", {"event": "said", "level": "info"}]
    client = client_of(lambda _: httpx.Response(200, json={"content": content}))
    task = TaskInstance("t", -1, "", "failed", 2, None, None, None)
    assert client.task_log("d", "r", task) == [{"event": "plain"}, {"event": "said", "level": "info"}]


def test_pages_to_look_at() -> None:
    client = client_of(lambda _: httpx.Response(200))
    task = TaskInstance("train.replica", 2, "", "failed", 1, None, None, None)
    assert client.page("d", "r:1") == "http://airflow/dags/d/runs/r%3A1"
    assert client.page("d", "r", task) == "http://airflow/dags/d/runs/r/tasks/train.replica/mapped/2"


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (400, {"detail": "Invalid input for param workers: -1"}, AirflowRefused, "param workers"),
        (
            422,
            {"detail": [{"loc": ["body", "conf"], "msg": "must be a dict"}]},
            AirflowRefused,
            "conf: must be a dict",
        ),
        (500, {"detail": "oh"}, AirflowError, "failed at GET /api/v2/dags/d/dagRuns/r: 500 oh"),
    ],
)
def test_errors(status: int, body: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        client_of(lambda _: httpx.Response(status, json=body)).run("d", "r")


def test_an_error_page_that_is_no_json() -> None:
    with pytest.raises(AirflowError, match="502 Bad gateway"):
        client_of(lambda _: httpx.Response(502, text="Bad gateway")).run("d", "r")


def test_nobody_there() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(AirflowUnreachable, match="does not answer at http://airflow") as caught:
        client_of(handler).run("d", "r")
    assert "status" in caught.value.hint


class Dags:
    """DAGs that appear or are parsed anew as time goes by."""

    def __init__(self, clock: Clock, *, appears: float = 0.0, parsed: float = 0.0, errors: Any = ()) -> None:
        self.clock = clock
        self.appears = appears
        self.parsed = parsed
        self.errors = errors
        self.reparse_at: float | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.startswith("/api/v2/parseDagFile/"):
            self.reparse_at = self.clock.now + 2
            return httpx.Response(201)
        if path.endswith("/importErrors"):
            return httpx.Response(200, json={"import_errors": list(self.errors)})
        if path == "/api/v2/dags":
            return httpx.Response(200, json={"dags": [{"dag_id": "other"}]})
        if self.clock.now < self.appears:
            return httpx.Response(404, json={"detail": "no such dag"})
        fresh = self.reparse_at is not None and self.clock.now >= self.reparse_at
        seconds = 100 if fresh else self.parsed
        parsed = f"1970-01-01T00:{int(seconds // 60):02d}:{seconds % 60:02.0f}Z"
        return httpx.Response(200, json={"dag_id": "d", "last_parsed_time": parsed, "file_token": "t/1"})


def test_a_dag_is_waited_for() -> None:
    clock = Clock()
    dag = client_of(Dags(clock, appears=3.0), clock).wait_for_dag("d")
    assert dag["dag_id"] == "d"
    assert clock.now == 3.0


def test_a_changed_file_is_parsed_first() -> None:
    clock = Clock()
    dags = Dags(clock, parsed=10.0)
    client_of(dags, clock).wait_for_dag("d", parsed_after=50.0)
    assert dags.reparse_at == 2.0


def test_a_dag_that_never_comes() -> None:
    clock = Clock()
    with pytest.raises(AirflowRefused, match="no DAG 'd' after 20 s") as caught:
        client_of(Dags(clock, appears=1e9), clock).wait_for_dag("d")
    assert caught.value.hint == "there are: other"


def error_of(filename: str, at: str = "1970-01-01T00:01:00Z") -> dict[str, str]:
    return {"filename": filename, "stack_trace": "Traceback ...\nSyntaxError: oh\n", "timestamp": at}


@pytest.mark.parametrize(
    ("error", "seconds", "message"),
    [
        (error_of("d.py"), 0.0, "SyntaxError: oh"),  # at once, not after the deadline
        (error_of("sub/my_d_pipeline.py"), 0.0, "SyntaxError: oh"),
        (
            error_of("other.py"),
            20.0,
            "SyntaxError: oh",
        ),  # it may hold it, or another file may that comes later
        (
            error_of("d.py", "1970-01-01T00:00:01Z"),
            20.0,
            "there is no DAG 'd'",
        ),  # of before the file was mended
    ],
)
def test_a_dag_that_does_not_import(error: dict[str, str], seconds: float, message: str) -> None:
    clock = Clock()
    with pytest.raises(AirflowRefused, match=message):
        client_of(Dags(clock, appears=1e9, errors=[error]), clock).wait_for_dag("d", parsed_after=30.0)
    assert clock.now == seconds


def test_another_files_error_does_not_matter() -> None:
    clock = Clock()
    dags = Dags(clock, appears=3.0, errors=[error_of("other.py")])
    assert client_of(dags, clock).wait_for_dag("d")["dag_id"] == "d"


def test_refusals_while_waiting_come_through() -> None:
    with pytest.raises(AirflowRefused, match="not yours"):
        client_of(lambda _: httpx.Response(403, json={"detail": "not yours"})).wait_for_dag("d")
    client_of(lambda _: httpx.Response(200)).close()
