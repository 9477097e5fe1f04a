"""The tasks around a canary: what the sensor asks for, what it makes of the answer, and what prune asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError
from trainyard import Canary, evaluate, form, gate, release
from trainyard.failing import StepFailed
from trainyard.operators.canary import CanarySensor
from trainyard.operators.release import registry_aliases
from trainyard.settings import PipelineSettings

PUBLISHED = {"name": "digits", "version": 4, "mlflow_version": "4"}
ANSWER = {"outcome": "waiting", "decision": "wait", "reasons": ["5 requests"], "numbers": {}, "started": 1.0}


@pytest.fixture
def dag() -> DAG:
    with DAG("pipeline") as dag:

        @task(multiple_outputs=True)
        def trained() -> None: ...

        model = trained()
        evaluation = evaluate(model, "/data/manifest.json", name="digits", min_examples=5)
        canary = Canary(share=0.2, duration_s=300)
        release(model, "/data/m.json", evaluation, gate(evaluation), name="digits", canary=canary, keep=3)
    return dag


@pytest.fixture
def look(dag: DAG, pipelines: Path, context_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the sensor look once; what `canary_step` was given, and what the sensor says."""

    def look(answer: dict[str, Any], **params: Any) -> tuple[list[Any], Any]:
        seen: list[Any] = []

        def step(*args: Any, **kwargs: Any) -> dict[str, Any]:
            seen.extend([args, kwargs])
            return {**ANSWER, **answer}

        monkeypatch.setattr("serving.release.steps.canary_step", step)
        sensor = dag.get_task("release.canary")
        monkeypatch.setattr(sensor, "release", PUBLISHED)
        context = context_of(sensor, params=params)
        monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context)
        return seen, sensor.poke(context)

    return look


def test_a_canary_stands_between_verify_and_promote_and_holds_no_slot(dag: DAG) -> None:
    sensor = dag.get_task("release.canary")
    assert isinstance(sensor, CanarySensor)
    assert (sensor.mode, sensor.poke_interval) == ("reschedule", 30.0)
    assert sensor.upstream_task_ids == {"release.publish", "release.verify"}
    assert dag.get_task("release.promote").upstream_task_ids >= {"release.canary", "gate"}
    assert "release.verify" not in dag.get_task("release.promote").upstream_task_ids


def test_it_waits_and_then_hands_the_verdict_to_promote(
    look: Any, pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_MODEL_SERVER_REST", "http://a:1, dns:///b:2")
    (args, kwargs), said = look({})
    assert not said.is_done
    assert args[:3] == (pipelines, "digits", 4)
    assert args[-1] == Canary(share=0.2, duration_s=300)
    assert kwargs["metrics"] == ("http://a:1", "dns:///b:2")
    assert kwargs["canary_metrics"] == ()
    _, said = look({"outcome": "pass", "decision": "promote"})
    assert said.is_done
    assert said.xcom_value["outcome"] == "pass"


def test_the_form_goes_before_what_the_pipeline_says(look: Any) -> None:
    (args, _), _ = look({}, canary_share=0.5, canary_minutes=2, canary_min_requests=7)
    assert args[-1] == Canary(share=0.5, duration_s=120, min_requests=7)
    seen, said = look({}, canary_share=0)
    assert seen == []
    assert said.is_done


def test_one_that_is_taken_back_fails_for_good_with_a_card(look: Any) -> None:
    with pytest.raises(StepFailed, match="FAILED USER") as caught:
        look({"outcome": "fail", "decision": "rollback", "reasons": ["5 of 5 requests failed"]})
    assert "version 4 of digits was taken back" in str(caught.value)
    assert "5 of 5 requests failed" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("canary_share", 1), ("canary_share", -0.1), ("canary_minutes", 0), ("canary_min_requests", 0)],
)
def test_a_wrong_value_of_the_form_is_refused(field: str, value: Any) -> None:
    params = ParamsDict(form(canary_share=0.1))
    with pytest.raises(ParamValidationError, match=field):
        params[field] = value
    assert "canary_share" not in form()
    params["keep_versions"] = 1
    with pytest.raises(ParamValidationError, match="keep_versions"):
        params["keep_versions"] = 0


def test_prune_asks_servers_config_and_registry(
    dag: DAG, pipelines: Path, context_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    seen: list[Any] = []

    def step(*args: Any, **kwargs: Any) -> dict[str, Any]:
        seen.append((args, kwargs))
        return {"name": "digits", "removed": [1], "held": {"2": ["label stable"]}, "warnings": ["w"]}

    monkeypatch.setattr("serving.release.steps.prune_step", step)
    monkeypatch.setenv("TRAINYARD_MODEL_STORE", f"file://{pipelines}/bucket")
    config = pipelines / "serving" / "models.config"
    config.parent.mkdir()
    config.write_text("model_config_list {}")
    operator = dag.get_task("release.prune")
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context_of(operator))
    assert operator.python_callable("digits", 3)["removed"] == [1]
    ((args, kwargs),) = seen
    assert args == (pipelines, "digits", 3, str(config))
    assert kwargs == {"servers": ("127.0.0.1:1",), "aliases": None}
    assert (pipelines / "bucket" / "models.config").read_text() == "model_config_list {}"
    assert "warning: w" in capsys.readouterr().out


def test_a_registry_that_does_not_answer_is_an_error_and_no_empty_list(
    pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    aliases = registry_aliases(PipelineSettings.from_environment())
    with pytest.raises(OSError, match="does not say which aliases"):
        aliases("digits")
    monkeypatch.setattr(
        "trainyard.registered._call",
        lambda *a, **k: {"registered_model": {"aliases": [{"alias": "champion", "version": 3}]}},
    )
    assert aliases("digits") == {"champion": "3"}
