"""prepare: raw data to sharded records with a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainers.job.spec import Resources
from trainyard.operators.step import StepOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["prepare"]


def prepare(
    source: Any,
    *,
    name: str,
    label: str = "label",
    key: str | None = None,
    eval_fraction: float = 0.1,
    shards: int = 2,
    resources: Resources | None = None,
    task_id: str = "prepare",
    **options: Any,
) -> XComArg:
    """Records of the raw data at `source`: {"manifest", "digest", "counts", ...}.

    `source` is a path, "storage://...", or what a task returned; `name` the dataset's; `label` its label column;
    `key` the column that decides between train and eval by hash, so that a row never changes sides. The same raw
    data and options give the same records, which are then not written again. `options` go to the step as they
    are.
    """
    spec = {
        "source": source,
        "output": f"storage://records/{name}",
        "name": name,
        "label": label,
        "eval_fraction": eval_fraction,
        "shards": shards,
        **({"key": key} if key else {}),
        **options,
    }
    step = StepOperator(task_id=task_id, module="trainers.records", spec=spec, pod_resources=resources)
    return step.output
