"""MonitorOperator: compares logged requests with training data, and announces drift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.assets import drift_asset
from trainyard.links import DriftReportLink
from trainyard.monitor_page import drift_report_url
from trainyard.operators.step import StepOperator
from trainyard.settings import PipelineSettings

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["MonitorOperator"]

_EXTRA = ("name", "version", "verdict", "drifted", "rows", "window", "report")


class MonitorOperator(StepOperator):
    """`trainers.monitor` in a pod; the asset `drift/NAME` has an event when it found drift, and only then.

    The measures go to MLflow, run `monitoring NAME VERSION` of the experiment NAME, where there is one; that it
    does not answer is a warning.
    """

    operator_extra_links = (DriftReportLink(),)

    def __init__(self, *, model: str, **kwargs: Any) -> None:
        kwargs.setdefault("module", "trainers.monitor")
        kwargs["outlets"] = [*kwargs.get("outlets", ()), drift_asset(model)]
        super().__init__(**kwargs)
        self.model = model
        self.report_url = ""

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the step; its result."""
        return self._told(context, super().execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Come back from the triggerer; the step's result."""
        return self._told(context, super().trigger_reentry(context, event))

    def _told(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        words = f"{self.model}: {result.get('verdict')}"
        print(f"{words}, {result['why']}" if result.get("why") else words)
        if result.get("window"):
            self.report_url = drift_report_url(self.model, result["version"], result["window"])
            if result.get("new_files"):
                _log_measures(PipelineSettings.from_environment().mlflow, self.model, result)
        if not result.get("alarm"):
            # Airflow makes an event of each outlet that a task has when it ends.
            self.outlets = []
            return result
        for asset in self.outlets:
            context["outlet_events"][asset].extra = {k: result[k] for k in _EXTRA if k in result}
        return result


def _log_measures(tracking_uri: str, name: str, result: Mapping[str, Any]) -> None:
    from trainers.job.files import read_json
    from trainyard.registered import log_metrics

    drift = read_json(Path(result["report"]).with_name("drift.json")) or {}
    measures = [m for m in drift.get("measures", ()) if m["value"] is not None]
    # MLflow takes no colons in a metric's name.
    metrics = {f"drift/{m['feature']}/{m['measure']}".replace(":", ""): m["value"] for m in measures}
    log_metrics(
        tracking_uri,
        name,
        f"monitoring {name} {result['version']}",
        {**metrics, "drift/rows": result["rows"]},
    )
