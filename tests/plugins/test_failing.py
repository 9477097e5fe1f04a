"""Failure classes decide retries; errors of both trees become cards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import BaseOperator
from trainyard.failing import RetryByClass, StepFailed, explained, failure_in, failures_before, report

from serving.errors import ServerUnavailable, VerificationFailed
from trainers.job.errors import DataError
from trainers.job.failures import Failure, FailureClass
from trainers.job.policies import RestartPolicy


@pytest.fixture
def operator() -> BaseOperator:
    return BaseOperator(task_id="work")


@pytest.mark.parametrize(
    ("error", "failure_class", "code"),
    [
        (DataError("bad rows", hint="look"), FailureClass.DATA, "data"),
        (VerificationFailed("differs"), FailureClass.USER, "serving.verification_failed"),
        (ServerUnavailable("down"), FailureClass.INFRA, "serving.unavailable"),
        (StepFailed(Failure(FailureClass.OOM, "too big")), FailureClass.OOM, ""),
        (ValueError("not ours"), None, None),
    ],
)
def test_errors_of_ours_have_a_failure(
    error: Exception, failure_class: FailureClass | None, code: str | None
) -> None:
    failure = failure_in(error)
    assert (failure and failure.failure_class, failure and failure.code) == (failure_class, code)


def _failed(context_of: Any, operator: Any, cls: FailureClass, times: int, **options: Any) -> Any:
    context = context_of(operator)
    for _ in range(times):
        error = report(context, Failure(cls, "again"), **options)
    return RetryByClass().evaluate(error, times, 10, context)


@pytest.mark.parametrize(
    ("cls", "times", "action", "delay"),
    [
        (FailureClass.USER, 1, "fail", None),
        (FailureClass.DATA, 1, "fail", None),
        (FailureClass.CONFIG, 1, "fail", None),
        (FailureClass.OOM, 1, "retry", 2),
        (FailureClass.OOM, 2, "fail", None),
        (FailureClass.INFRA, 1, "retry", 2),
        (FailureClass.INFRA, 3, "retry", 8),
        (FailureClass.INFRA, 5, "retry", 32),
        (FailureClass.INFRA, 6, "fail", None),
        (FailureClass.PREEMPTED, 9, "retry", 5),
        (FailureClass.QUOTA, 9, "retry", 60),
    ],
)
def test_the_class_decides(
    context_of: Any, operator: Any, cls: FailureClass, times: int, action: str, delay: int | None
) -> None:
    decision = _failed(context_of, operator, cls, times)
    assert decision.action.value == action, decision
    assert decision.retry_delay == (None if delay is None else timedelta(seconds=delay))


def test_an_operator_may_have_its_own_caps(context_of: Any, operator: Any) -> None:
    operator.restart = RestartPolicy({FailureClass.INFRA: 0})
    assert _failed(context_of, operator, FailureClass.INFRA, 1).action.value == "fail"


def test_a_job_that_is_over_is_not_tried_again(context_of: Any, operator: Any) -> None:
    assert _failed(context_of, operator, FailureClass.INFRA, 1, final=True).action.value == "fail"


def test_errors_of_others_follow_airflows_rules() -> None:
    assert RetryByClass().evaluate(ValueError("x"), 1, 10, None).action.value == "default"


def test_without_a_state_store_the_try_counts() -> None:
    error = StepFailed(Failure(FailureClass.INFRA, "x"))
    assert RetryByClass().evaluate(error, 5, 10, None).action.value == "retry"
    assert RetryByClass().evaluate(error, 6, 10, None).action.value == "fail"


def test_a_cleared_task_counts_from_the_start(context_of: Any, operator: Any) -> None:
    context = context_of(operator)
    report(context, Failure(FailureClass.INFRA, "x"))
    assert failures_before(context) == {FailureClass.INFRA: 1}
    context["ti"].max_tries += 3  # as Airflow does when somebody clears it
    assert failures_before(context) == {}


def test_the_policy_has_no_settings_to_serialize() -> None:
    assert isinstance(RetryByClass.deserialize(RetryByClass().serialize()), RetryByClass)


def test_a_plain_task_shows_the_card(context_of: Any, operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(operator)
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context)

    @explained
    def work(kind: type[Exception]) -> None:
        raise kind("no")

    with pytest.raises(StepFailed) as caught:
        work(DataError)
    assert str(caught.value).splitlines()[0] == "FAILED DATA (data): pipeline / work"
    assert isinstance(caught.value.__cause__, DataError)
    assert context["ti"].xcom["failure"]["class"] == "DATA"
    with pytest.raises(ValueError, match="no"):
        work(ValueError)
