"""EvaluateOperator: the evaluation's step, with a link to its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainyard.evaluation_page import report_url
from trainyard.links import EvaluationReportLink
from trainyard.operators.step import StepOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["EvaluateOperator"]


class EvaluateOperator(StepOperator):
    """Evaluate a trained model in a pod; a StepOperator with a link to the report."""

    operator_extra_links = (EvaluationReportLink(),)

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("module", "trainers.evaluate")
        super().__init__(**kwargs)
        self.report_url = ""

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the step; its result."""
        return self._linked(super().execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Come back from the triggerer; the step's result."""
        return self._linked(super().trigger_reentry(context, event))

    def _linked(self, result: dict[str, Any]) -> dict[str, Any]:
        self.report_url = report_url(result.get("report"))
        return result
