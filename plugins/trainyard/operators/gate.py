"""GateOperator: release, or not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.branch import BaseBranchOperator

from trainers.job.files import read_json, write_json
from trainyard.evaluation_page import report_url
from trainyard.failing import RetryByClass, cards
from trainyard.links import EvaluationReportLink
from trainyard.settings import PipelineSettings
from trainyard.shared_files import bring, job_files
from trainyard.tracking import note_verdict
from trainyard.trigger_form import DEFAULTS

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["DECISION", "VERDICT_FILE", "GateOperator", "evaluation_document", "keep_verdict"]

DECISION = "decision"
"""The XCom that holds the verdict: {"outcome", "reasons", "numbers", "override"}."""

VERDICT_FILE = "gate.json"
"""Where a job's folder holds the verdict, with who judged it when."""

_FROM_FORM = (
    *("min_accuracy", "max_error", "max_drop", "max_drop_relative", "drop_test", "min_examples"),
    *("slice_min", "slice_max", "slice_max_drop", "slice_min_examples"),
)
log = logging.getLogger(__name__)


class GateOperator(BaseBranchOperator):
    """Judge an evaluation and follow one branch: everything downstream on a pass, else only `not_released`.

    Thresholds come from the form unless `fixed` says them. "unknown" (too few examples, a metric that is missing
    or not a number) is never a pass. An override in the form releases all the same, under the name of the user who
    triggered the run; a name in the form is recorded beside it.
    """

    template_fields = ("evaluation",)
    operator_extra_links = (EvaluationReportLink(),)
    ui_color = "#ffe0e0"

    def __init__(
        self, *, evaluation: Any, not_released: str, fixed: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("retry_policy", RetryByClass())
        super().__init__(**kwargs)
        self.evaluation = evaluation
        self.not_released = not_released
        self.fixed = dict(fixed or {})
        self.report_url = ""

    def choose_branch(self, context: Context) -> list[str]:
        """Judge; the ids of the tasks to go on with."""
        if self.evaluation.get("report"):
            self.report_url = report_url(self.evaluation["report"])
        with cards(context):
            verdict = self._judge(context)
        document = verdict.to_json()
        keep_verdict(self.evaluation, document, context)
        context["ti"].xcom_push(key=DECISION, value=document)
        print(verdict.words())
        if not verdict.deployable:
            return [self.not_released]
        return sorted(self.downstream_task_ids - {self.not_released})

    def _judge(self, context: Context) -> Any:
        from serving.release.gate import Thresholds, decide, override

        values = {**DEFAULTS, **context["params"], **self.fixed}
        others = set(Thresholds.__dataclass_fields__) - set(_FROM_FORM) - {"metric", "better"}
        thresholds = Thresholds(
            **{name: values[name] for name in _FROM_FORM},
            **{name: value for name, value in self.fixed.items() if name in others},
            metric=values["metric"],
            better=values.get("better", ""),
        )
        verdict = decide(evaluation_document(self.evaluation), thresholds)
        reason = str(values["override_reason"] or "")
        if not reason.strip():
            return verdict
        user = getattr(context["dag_run"], "triggering_user_name", None)
        named = str(values["override_author"] or "")
        return override(verdict, reason, str(user or ""), on_behalf_of=named, source="airflow")


def evaluation_document(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The whole of evaluation.json, with slices and intervals; what the step handed back where it is not there."""
    path = _inside_storage(evaluation)
    found = None if path is None else read_json(path)
    return dict(found) if isinstance(found, Mapping) else dict(evaluation)


def keep_verdict(evaluation: Mapping[str, Any], verdict: Mapping[str, Any], context: Context) -> None:
    """Write the verdict into the job's folder, and tell MLflow; a release depends on neither."""
    path = _inside_storage(evaluation)
    if path is None:
        return
    document = {
        **verdict,
        "judged": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pipeline": context["ti"].dag_id,
        "run": context["run_id"],
    }
    with job_files(path.parent):
        try:
            write_json(path.parent / VERDICT_FILE, document)
        except OSError as e:
            log.warning("the verdict is not kept in %s: %s", path.parent, e)
        note_verdict(path.parent, verdict)


def _inside_storage(evaluation: Mapping[str, Any]) -> Path | None:
    """evaluation.json, if the evaluation names one below the storage root."""
    named = evaluation.get("evaluation")
    if not isinstance(named, str) or not named:
        return None
    path = Path(named)
    bring(path)
    storage = PipelineSettings.from_environment().storage.resolve()
    return path if path.is_file() and path.resolve().is_relative_to(storage) else None
