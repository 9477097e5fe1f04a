"""The form's fields refuse what can't be, as Airflow's REST API would."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError
from trainyard import FromForm, form
from trainyard.failing import StepFailed
from trainyard.trigger_form import DEFAULTS, Under, check_form, training_args_of


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "magic"),
        ("workers", -1),
        ("workers", 65),
        ("workers", "two"),
        ("workers", 1.5),
        ("ps", -1),
        ("sync", "yes"),
        ("evaluator", 1),
        ("backup_workers", -1),
        ("steps", 0),
        ("batch_size", 0),
        ("learning_rate", 0),
        ("learning_rate", "fast"),
        ("learning_rate_schedule", "cosine"),
        ("gradient_clip_norm", 0),
        ("ema_momentum", 1),
        ("mixed_precision", "float8"),
        ("seed", -1),
        ("min_accuracy", 1.1),
        ("max_drop", -0.1),
        ("min_examples", 0),
        ("max_drop_relative", -0.1),
        ("drop_test", "lenient"),
        ("slices", "carrier"),
        ("slices", [7]),
        ("slices", ["a"] * 21),
        ("slice_min", "high"),
        ("slice_max_drop", -1),
        ("slice_min_examples", 0),
        ("override_reason", "x" * 501),
        ("override_author", 7),
    ],
)
def test_a_wrong_value_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    params = ParamsDict(form())
    with pytest.raises(ParamValidationError, match=field):
        params[field] = value


OF_TASKS = ("approval", "canary_share", "canary_minutes", "canary_min_requests")
OF_ERRORS, OF_ACCURACY = (
    ("metric", "max_error", "slice_max", *OF_TASKS),
    ("min_accuracy", "slice_min", *OF_TASKS),
)


def test_approval_is_asked_for_where_there_is_a_task_for_it() -> None:
    assert "approval" not in form()
    assert form(approval=True)["approval"].resolve() is True
    assert FromForm("approval").resolve({"params": {}}) is False  # type: ignore[typeddict-item]


def test_the_defaults_are_valid_and_every_field_is_described() -> None:
    fields = form(workers=3)
    accuracy = {name: value for name, value in DEFAULTS.items() if name not in OF_ERRORS}
    assert {name: param.resolve() for name, param in fields.items()} == {**accuracy, "workers": 3}
    for param in fields.values():
        assert param.schema["title"]
        assert param.schema["section"] in (
            "Replicas",
            "Training",
            "Release gate",
            "Release",
            "Override the gate",
        )
    assert set(fields["strategy"].schema["values_display"]) == set(fields["strategy"].schema["enum"])


def test_a_regressions_gate_has_fields_of_its_own() -> None:
    fields = form(metric="mae", max_error=12.5, max_drop=2.0)
    values = {name: param.resolve() for name, param in fields.items()}
    accuracy = {name: value for name, value in DEFAULTS.items() if name not in OF_ACCURACY}
    assert values == {**accuracy, "metric": "mae", "max_error": 12.5, "max_drop": 2.0}
    gate = [name for name, param in fields.items() if param.schema["section"] == "Release gate"]
    assert gate[:4] == ["metric", "max_error", "max_drop", "min_examples"]
    assert "slice_max" in gate
    params = ParamsDict(fields)
    for field, value in (("metric", "accuracy"), ("max_error", -1), ("max_drop", -0.1)):
        with pytest.raises(ParamValidationError, match=field):
            params[field] = value


def test_a_field_that_is_not_there_is_a_mistake_of_the_dag_file() -> None:
    with pytest.raises(TypeError, match="wrkers"):
        form(wrkers=3)
    with pytest.raises(TypeError, match="wrkers"):
        FromForm("wrkers")


def test_values_come_from_the_run_with_their_type(context_of: Any) -> None:
    assert FromForm("min_examples").resolve({"params": {"min_examples": 7}}) == 7  # type: ignore[typeddict-item]
    assert FromForm("min_examples").resolve({"params": {}}) == DEFAULTS["min_examples"]  # type: ignore[typeddict-item]
    assert Under("/jobs/1", "export").resolve({}) == "/jobs/1/export"  # type: ignore[typeddict-item]
    assert list(FromForm("steps").iter_references()) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, None),
        ({"strategy": "local", "workers": 0, "ps": 0, "backup_workers": 5}, None),
        ({"strategy": "multi_worker", "ps": 0}, None),
        ({"workers": 0}, "workers must be 1 or more"),
        ({"ps": 0}, "ps must be 1 or more"),
        ({"sync": True, "backup_workers": 2}, "strategy.backup_workers must be below"),
        ({"learning_rate_schedule": {"name": "cosine", "warmup_steps": 9}, "ema_momentum": 0.9}, None),
        (
            {"learning_rate_schedule": {"name": "linear"}},
            "learning_rate_schedule.name must be one of constant",
        ),
    ],
)
def test_fields_that_do_not_agree_are_refused_by_the_first_task(
    context_of: Any, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str | None
) -> None:
    with DAG("pipeline") as dag:
        check_form()
    task = dag.get_task("check_form")
    context = context_of(task, params={**DEFAULTS, **values})
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context)
    if words is None:
        task.python_callable(**context)
        return
    with pytest.raises(StepFailed, match=words):
        task.python_callable(**context)
    assert context["ti"].xcom["failure"]["class"] == "CONFIG"


def test_fields_that_are_empty_are_no_arguments_of_the_job() -> None:
    plain = {"steps": 400, "batch_size": 64, "learning_rate": 0.001, "seed": 1}
    assert training_args_of(DEFAULTS) == plain
    more = {"gradient_clip_norm": 1.5, "mixed_precision": "bfloat16", "ema_momentum": 0.99}
    assert training_args_of({**DEFAULTS, **more}) == {**plain, **more}


def test_the_form_of_a_command_has_what_a_command_may_need(
    context_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = form(strategy="custom", workers=3, keep_versions=2)
    assert fields["strategy"].schema["enum"] == ["custom"]
    assert fields["workers"].resolve() == 3
    names = {"strategy", "workers", "steps", "batch_size", "learning_rate", "seed"}
    assert set(fields) == {*names, "keep_versions"}
    assert set(form(strategy="custom", ps=2)) == {*names, "ps"}
    assert "custom" not in form()["strategy"].schema["enum"]
    with DAG("pipeline") as dag:
        check_form()
    task = dag.get_task("check_form")
    params = {name: param.resolve() for name, param in fields.items()} | {"workers": 0}
    context = context_of(task, params=params)
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context)
    task.python_callable(**context)
