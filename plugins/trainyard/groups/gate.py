"""gate: the branch between a model that is good enough and one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import task
from airflow.sdk.definitions.xcom_arg import PlainXComArg

from trainyard.operators.gate import DECISION, GateOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

    from trainyard.trigger_form import FromForm

__all__ = ["gate"]


@task
def _not_released(decision: dict[str, Any], answered: dict[str, Any] | None = None) -> dict[str, Any]:
    """The end of a run whose model is not released; the run is a success, the model was not good enough."""
    decision = answered or decision
    print(f"not released, the gate says {decision['outcome']}:")
    for reason in decision["reasons"]:
        print(f"  - {reason}")
    print(
        "the champion goes on serving; to release all the same, trigger the run with a reason for an override"
    )
    return decision


def gate(
    evaluation: XComArg,
    *,
    task_id: str = "gate",
    approval: bool | FromForm = False,
    approval_timeout: timedelta = timedelta(hours=24),
    approvers: Sequence[str] = (),
    **fixed: Any,
) -> XComArg:
    """Judge an evaluation: {"outcome", "reasons", "numbers", "override"}, and "approval" where somebody was asked.

    What is put after it runs on a pass only; otherwise the run ends at `not_released`, which says why.
    Thresholds (`min_accuracy` or `max_error`, `max_drop`, `min_examples`) and the `metric` come from the form; those
    given here are fixed. A metric of one's own that is better when smaller is said by `better="smaller"`. Limits of
    slices, of other metrics, and drops judged by their intervals: see serving.release.gate.Thresholds.

    `approval=True` has a person approve what passed, on a page with the comparison; no answer within
    `approval_timeout` is a rejection. `FromForm("approval")` leaves it to the form. `approvers` are the ids of the
    users who may answer; without them everybody may who may edit the run.
    """
    end = "not_released" if task_id == "gate" else f"not_released_{task_id}"
    operator = GateOperator(task_id=task_id, evaluation=evaluation, not_released=end, fixed=fixed)
    decision = PlainXComArg(operator, key=DECISION)
    if approval is False:
        not_released = _not_released.override(task_id=end)(decision)
        operator.not_released = not_released.operator.task_id  # with its group's prefix, if it is in one
        return decision
    from trainyard.operators.approve import (
        ApproveOperator,  # a DAG without approval does not pay for its import
    )

    approve = ApproveOperator(
        task_id="approve" if task_id == "gate" else f"approve_{task_id}",
        decision=decision,
        evaluation=evaluation,
        not_released=end,
        wanted=approval,
        timeout=approval_timeout,
        approvers=approvers,
    )
    # Skipped is whichever of gate and approval did not lead here.
    joined = _not_released.override(task_id=end, trigger_rule="none_failed_min_one_success")
    not_released = joined(decision, approve.output)
    operator.not_released = approve.not_released = not_released.operator.task_id
    return approve.output
