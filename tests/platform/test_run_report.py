"""What people see: progress, report, digits."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from trainyard.platform.airflow_api import DagRun, TaskInstance
from trainyard.platform.digits_view import Answer, draw, read_answers, side_by_side
from trainyard.platform.pipeline_run import Snapshot
from trainyard.platform.progress import (
    LiveProgress,
    PlainProgress,
    StartProgress,
    duration,
    make_progress,
    training_line,
)
from trainyard.platform.report import OVERHEAD, Report, Served, Stage, make_report, print_report, split_time

from trainers.job.record import Heartbeat

BEAT = Heartbeat("chief", 0, step=120, target=400, loss=0.25, examples_per_s=1234.5, eta_s=12.0)


def task(
    task_id: str,
    state: str,
    begin: float | None,
    end: float | None,
    index: int = -1,
    label: str = "",
    tries: int = 1,
) -> TaskInstance:
    return TaskInstance(task_id, index, label, state, tries, begin, begin, end)


def snapshot(
    tasks: list[TaskInstance], now: float = 10.0, beat: Heartbeat | None = None, state: str = "running"
) -> Snapshot:
    return Snapshot(DagRun("d", "manual__1", state, 0.0, 0.0, 100.0), tuple(tasks), beat, now, now)


def text_console(width: int = 100, **options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, highlight=False, **options), out


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (4.25, "4.2 s"), (65, "1 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_trainings_line() -> None:
    assert training_line(BEAT) == "training: step 120/400, loss 0.2500, 1,234 examples/s, 12.0 s to go"
    assert training_line(Heartbeat("worker", 1, "starting")) == "training: worker-1 starting"
    assert training_line(Heartbeat("chief", 0, step=3)) == "training: step 3"


def test_plain_lines_tell_each_change_once() -> None:
    console, out = text_console()
    progress = make_progress(console)
    assert isinstance(progress, PlainProgress)
    replica = task("train.replica", "running", 2.0, None, 1)
    named = task("train.replica", "running", 2.0, None, 1, "worker-1")
    again = task("train.replica", "running", 5.0, None, 1, "worker-1", tries=2)
    done = task("train.replica", "success", 5.0, 9.5, 1, "worker-1", tries=2)
    progress.update(snapshot([task("prepare", "queued", None, None)], 1.0))
    progress.update(snapshot([task("prepare", "success", 1.0, 2.0), replica], 2.0))
    progress.update(snapshot([task("prepare", "success", 1.0, 2.0), named], 3.0, BEAT))
    progress.update(snapshot([task("prepare", "success", 1.0, 2.0), named], 4.0, BEAT))
    progress.update(snapshot([again, task("late", "upstream_failed", None, None)], 6.0))
    progress.update(snapshot([done], 10.0, Heartbeat("chief", 0, step=400, target=400)))
    progress.close()
    assert out.getvalue().splitlines() == [
        "[   2.0 s] prepare: success in 1.0 s",
        "[   3.0 s] train.replica[worker-1]: running",
        "[   6.0 s] train.replica[worker-1]: running (try 2)",
        "[  10.0 s] train.replica[worker-1]: success in 4.5 s (try 2)",
        "[  10.0 s] training: step 400/400",
    ]


def test_training_is_told_every_few_seconds() -> None:
    console, out = text_console()
    progress = PlainProgress(console)
    for now in range(1, 21):
        progress.update(snapshot([], now, Heartbeat("chief", 0, step=now, target=100)))
    assert [line.split("step ")[1] for line in out.getvalue().splitlines()] == [
        "5/100",
        "10/100",
        "15/100",
        "20/100",
    ]


def test_the_live_table() -> None:
    console, out = text_console(force_terminal=True, height=8)
    progress = make_progress(console)
    assert isinstance(progress, LiveProgress)
    tasks = [task(f"t{i}", "success", float(i), i + 1.0) for i in range(9)]
    tasks += [
        task("train.replica", "running", 9.0, None, 0, "ps-0", tries=2),
        task("later", "none", None, None),
    ]
    tasks += [task("next", "queued", None, None)]
    progress.update(snapshot(tasks, 12.0, BEAT))
    shown = out.getvalue()
    progress.close()
    assert "tasks done" in shown
    assert "train.replica[ps-0]" in shown
    assert "3.0 s" in shown, "a running task's seconds so far"
    assert "try 2" in shown
    assert "step 120/400" in shown
    assert "later" not in shown


def test_the_start_is_told_as_it_goes() -> None:
    console, out = text_console()
    times = iter([0.0, 1.0, 2.0, 3.0])
    progress = StartProgress(console, clock=lambda: next(times))
    api = {"title": "Airflow api-server", "state": "starting", "url": "http://127.0.0.1:8081"}
    state = {"walked": {"airflow": 8080}, "ports": {"airflow": 8081}, "services": [api]}
    progress(state)
    progress({**state, "services": [{**api, "state": "ready"}, {"title": "db", "state": "done", "url": ""}]})
    assert out.getvalue().splitlines() == [
        "[   1.0 s] port 8080 is in use, airflow takes 8081",
        "[   2.0 s] Airflow api-server is up at http://127.0.0.1:8081",
        "[   3.0 s] db is up",
    ]


def test_every_second_has_one_name() -> None:
    tasks = [
        task("prepare", "success", 2.0, 6.0),
        task("train.plan", "success", 7.0, 8.0),
        task("champion", "success", 7.5, 9.0),
        task("train.replica", "success", 9.0, 20.0, 0),
        task("train.replica", "success", 9.5, 21.0, 1),
        task("evaluate", "upstream_failed", 22.0, 22.0),
        task("never", "none", None, None),
    ]
    stages = split_time(tasks, 0.0, 25.0)
    assert stages == (
        Stage("prepare", 4.0),
        Stage("train", 13.0),
        Stage("champion", 1.0),
        Stage(OVERHEAD, 7.0),
    )
    assert sum(stage.seconds for stage in stages) == 25.0
    assert split_time([], 0.0, 3.0) == (Stage(OVERHEAD, 3.0),)


VERDICT = {
    "outcome": "pass",
    "reasons": ["accuracy 0.9722 reaches the minimum 0.9000"],
    "numbers": {
        "metric": "accuracy",
        "value": 0.9722,
        "examples": 360,
        "champion_value": 0.95,
        "champion_version": 1,
    },
}
RELEASE = {
    "name": "digits",
    "version": 2,
    "previous": 1,
    "promoted": "2026-01-01",
    "labels": {"stable": 2},
    "warnings": ["alias not moved"],
}


@pytest.mark.parametrize(
    ("verdict", "release", "headline", "outcome"),
    [
        (
            VERDICT,
            RELEASE,
            "accuracy 0.9722 on 360 held-out examples, +0.0222 against version 1 (0.9500)",
            "digits version 2 is served instead of version 1",
        ),
        (
            {**VERDICT, "numbers": {"metric": "accuracy", "value": 0.9722, "examples": 360}},
            {**RELEASE, "version": 1, "previous": None},
            "accuracy 0.9722 on 360 held-out examples, the first model of its name",
            "digits version 1 is served",
        ),
        (
            {"outcome": "unknown", "reasons": ["too few examples"], "numbers": {"value": None}},
            {},
            "",
            "not released, the gate says unknown: too few examples",
        ),
        ({}, {}, "", ""),
    ],
)
def test_the_result_in_words(verdict: Any, release: Any, headline: str, outcome: str) -> None:
    report = Report(snapshot([]), (), verdict, release)
    assert (report.headline, report.outcome) == (headline, outcome)


def test_the_printed_report() -> None:
    console, out = text_console()
    report = Report(
        snapshot([], state="success"),
        (Stage("train", 30.0), Stage(OVERHEAD, 10.0)),
        VERDICT,
        RELEASE,
        {"Airflow": "http://127.0.0.1:8080", "Model": "http://127.0.0.1:8501"},
        Served([np.eye(8)], [Answer("7", 0.99)]),
        ("alias not moved",),
    )
    print_report(report, console)
    shown = out.getvalue()
    assert "d succeeded in 40.0 s" in shown
    assert "digits version 2 is served instead of version 1" in shown
    assert "7 (99%)" in shown
    assert any(line.split() == ["train", "30.0", "s", "75%"] for line in shown.splitlines())
    assert "Airflow: http://127.0.0.1:8080" in shown
    assert "note: alias not moved" in shown
    assert "\x1b" not in shown, "no colours where there is no terminal"
    failed = Report(snapshot([], state="failed"), (Stage(OVERHEAD, 1.0),))
    print_report(failed, console)
    assert "d failed in 1.0 s" in out.getvalue()


class Xcoms:
    """The client's part that a report reads."""

    def __init__(self, values: dict[tuple[str, str], Any]) -> None:
        self.values = values

    def xcom_keys(self, *_: str) -> list[tuple[str, int, str]]:
        return [(name, -1, key) for name, key in self.values]

    def xcom(self, dag_id: str, run_id: str, name: str, key: str) -> Any:
        return self.values[name, key]

    def page(self, dag_id: str, run_id: str) -> str:
        return f"http://airflow/{dag_id}/{run_id}"


def platform_of(tmp_path: Path, values: dict[tuple[str, str], Any]) -> Any:
    return SimpleNamespace(
        airflow=Xcoms(values),
        urls={"model-rest": "http://127.0.0.1:1", "model-grpc": "127.0.0.1:2", "mlflow": "http://mlflow"},
        credentials=("admin", "pw"),
        storage=tmp_path,
        settings=SimpleNamespace(without=()),
    )


def test_a_report_of_what_a_run_left(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "d" / "manual__1" / "tracking"
    job.mkdir(parents=True)
    (job / "run.json").write_text(json.dumps({"url": "http://mlflow/#/experiments/1/runs/abc"}))
    champion = {"name": "digits", "version": 1, "promoted": "2025-12-25", "path": "/models/digits/1"}
    values = {
        ("champion", "return_value"): champion,
        ("gate", "decision"): VERDICT,
        ("release.promote", "return_value"): RELEASE,
        ("x", "job"): "text",
    }
    tasks = [task(name, "success", 1.0, 2.0) for name in ("champion", "gate")]
    tasks.append(task("release.promote", "success", 3.0, 4.0))
    report = make_report(platform_of(tmp_path, values), snapshot(tasks, state="success"))
    assert report.verdict == VERDICT
    assert report.release == RELEASE
    assert report.links["MLflow"] == "http://mlflow/#/experiments/1/runs/abc"
    assert "password pw" in report.links["Airflow"]
    assert "http://127.0.0.1:1/v1/models/digits" in report.links["Model"]
    assert report.served is None, "no such export, no server: the report goes on"
    assert report.notes[0].startswith("the server could not be asked")
    assert report.notes[1] == "alias not moved"
    assert sum(stage.seconds for stage in report.stages) == 100.0
    assert report.training == ""


def test_a_report_says_where_the_time_of_training_went(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "d" / "manual__1"
    for name, value in {
        "generations/0001.json": {"number": 1, "by": "plan", "reason": "", "at": 100.0},
        "times/0001.json": {
            "started": 102.0,
            "imported": 108.0,
            "stepped": 110.0,
            "kept": 130.0,
            "checkpoint": 1.5,
        },
        "outcome.json": {"state": "SUCCEEDED", "at": 130.0},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    report = make_report(platform_of(tmp_path, {}), snapshot([task("hello", "success", 1.0, 2.0)]))
    assert report.training == "queue 2.0 s, start 6.0 s, init 2.0 s, train 18.5 s, checkpoint 1.5 s"
    out = io.StringIO()
    print_report(report, Console(file=out, width=200))
    assert f"the training job: {report.training}" in out.getvalue()


def test_a_report_of_any_pipeline(tmp_path: Path) -> None:
    tasks = [task("hello", "success", 1.0, 2.0)]
    report = make_report(platform_of(tmp_path, {("hello", "return_value"): {"a": 1}}), snapshot(tasks))
    assert (report.headline, report.outcome, report.notes) == ("", "", ())
    assert report.links["MLflow"] == "http://mlflow"
    assert "Model" not in report.links


def test_a_digit_in_half_blocks() -> None:
    picture = np.array([[0, 255, 0], [255, 255, 0], [0, 0, 0], [0, 0, 255]], dtype=np.uint8)
    assert draw(picture, colour=False) == ["▄█ ", "  ▄"]
    assert draw(picture[:3, :, None], colour=False) == ["▄█ ", "   "], "an odd last row is filled up"
    coloured = draw(picture, colour=True)
    assert coloured[0].count("▀") == 3
    assert "38;5;255;48;5;255m" in coloured[0]
    assert coloured[0].endswith("\x1b[0m")
    assert draw(np.zeros((2, 2)), colour=False) == ["  "], "a blank picture is no division by zero"


@pytest.mark.parametrize(
    ("outputs", "answers"),
    [
        ({"probabilities": [[0.1, 0.9], [0.8, 0.2]]}, [("1", 0.9), ("0", 0.8)]),
        ({"logits": [[0.0, 3.0]]}, [("1", 0.9526)]),
        ({"classes": [7, 3]}, [("7", None), ("3", None)]),
        ({"classes": [b"seven"]}, [("seven", None)]),
        ({"mask": np.zeros((1, 2, 2))}, []),
    ],
)
def test_answers(outputs: Any, answers: list[tuple[str, float | None]]) -> None:
    found = read_answers(outputs)
    assert [a.said for a in found] == [said for said, _ in answers]
    for answer, (_, share) in zip(found, answers, strict=True):
        assert answer.confidence == (None if share is None else pytest.approx(share, abs=1e-4))


def test_answers_with_names_and_truths() -> None:
    (answer,) = read_answers({"p": [[0.1, 0.9]]}, labels=["cat"], classes=["cat", "dog"])
    assert answer == Answer("dog", pytest.approx(0.9), "cat")  # type: ignore[arg-type]
    assert answer.caption == "dog (90%), is cat"
    assert Answer("cat", None, "cat").caption == "cat"


def test_a_regressions_answers_are_told_in_words() -> None:
    answers = read_answers({"predictions": [[11.26], [-3.04]]}, labels=[[12.0], [-3.0]])
    assert [answer.caption for answer in answers] == ["11.3, is 12.0", "-3.0"]
    run = DagRun("flights_retrain", "r", "success", 0.0, 0.0, 10.0)
    report = Report(
        Snapshot(run, (), None, 10.0, 10.0),
        (Stage(OVERHEAD, 10.0),),
        {
            "outcome": "pass",
            "reasons": [],
            "numbers": {
                "metric": "mae",
                "value": 11.5,
                "examples": 6751,
                "better": "smaller",
                "champion_value": 11.7,
                "champion_version": 1,
            },
        },
        served=Served([], answers),
    )
    assert report.headline.endswith("-0.2000 against version 1 (11.7000), smaller is better")
    out = io.StringIO()
    print_report(report, Console(file=out, width=100))
    assert "what the server says of held-out examples:\n    11.3, is 12.0\n    -3.0\n" in out.getvalue()


def test_pictures_fill_the_width_and_go_on_below() -> None:
    pictures, answers = [np.eye(8)] * 5, [Answer(str(i)) for i in range(5)]
    rows = side_by_side(pictures, answers, colour=False, width=40).splitlines()
    assert len(rows) == 10
    assert rows[4].split() == ["0", "1", "2"]
    assert rows[9].split() == ["3", "4"]
    assert len(side_by_side(pictures, answers, colour=False, width=5).splitlines()) == 25
