"""evaluate: a trained model on held-out records, beside the champion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import task

from trainers.evaluation.slices import texts
from trainers.job.spec import Resources
from trainyard.failing import RetryByClass, explained
from trainyard.groups.steps import for_pods
from trainyard.operators.evaluate import EvaluateOperator
from trainyard.settings import PipelineSettings
from trainyard.trigger_form import FromForm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk.definitions.xcom_arg import XComArg

    from trainers.evaluation.slices import SliceSpec

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
    slices: Sequence[str | SliceSpec] | None = None,
    slice_min_examples: int | None = None,
    resources: Resources | None = None,
    pod: Mapping[str, Any] | str | None = None,
    task_id: str = "evaluate",
) -> XComArg:
    """The metrics of a trained model: {"metrics", "examples", "champion", "evaluation", "report"}.

    `trained` is what `train` returned, `records` what `prepare` did, `name` the model's. The champion is
    evaluated on the same held-out records, so that the two can be compared. `slices` are parts of the records
    that are looked at by themselves: "carrier", Bins("distance", [500, 1000]), Cross("carrier", "origin"), see
    trainers.evaluation.slices. `min_examples` marks evaluations, `slice_min_examples` slices that are too small to
    judge. The form says what is not given. `resources` and `pod` are for its pod, as of `prepare`.
    """
    champion = _champion.override(task_id="champion" if task_id == "evaluate" else f"champion_{task_id}")(
        name
    )
    manifest = records
    if not isinstance(records, str):
        manifest = records["manifest"]
        records >> champion  # beside the training, not before the data is good
    step = EvaluateOperator(
        task_id=task_id,
        spec={
            "job": trained["job"],
            "manifest": manifest,
            "champion": champion,
            "min_examples": FromForm("min_examples") if min_examples is None else min_examples,
            "slices": FromForm("slices") if slices is None else texts(slices),
            "slice_min_examples": (
                FromForm("slice_min_examples") if slice_min_examples is None else slice_min_examples
            ),
        },
        **for_pods(resources, pod),
    )
    return step.output
