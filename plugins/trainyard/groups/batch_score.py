"""batch_score: a dataset or tables scored with a released version, in as many pods as there are slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup, TriggerRule, task
from airflow.sdk.definitions.xcom_arg import PlainXComArg

from trainers.job.spec import Resources
from trainyard.failing import RetryByClass, explained
from trainyard.groups.steps import MAPPED, for_pods
from trainyard.operators.records import PLAN_KEY, RecordsOperator, ScorePlanOperator
from trainyard.operators.step import StepOperator
from trainyard.settings import PipelineSettings

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["batch_score"]


@task(task_id="version", multiple_outputs=True, retries=3, retry_policy=RetryByClass())
@explained
def _version(name: str, version: Any, alias: str) -> dict[str, Any]:
    from pathlib import Path

    from trainyard.commands.models_target import Target, Which

    settings = PipelineSettings.from_environment()
    config = Path(settings.model_config) if settings.model_config else None
    target = Target(settings.storage, config=config, mlflow=settings.mlflow)
    which = Which(name, int(version)) if version else Which(name, alias=alias)
    found = which.resolved(target)
    print(f"{name} version {found} scores")
    return {"version": found, "path": str(settings.storage / "models" / name / str(found))}


def batch_score(
    source: Any,
    *,
    name: str,
    output: str = "",
    slices: int = 1,
    shards: int = 0,
    version: Any = None,
    alias: str = "champion",
    columns: Sequence[str] = (),
    split: str = "all",
    signature: str = "",
    prefix: str = "",
    quarantine_threshold: float = 0.01,
    resources: Resources | None = None,
    pod: Mapping[str, Any] | str | None = None,
    group_id: str = "batch_score",
) -> XComArg:
    """Score rows with a released version as a task group: {"manifest", "digest", "rows", "quarantined", ...}.

    `source` is what `prepare` returned, a dataset's manifest, or Parquet, CSV or JSON Lines: a path, with wildcards,
    a URL, or what a task returned. `name` is the model's; `version` a number, else `alias` says which: champion,
    previous, stable, canary, or another of MLflow's. It is looked up once, so that all slices use the same.

    Parquet files appear in `output` ("storage://scores/NAME") under a folder of this version and source: the
    file and number of each row, `columns` of the source, the answers, and the version. `slices` pods score at once,
    each its share of the `shards` parts. A row that can't be scored goes to quarantine.parquet with the reason; above
    `quarantine_threshold` of them it fails with class DATA. The same again does nothing. `resources` and `pod` are
    for each of its pods, as of `prepare`.
    """
    place = source if isinstance(source, str) else source["manifest"] if _is_prepared(source) else source
    with TaskGroup(group_id):
        pinned = _version(name, version, alias)
        plan = ScorePlanOperator(
            task_id="plan",
            spec={
                "step": "plan",
                "slices": slices,
                "name": name,
                "model": pinned["path"],
                "source": place,
                "records": "storage://records",
                "output": output or f"storage://scores/{name}",
                "columns": list(columns),
                "split": split,
                "shards": max(shards, slices),
                "signature": signature,
                "prefix": prefix,
                "quarantine_threshold": quarantine_threshold,
            },
            **for_pods(resources, pod),
        )
        score = RecordsOperator.partial(
            task_id="score", module="trainers.score", **for_pods(resources, pod), **MAPPED
        ).expand_kwargs(plan.output)
        publish = StepOperator(
            task_id="publish",
            module="trainers.score",
            spec={"step": "publish", "plan": PlainXComArg(plan, key=PLAN_KEY)},
            **for_pods(resources, pod),
            # Without a slice to score, all being there already, the mapped task is skipped.
            trigger_rule=TriggerRule.NONE_FAILED,
        )
        score >> publish
    return publish.output


def _is_prepared(source: Any) -> bool:
    """Whether it is what `prepare` returned, and not a task's path."""
    operator = getattr(source, "operator", None)
    return isinstance(source, Mapping) or isinstance(operator, RecordsOperator)
