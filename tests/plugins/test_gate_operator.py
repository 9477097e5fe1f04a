"""The gate's branches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from trainyard import gate
from trainyard.evaluation_page import report_path
from trainyard.failing import StepFailed
from trainyard.trigger_form import DEFAULTS

from trainers.job.files import write_json


def _gate(**fixed: Any) -> Any:
    with DAG("pipeline") as dag:

        @task
        def evaluation() -> None: ...

        @task
        def after(verdict: Any) -> None: ...

        @task
        def beside() -> None: ...

        verdict = gate(evaluation(), **fixed)
        after(verdict)
        verdict >> beside()
    return dag.get_task("gate")


GOOD = {"metrics": {"accuracy": 0.97}, "examples": 360, "champion": None}


def _evaluation(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


@pytest.mark.parametrize(
    ("evaluation", "form", "released", "outcome"),
    [
        (GOOD, {}, True, "pass"),
        (_evaluation(metrics={"accuracy": 0.5}), {}, False, "fail"),
        (_evaluation(metrics={"accuracy": 0.5}), {"min_accuracy": 0.4}, True, "pass"),
        (_evaluation(champion={"version": 3, "metrics": {"accuracy": 0.975}}), {}, True, "pass"),
        (_evaluation(champion={"version": 3, "metrics": {"accuracy": 0.99}}), {}, False, "fail"),
        (
            _evaluation(champion={"version": 3, "metrics": {"accuracy": 0.99}}),
            {"max_drop": 0.1},
            True,
            "pass",
        ),
        (_evaluation(examples=20), {}, False, "unknown"),
        (_evaluation(metrics={}), {}, False, "unknown"),
        (_evaluation(metrics={"accuracy": float("nan")}), {}, False, "unknown"),
        (_evaluation(examples=20), {"override_reason": "a small set is all we have"}, True, "pass"),
    ],
)
def test_only_a_pass_goes_on(
    context_of: Any, evaluation: dict[str, Any], form: dict[str, Any], released: bool, outcome: str
) -> None:
    operator = _gate()
    operator.evaluation = evaluation
    context = context_of(operator, params={**DEFAULTS, **form})
    chosen = operator.choose_branch(context)
    assert chosen == (["after", "beside"] if released else ["not_released"])
    assert context["ti"].xcom["decision"]["outcome"] == outcome


@pytest.mark.parametrize(
    ("mae", "champion", "form", "outcome", "words"),
    [
        (9.5, None, {}, "pass", "mae 9.5000 is within the maximum 12.0000"),
        (12.5, None, {}, "fail", "mae 12.5000 is above the maximum 12.0000"),
        (12.5, None, {"max_error": 13.0}, "pass", "within the maximum 13.0000"),
        (9.5, 9.0, {}, "pass", "mae lies 0.5000 above champion 3 (9.0000), at most 0.5000 above is allowed"),
        (9.6, 9.0, {}, "fail", "mae lies 0.6000 above champion 3 (9.0000)"),
        (9.0, 11.0, {}, "pass", "mae lies 2.0000 below champion 3 (11.0000)"),
        (float("nan"), None, {}, "unknown", "metric mae is missing"),
    ],
)
def test_an_error_is_better_when_smaller(
    context_of: Any, mae: float, champion: float | None, form: dict[str, Any], outcome: str, words: str
) -> None:
    operator = _gate(metric="mae")
    other = None if champion is None else {"version": 3, "metrics": {"mae": champion}}
    operator.evaluation = {"metrics": {"mae": mae, "accuracy": 0.0}, "examples": 500, "champion": other}
    context = context_of(operator, params={**DEFAULTS, "max_error": 12.0, "max_drop": 0.5, **form})
    operator.choose_branch(context)
    decision = context["ti"].xcom["decision"]
    assert decision["outcome"] == outcome
    assert words in "; ".join(decision["reasons"])
    assert decision["numbers"]["better"] == "smaller"


def test_a_metric_of_ones_own_says_its_direction(context_of: Any) -> None:
    operator = _gate(metric="pinball", better="smaller", max_error=2.0, max_drop=None)
    operator.evaluation = {"metrics": {"pinball": 2.5}, "examples": 500, "champion": None}
    assert operator.choose_branch(context_of(operator, params=DEFAULTS)) == ["not_released"]
    operator.evaluation["metrics"]["pinball"] = 1.5
    assert operator.choose_branch(context_of(operator, params=DEFAULTS)) == ["after", "beside"]
    operator.fixed["better"] = "faster"
    with pytest.raises(StepFailed, match="better must be"):
        operator.choose_branch(context_of(operator, params=DEFAULTS))


@pytest.mark.parametrize("named", ["", "ada", "grace"])
def test_an_overrides_author_is_who_triggered_the_run(context_of: Any, named: str) -> None:
    operator = _gate()
    operator.evaluation = _evaluation(metrics={"accuracy": 0.1})
    form = {**DEFAULTS, "override_reason": "for the demonstration", "override_author": named}
    context = context_of(operator, params=form)
    operator.choose_branch(context)
    assert context["ti"].xcom["decision"]["override"] == {
        "outcome_before": "fail",
        "reason": "for the demonstration",
        "author": "ada",
        "on_behalf_of": "grace" if named == "grace" else "",
        "source": "airflow",
    }
    context["dag_run"].triggering_user_name = None  # a schedule's
    if named:
        operator.choose_branch(context)
        found = context["ti"].xcom["decision"]["override"]
        assert (found["author"], found["source"]) == (named, "form")
    else:
        with pytest.raises(StepFailed, match="must have an author"):
            operator.choose_branch(context)


def test_thresholds_in_the_dag_file_overrule_the_form(context_of: Any) -> None:
    operator = _gate(min_accuracy=0.99)
    operator.evaluation = GOOD
    assert operator.choose_branch(context_of(operator, params=DEFAULTS)) == ["not_released"]


def _evaluated(pipelines: Path, **changes: Any) -> dict[str, Any]:
    """A job whose evaluation.json says more than its step hands back."""
    folder = pipelines / "jobs" / "pipeline" / "run-1"
    folder.mkdir(parents=True)
    rows = [
        {
            "slice": "c=UA",
            "of": "c",
            "examples": 90,
            "enough_examples": True,
            "intervals": {},
            "champion": None,
        }
    ]
    rows[0]["metrics"] = {"accuracy": 0.6}
    write_json(folder / "evaluation.json", {**GOOD, "intervals": {}, "slices": rows, **changes})
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "report.html").write_text("<p>report</p>")
    report = str(folder / "evaluation" / "report.html")
    return {**GOOD, "evaluation": str(folder / "evaluation.json"), "report": report}


def test_slices_are_read_from_the_jobs_folder_and_the_verdict_is_kept_there(
    context_of: Any, pipelines: Path
) -> None:
    operator = _gate()
    operator.evaluation = _evaluated(pipelines)
    context = context_of(operator, params={**DEFAULTS, "slice_min": 0.7})
    assert operator.choose_branch(context) == ["not_released"]
    decision = context["ti"].xcom["decision"]
    assert "in slice c=UA accuracy 0.6000 is below the minimum 0.7000" in decision["reasons"]
    kept = json.loads((pipelines / "jobs" / "pipeline" / "run-1" / "gate.json").read_text())
    assert kept["outcome"] == "fail"
    assert kept["pipeline"] == "pipeline"
    assert kept["reasons"] == decision["reasons"]
    assert operator.report_url.endswith("/trainyard/jobs/pipeline/run-1/evaluation/report.html")
    assert operator.choose_branch(context_of(operator, params=DEFAULTS)) == ["after", "beside"]


def test_limits_of_the_dag_file_alone(context_of: Any, pipelines: Path) -> None:
    operator = _gate(slices={"c=UA": {"min": 0.9}}, also={"accuracy_of_night": {"min": 0.1}})
    operator.evaluation = _evaluated(pipelines)
    context = context_of(operator, params=DEFAULTS)
    operator.choose_branch(context)
    assert context["ti"].xcom["decision"]["outcome"] == "unknown"
    operator.fixed["also"] = {}
    operator.choose_branch(context)
    assert context["ti"].xcom["decision"]["outcome"] == "fail"


def test_nothing_outside_the_storage_is_read_or_written(
    context_of: Any, pipelines: Path, tmp_path: Path
) -> None:
    write_json(tmp_path / "evaluation.json", {**GOOD, "metrics": {"accuracy": 0.1}})
    link = pipelines / "jobs" / "link"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path)
    operator = _gate()
    for path in (tmp_path / "evaluation.json", link / "evaluation.json"):
        operator.evaluation = {**GOOD, "evaluation": str(path)}
        assert operator.choose_branch(context_of(operator, params=DEFAULTS)) == ["after", "beside"]
    assert not (tmp_path / "gate.json").exists()


@pytest.mark.parametrize(
    ("pipeline", "run"),
    [("..", "run-1"), ("pipeline", ".."), ("pipeline/x", "y"), ("", "run-1"), ("pipeline", "none")],
)
def test_only_reports_are_served(pipelines: Path, pipeline: str, run: str) -> None:
    _evaluated(pipelines)
    good = report_path(pipelines, "pipeline", "run-1")
    assert good is not None
    assert good.is_file()
    assert report_path(pipelines, pipeline, run) is None
    other = pipelines / "jobs" / "pipeline" / "run-2" / "evaluation"
    other.mkdir(parents=True)
    (pipelines / "secret").write_text("x")
    (other / "report.html").symlink_to(pipelines / "secret")
    assert report_path(pipelines, "pipeline", "run-2") is None


def test_a_threshold_that_can_not_be_is_a_card(context_of: Any) -> None:
    operator = _gate(min_examples=0)
    operator.evaluation = GOOD
    context = context_of(operator, params=DEFAULTS)
    with pytest.raises(StepFailed, match="min_examples must be a whole number"):
        operator.choose_branch(context)
