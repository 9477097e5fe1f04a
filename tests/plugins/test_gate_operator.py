"""The gate's branches."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, task
from trainyard import gate
from trainyard.failing import StepFailed
from trainyard.trigger_form import DEFAULTS


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


@pytest.mark.parametrize(("named", "author"), [("", "ada"), ("grace", "grace")])
def test_an_override_has_an_author(context_of: Any, named: str, author: str) -> None:
    operator = _gate()
    operator.evaluation = _evaluation(metrics={"accuracy": 0.1})
    form = {**DEFAULTS, "override_reason": "for the demonstration", "override_author": named}
    context = context_of(operator, params=form)
    operator.choose_branch(context)
    assert context["ti"].xcom["decision"]["override"] == {
        "outcome_before": "fail",
        "reason": "for the demonstration",
        "author": author,
    }


def test_thresholds_in_the_dag_file_overrule_the_form(context_of: Any) -> None:
    operator = _gate(min_accuracy=0.99)
    operator.evaluation = GOOD
    assert operator.choose_branch(context_of(operator, params=DEFAULTS)) == ["not_released"]


def test_a_threshold_that_can_not_be_is_a_card(context_of: Any) -> None:
    operator = _gate(min_examples=0)
    operator.evaluation = GOOD
    context = context_of(operator, params=DEFAULTS)
    with pytest.raises(StepFailed, match="min_examples must be a whole number"):
        operator.choose_branch(context)
