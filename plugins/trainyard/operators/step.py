"""StepOperator: one step of a pipeline in a pod of its own, `python -m MODULE --spec JSON`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainyard.operators.pod import PodOperator
from trainyard.settings import PipelineSettings
from trainyard.shared_files import bring, give

if TYPE_CHECKING:
    from airflow.sdk import Context
    from kubernetes.client import V1Pod

__all__ = ["StepOperator"]


class StepOperator(PodOperator):
    """Run a step's module in a pod and return its result.

    `module` is one that ends in `trainers.job.termination.run_step`; `spec` is what it is told: JSON values,
    results of other tasks, templates, and "storage://..." for places under the storage root. The result, a
    small dict, is the task's XCom; each of its values is one too, so `step["manifest"]` works.

    Example:
        StepOperator(task_id="count", module="my_steps.count", spec={"manifest": records["manifest"]}).output
    """

    template_fields = (*PodOperator.template_fields, "spec")
    template_fields_renderers = {**PodOperator.template_fields_renderers, "spec": "json"}  # noqa: RUF012
    ui_color = "#e4f0ff"
    component = "step"

    def __init__(self, *, module: str, spec: Mapping[str, Any], **kwargs: Any) -> None:
        kwargs.setdefault("multiple_outputs", True)
        super().__init__(**kwargs)
        self.module = module
        self.spec = spec

    def build_pod_request_obj(self, context: Context | None = None, *, dry_run: bool = False) -> V1Pod:
        """The pod that runs the step."""
        settings = PipelineSettings.from_environment()
        spec = settings.resolve(self.spec)
        if settings.store:
            from trainers.storage.inputs import check_step

            check_step(self.module, spec)
            give(spec)
        self.cmds = ["python", "-m", self.module]
        self.arguments = ["--spec", json.dumps(spec, default=_json_value)]
        return super().build_pod_request_obj(context, dry_run=dry_run)

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the step; its result, {} when it left none."""
        return self._placed(super().execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Come back from the triggerer; the step's result."""
        return self._placed(super().trigger_reentry(context, event))

    def _placed(self, result: dict[str, Any] | None) -> dict[str, Any]:
        """The result with paths of this machine, and the pages that it names here for people to look at."""
        placed: dict[str, Any] = PipelineSettings.from_environment().resolve(result or {})
        bring(placed.get("report"), placed.get("evaluation"))
        return placed


def _json_value(value: Any) -> Any:
    # An XCom may come as one of Airflow's lazy sequences.
    if hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"a step's spec must hold JSON values, got {type(value).__name__}")
