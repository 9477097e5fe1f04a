"""GateOperator: release, or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.branch import BaseBranchOperator

from trainyard.failing import RetryByClass, cards
from trainyard.trigger_form import DEFAULTS

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["DECISION", "GateOperator"]

DECISION = "decision"
"""The XCom that holds the verdict: {"outcome", "reasons", "numbers", "override"}."""


class GateOperator(BaseBranchOperator):
    """Judge an evaluation and follow one branch: everything downstream on a pass, else only `not_released`.

    Thresholds come from the form unless `fixed` says them. "unknown" (too few examples, a metric that is missing
    or not a number) is never a pass. An override in the form releases all the same, under its author's name.
    """

    template_fields = ("evaluation",)
    ui_color = "#ffe0e0"

    def __init__(
        self, *, evaluation: Any, not_released: str, fixed: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("retry_policy", RetryByClass())
        super().__init__(**kwargs)
        self.evaluation = evaluation
        self.not_released = not_released
        self.fixed = dict(fixed or {})

    def choose_branch(self, context: Context) -> list[str]:
        """Judge; the ids of the tasks to go on with."""
        with cards(context):
            verdict = self._judge(context)
        context["ti"].xcom_push(key=DECISION, value=verdict.to_json())
        print(verdict.words())
        if not verdict.deployable:
            return [self.not_released]
        return sorted(self.downstream_task_ids - {self.not_released})

    def _judge(self, context: Context) -> Any:
        from serving.release.gate import Thresholds, decide, override

        values = {**DEFAULTS, **context["params"], **self.fixed}
        thresholds = Thresholds(
            **{name: values[name] for name in ("min_accuracy", "max_error", "max_drop", "min_examples")},
            metric=values["metric"],
            better=values.get("better", ""),
        )
        verdict = decide(self.evaluation, thresholds)
        reason = str(values["override_reason"] or "")
        if not reason.strip():
            return verdict
        user = getattr(context["dag_run"], "triggering_user_name", None)
        return override(verdict, reason, str(values["override_author"] or user or ""))
