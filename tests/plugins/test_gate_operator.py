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
