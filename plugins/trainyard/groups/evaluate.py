"""evaluate: a trained model on held-out records, beside the champion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import task

from trainers.job.spec import Resources
from trainyard.failing import RetryByClass, explained
from trainyard.operators.step import StepOperator
from trainyard.settings import PipelineSettings
from trainyard.trigger_form import FromForm

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["evaluate"]


@task(task_id="champion", retries=3, retry_policy=RetryByClass())
@explained
def _champion(name: str) -> dict[str, Any] | None:
    from serving.release.steps import champion

    found = champion(PipelineSettings.from_environment().storage, name)
    print(f"champion: version {found['version']}" if found else f"{name} has no champion yet")
    return found


def evaluate(
    trained: XComArg,
    records: Any,
    *,
    name: str,
    min_examples: int | None = None,
    resources: Resources | None = None,
    task_id: str = "evaluate",
) -> XComArg:
    """The metrics of a trained model: {"metrics", "examples", "champion", "evaluation"}.

    `trained` is what `train` returned, `records` what `prepare` did, `name` the model's. The champion is
    evaluated on the same held-out records, so that the two can be compared. `min_examples` marks slices too
    small to judge; the form says it unless given.
    """
    champion = _champion.override(task_id="champion" if task_id == "evaluate" else f"champion_{task_id}")(
        name
    )
    manifest = records
    if not isinstance(records, str):
        manifest = records["manifest"]
        records >> champion  # beside the training, not before the data is good
    step = StepOperator(
        task_id=task_id,
        module="trainers.evaluate",
        spec={
            "job": trained["job"],
            "manifest": manifest,
            "champion": champion,
            "min_examples": FromForm("min_examples") if min_examples is None else min_examples,
        },
        pod_resources=resources,
    )
    return step.output
