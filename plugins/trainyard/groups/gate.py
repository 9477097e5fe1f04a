"""gate: the branch between a model that is good enough and one that is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import task
from airflow.sdk.definitions.xcom_arg import PlainXComArg

from trainyard.operators.gate import DECISION, GateOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["gate"]


@task
def _not_released(decision: dict[str, Any]) -> dict[str, Any]:
    """The end of a run whose model is not released; the run is a success, the model was not good enough."""
    print(f"not released, the gate says {decision['outcome']}:")
    for reason in decision["reasons"]:
        print(f"  - {reason}")
    print(
        "the champion goes on serving; to release all the same, trigger the run with a reason for an override"
    )
    return decision


def gate(evaluation: XComArg, *, task_id: str = "gate", **fixed: Any) -> XComArg:
    """Judge an evaluation: {"outcome", "reasons", "numbers", "override"}.

    What is put after it runs on a pass only; otherwise the run ends at `not_released`, which says why.
    Thresholds (`min_accuracy` or `max_error`, `max_drop`, `min_examples`) and the `metric` come from the form; those
    given here are fixed. A metric of one's own that is better when smaller is said by `better="smaller"`.
    """
    end = "not_released" if task_id == "gate" else f"not_released_{task_id}"
    operator = GateOperator(task_id=task_id, evaluation=evaluation, not_released=end, fixed=fixed)
    decision = PlainXComArg(operator, key=DECISION)
    not_released = _not_released.override(task_id=end)(decision)
    operator.not_released = not_released.operator.task_id  # with its group's prefix, if it is in one
    return decision
