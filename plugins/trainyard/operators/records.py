"""Operators of `prepare`: a step of trainers.records, and the plan whose slices are mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.assets import announce, records_asset
from trainyard.links import RecordsReportLink
from trainyard.operators.step import StepOperator
from trainyard.records_page import REPORT, report_url
from trainyard.shared_files import bring

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["PLAN_KEY", "RecordsOperator", "RecordsPlanOperator", "ScorePlanOperator"]

PLAN_KEY = "plan"
"""The XCom that holds the path of a plan of slices."""

_MODULE = "trainers.records"


class RecordsOperator(StepOperator):
    """A step of `trainers.records` in a pod.

    `announces` names the dataset whose asset gets an event when the step has published something new. `part` is
    what a mapped task is called by in the grid.
    """

    template_fields = (*StepOperator.template_fields, "part")
    operator_extra_links = (RecordsReportLink(),)

    def __init__(self, *, announces: str = "", part: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("module", _MODULE)
        if announces:
            kwargs["outlets"] = [*kwargs.get("outlets", ()), records_asset(announces)]
        super().__init__(**kwargs)
        self.part = part
        self.report_url = ""

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the step; its result."""
        return self._published(context, super().execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Come back from the triggerer; the step's result."""
        return self._published(context, super().trigger_reentry(context, event))

    def _published(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        if "manifest" not in result:
            return result
        newest = result.get("newest") or {}
        for manifest in filter(None, (result["manifest"], newest.get("manifest"))):
            bring(manifest, Path(manifest).with_name(REPORT))
        self.report_url = next(
            filter(None, map(report_url, (result["manifest"], newest.get("manifest")))), ""
        )
        announce(self, context, result)
        return result


class RecordsPlanOperator(StepOperator):
    """Plan a dataset in slices; a small dict a slice, for `RecordsOperator.partial(...).expand_kwargs`.

    Its result is [] when the dataset is there already. The plan's path is in XCom under `PLAN_KEY`.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("module", _MODULE)
        super().__init__(multiple_outputs=False, **kwargs)

    def execute(self, context: Context) -> list[dict[str, Any]]:  # type: ignore[override]
        """Run the step; the slices."""
        return self._slices(context, super().execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> list[dict[str, Any]]:  # type: ignore[override]
        """Come back from the triggerer; the slices."""
        return self._slices(context, super().trigger_reentry(context, event))

    def _slices(self, context: Context, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        path, count = str(result["plan"]), int(result["slices"])
        context["ti"].xcom_push(key=PLAN_KEY, value=path)
        titles = _titles(path) if count else []
        return [
            {
                "spec": self._slice(path, index, count),
                "part": titles[index] if index < len(titles) else str(index),
            }
            for index in range(count)
        ]

    def _slice(self, path: str, index: int, count: int) -> dict[str, Any]:
        return {"step": "encode", "plan": path, "slice": index}


class ScorePlanOperator(RecordsPlanOperator):
    """Plan a scoring in slices; the same for `trainers.score`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(module="trainers.score", **kwargs)

    def _slice(self, path: str, index: int, count: int) -> dict[str, Any]:
        return {"step": "score", "plan": path, "slice": index, "slices": count}


def _titles(path: str) -> list[str]:
    """What each slice reads, from the plan: a termination message would not hold hundreds of them."""
    from trainers.job.files import read_json

    return list((read_json(Path(path)) or {}).get("titles", ()))
