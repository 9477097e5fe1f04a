"""Starting, following and ending a run; the failure card; on an Airflow of plain values."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trainyard.platform.airflow_api import AirflowRefused, AirflowUnreachable
from trainyard.platform.failure_view import failed_task, failure_of_log
from trainyard.platform.pipeline_run import (
    FormRefused,
    end_early,
    follow,
    job_folders,
    pause_leftovers,
    start_run,
    unpaused,
)

from trainers.job.failures import Failure, FailureClass


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_airflow = _load("fake_airflow")
FakeAirflow, task, run_of, DAG = (
    fake_airflow.FakeAirflow,
    fake_airflow.task,
    fake_airflow.run_of,
    fake_airflow.DAG,
)
DUE = {"next_dagrun_run_after": "2026-01-04T00:00:00Z", "next_dagrun_logical_date": "2026-01-04T00:00:00Z"}
LATER = {"next_dagrun_run_after": "2999-01-01T00:00:00Z", "next_dagrun_logical_date": "2999-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("dag", "dates"),
    [
        ({}, [None]),
        (DUE, ["2026-01-04T00:00:00Z"]),  # in place of the scheduled run that would start beside it
        (LATER, [None]),
        ({**DUE, "is_paused": False}, [None]),  # that scheduled run has started long since
    ],
)
def test_a_due_schedule_gives_its_date_to_the_run(dag: dict[str, Any], dates: list[str | None]) -> None:
    airflow = FakeAirflow()
    run = start_run(airflow, {**DAG, **dag}, {"steps": 5})
    assert [call[3] for call in airflow.calls] == dates
    assert airflow.calls[0][2] == {"steps": 5}
    assert run.run_id.startswith("manual__2")
    assert not set(run.run_id) & set(":+ "), "it is a part of addresses and folder names"


def test_a_due_date_that_was_had_already() -> None:
    date = DUE["next_dagrun_logical_date"]
    airflow = FakeAirflow(refuse={date: AirflowRefused(409, "there is one")})
    start_run(airflow, {**DAG, **DUE}, {})
    assert [call[3] for call in airflow.calls] == [date, None]


@pytest.mark.parametrize(
    ("conf", "detail", "field", "problem", "hint"),
    [
        ({"worker": 2}, "", "worker", "d has no such field", "did you mean workers?"),
        ({"zzz": 2}, "", "zzz", "d has no such field", "the form has: steps, workers"),
        (
            {"workers": -1},
            "Invalid input for param workers: -1 is less than the minimum of 0\n\nFailed validating ...",
            "workers",
            "-1 is less than the minimum of 0",
            "",
        ),
        (
            {"steps": 1},
            "Dag with dag_id: 'd' does not allow manual runs",
            "",
            "does not allow manual runs",
            "",
        ),
    ],
)
def test_a_refused_form_names_the_field(
    conf: dict[str, Any], detail: str, field: str, problem: str, hint: str
) -> None:
    airflow = FakeAirflow(refuse={"": AirflowRefused(400, detail)} if detail else {})
    with pytest.raises(FormRefused) as caught:
        start_run(airflow, DAG, conf)
    refused = caught.value
    assert (refused.field, refused.hint) == (field, hint)
    assert refused.problem.endswith(problem)
    assert "nothing was started" in refused.card()
    assert problem in refused.card()


def test_other_refusals_are_not_the_forms() -> None:
    with pytest.raises(AirflowRefused):
        start_run(FakeAirflow(refuse={"": AirflowRefused(404, "gone")}), DAG, {})


def test_a_paused_dag_is_paused_again(tmp_path: Path) -> None:
    airflow = FakeAirflow()
    notes: list[str] = []

    def fail_in_the_middle() -> None:
        with unpaused(airflow, DAG, tmp_path):
            notes.extend(note.name for note in tmp_path.iterdir())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert notes == ["d"]
    assert airflow.calls == [("paused", False), ("paused", True)]
    assert pause_leftovers(airflow, tmp_path) == []


def test_a_dag_that_was_active_stays_so(tmp_path: Path) -> None:
    airflow = FakeAirflow()
    with unpaused(airflow, {**DAG, "is_paused": False}, tmp_path):
        pass
    assert airflow.calls == []


def test_what_a_killed_run_left_unpaused_is_paused_later(tmp_path: Path) -> None:
    class Gone(FakeAirflow):  # type: ignore[misc, valid-type]
        def set_paused(self, dag_id: str, paused: bool) -> None:
            if paused:
                raise AirflowUnreachable("it went down")

    with unpaused(Gone(), {**DAG, "dag_id": "a/b"}, tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 1
    with unpaused(Gone(), {**DAG, "dag_id": "a/b", "is_paused": False}, tmp_path):
        pass  # the next run of the same knows that it was paused once
    airflow = FakeAirflow()
    assert pause_leftovers(airflow, tmp_path) == ["a/b"]
    assert airflow.calls == [("paused", True)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "left"), [(404, 0), (403, 1)])
def test_a_leftover_whose_dag_is_gone(tmp_path: Path, status: int, left: int) -> None:
    class Refusing(FakeAirflow):  # type: ignore[misc, valid-type]
        def set_paused(self, dag_id: str, paused: bool) -> None:
            raise AirflowRefused(status, "no")

    (tmp_path / "d").touch()
    with contextlib.suppress(AirflowRefused):
        assert pause_leftovers(Refusing(), tmp_path) == []
    assert len(list(tmp_path.iterdir())) == left


def beat(folder: Path, replica: str, **values: Any) -> None:
    role, index = replica.rsplit("-", 1)
    path = folder / "heartbeats" / f"{replica}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"role": role, "index": int(index), **values}))


def test_following_with_the_heartbeat_that_knows_most(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "d" / "manual__1"
    beat(job, "ps-0", phase="serving")
    beat(job, "worker-0", step=50, target=100)
    beat(job, "chief-0", step=40, target=100, loss=0.5)
    airflow = FakeAirflow([("running", [task("a", "running", end=None)]), ("success", [task("a")])])
    slept: list[float] = []
    found = list(follow(airflow, run_of(), tmp_path, clock=lambda: 7.0, sleep=slept.append))
    assert [one.run.state for one in found] == ["running", "success"]
    assert found[0].beat is not None
    assert (found[0].beat.role, found[0].beat.step) == ("chief", 40)
    assert found[0].elapsed == 7.0
    assert len(slept) == 1


def test_folders_of_a_runs_jobs(tmp_path: Path) -> None:
    for name in ("manual__1", "manual__1--second", "manual__2"):
        (tmp_path / "jobs" / "d" / name).mkdir(parents=True)
    assert [f.name for f in job_folders(tmp_path, "d", "manual__1")] == ["manual__1", "manual__1--second"]
    assert job_folders(tmp_path, "other", "manual__1") == []


def test_ending_early_waits_for_the_tasks() -> None:
    running = [task("a", "running", end=None)]
    airflow = FakeAirflow([("running", running), ("running", running), ("failed", [task("a", "failed")])])
    slept: list[float] = []
    end_early(airflow, run_of(), clock=lambda: 0.0, sleep=slept.append)
    assert airflow.calls == [("failed", "manual__1")]
    assert len(slept) == 2
    times = iter([0.0, 1.0, 30.0])
    end_early(FakeAirflow([("running", running)]), run_of(), clock=lambda: next(times), sleep=slept.append)


def test_the_verdict_speaks_for_the_gang() -> None:
    failure = Failure(FailureClass.USER, "loss is nan", role="worker", index=1, exit_code=81)
    tasks = [
        task("train.replica", "failed", 1.0, 5.0, map_index=0),
        task("train.verdict", "failed", 6.0, 7.0),
        task("evaluate", "upstream_failed"),
    ]
    xcoms = {
        ("train.replica", "failure"): Failure(FailureClass.PEER_LOST, "worker-1 went away").to_dict(),
        ("train.verdict", "failure"): failure.to_dict(),
    }
    found = failed_task(FakeAirflow(xcoms=xcoms), run_of("failed"), tasks)
    assert found is not None
    assert found.failure == failure
    card = found.card()
    for text in (
        "FAILED USER: train.verdict",
        "loss is nan",
        "worker-1",
        "81",
        "what to do",
        "/tasks/train.verdict",
    ):
        assert text in card


def test_the_first_that_failed_is_the_cause() -> None:
    tasks = [task("b", "failed", 3.0, 9.0), task("a", "failed", 1.0, 2.0)]
    xcoms = {(t, "failure"): Failure(FailureClass.DATA, f"{t} is bad").to_dict() for t in "ab"}
    found = failed_task(FakeAirflow(xcoms=xcoms), run_of("failed"), tasks)
    assert found is not None
    assert found.failure.reason == "a is bad"


def test_a_plain_task_fails_with_its_own_error() -> None:
    frames = [
        {"filename": "/x/site-packages/airflow/sdk/task.py", "lineno": 1, "name": "run"},
        {"filename": "/repo/dags/mine.py", "lineno": 7, "name": "ingest"},
        {"filename": "/usr/lib/python3.11/json/decoder.py", "lineno": 3, "name": "decode"},
    ]
    log = [
        {"event": "starting"},
        {
            "event": "Task failed",
            "error_detail": [{"exc_type": "KeyError", "exc_value": "'x'", "frames": frames}],
        },
    ]
    found = failed_task(FakeAirflow(log=log), run_of("failed"), [task("ingest", "failed")])
    assert found is not None
    assert found.failure.failure_class is FailureClass.USER
    assert found.failure.reason == "KeyError: 'x'"
    assert found.failure.detail == 'File "/repo/dags/mine.py", line 7, in ingest'


def test_a_task_that_says_nothing_shows_its_log() -> None:
    failure = failure_of_log([{"event": f"line {i}"} for i in range(40)])
    assert failure.failure_class is FailureClass.INFRA
    assert failure.log_tail[-1] == "line 39"
    assert len(failure.log_tail) == 15


def test_a_run_that_somebody_failed() -> None:
    assert failed_task(FakeAirflow(), run_of("failed"), [task("a")]) is None
