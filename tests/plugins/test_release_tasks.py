"""The light tasks of evaluation and release: what they hand to the serving room, and how its errors show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from trainyard import evaluate, gate, release
from trainyard.failing import StepFailed
from trainyard.operators.pod import PodOperator
from trainyard.operators.release import RegisterOperator, registry_alias
from trainyard.settings import PipelineSettings

from trainers.job.files import write_json

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
DECISION = {"outcome": "pass", "reasons": ["accuracy 0.97 reaches 0.9", "no champion"], "numbers": {}}
PUBLISHED = {"name": "digits", "version": 4, "mlflow_version": "4"}


@pytest.fixture
def run(pipelines: Path, context_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a task of a pipeline by its id, with these arguments in place of other tasks' results."""
    with DAG("pipeline") as dag:

        @task(multiple_outputs=True)
        def trained() -> None: ...

        model = trained()
        evaluation = evaluate(model, "/data/manifest.json", name="digits", min_examples=5)
        release(model, "/data/manifest.json", evaluation, gate(evaluation), name="digits")

    def call(task_id: str, *args: Any, **attributes: Any) -> Any:
        operator = dag.get_task(task_id)
        context = context_of(operator)
        monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context)
        for name, value in attributes.items():
            monkeypatch.setattr(operator, name, value)
        if hasattr(operator, "python_callable"):
            return operator.python_callable(*args)
        return operator.execute(context)

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What was called of serving.release.steps; nothing is done."""
    seen: list[Call] = []
    answers = {
        "publish_step": {**PUBLISHED, "path": "/x", "bytes": 1},
        "deploy_step": {},
        "verify_step": {},
        "promote_step": {"version": 4, "previous": 3},
    }
    for name, answer in answers.items():

        def step(*args: Any, _name: str = name, _answer: Any = answer, **kwargs: Any) -> Any:
            seen.append((_name, args, kwargs))
            return _answer

        monkeypatch.setattr(f"serving.release.steps.{name}", step)
    return seen


def test_before_the_first_release_there_is_no_champion(run: Any) -> None:
    assert run("champion", "digits") is None


def write_json_parents(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True)
    write_json(path, value)


def test_tasks_say_where_and_what(run: Any, calls: list[Call], pipelines: Path) -> None:
    servers, config = ("127.0.0.1:1",), str(pipelines / "serving" / "models.config")
    run("release.publish", "digits", {"export": "/job/export"}, {"registered": True, "model_version": 4})
    run("release.deploy", PUBLISHED, 120.0)
    run("release.verify", PUBLISHED)
    run("release.promote", release=PUBLISHED, decision=DECISION)
    assert calls[0] == ("publish_step", (pipelines, "digits", "/job/export", 4), {})
    assert calls[1] == ("deploy_step", (pipelines, "digits", 4, servers, config, 120.0), {"alias": None})
    assert calls[2] == ("verify_step", (pipelines, "digits", 4, servers, config), {})
    name, args, kwargs = calls[3]
    assert (name, args) == ("promote_step", (pipelines, "digits", 4, servers, config))
    assert kwargs["why"] == "accuracy 0.97 reaches 0.9; no champion"
    assert kwargs["by"].startswith("ada, pipeline ")
    assert (kwargs["gate"], kwargs["mlflow_version"]) == (DECISION, "4")


def test_without_a_registry_a_release_has_no_version_of_it(run: Any, calls: list[Call]) -> None:
    run("release.publish", "digits", {"export": "/job/export"}, {"registered": False, "warning": "down"})
    assert calls[0][1][-1] is None


def test_errors_of_serving_are_cards(run: Any, pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepFailed, match="FAILED DATA"):
        run("release.publish", "digits", {"export": str(pipelines / "no-export")}, {})
    with pytest.raises(StepFailed, match="FAILED CONFIG"):
        run("release.promote", release=PUBLISHED, decision={**DECISION, "outcome": "fail"})
    monkeypatch.delenv("TRAINYARD_MODEL_SERVER")
    with pytest.raises(StepFailed, match="TRAINYARD_MODEL_SERVER is not set"):
        run("release.verify", PUBLISHED)


def test_links_of_a_release(
    run: Any, calls: list[Call], pipelines: Path, monkeypatch: pytest.MonkeyPatch, context_of: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    job = pipelines / "job"
    write_json_parents(job / "tracking" / "run.json", {"url": "http://mlflow/#/runs/1"})
    result = {"registered": True, "model_version": 4}
    monkeypatch.setattr(PodOperator, "execute", lambda self, context: result)
    monkeypatch.setattr(PodOperator, "trigger_reentry", lambda self, context, event: result)
    for again in (False, True):
        with DAG("pipeline"):
            register = RegisterOperator(
                task_id="register", module="m", spec={"job": str(job), "name": "digits"}
            )
        context = context_of(register)
        said = register.trigger_reentry(context, {}) if again else register.execute(context)
        assert said == result
        assert register.mlflow_run_url == "http://mlflow/#/runs/1"
        assert register.model_url == "http://mlflow/#/models/digits/versions/4"
    assert registry_alias(PipelineSettings.from_environment()) is not None


def test_not_released_says_why(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    decision = {"outcome": "unknown", "reasons": ["20 examples are too few"]}
    assert run("not_released", decision) == decision
    said = capsys.readouterr().out
    assert "the gate says unknown" in said
    assert "20 examples are too few" in said
