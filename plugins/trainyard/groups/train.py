"""train: a gang of replicas, from plan to verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup, TriggerRule

from trainers.job.policies import Budgets, RestartPolicy, Success
from trainers.job.spec import Resources
from trainyard.failing import RETRIES, RETRY_DELAY, RetryByClass
from trainyard.operators.gang import (
    CleanupOperator,
    JobTemplate,
    PlanOperator,
    ServiceOperator,
    VerdictOperator,
)
from trainyard.operators.replica import ReplicaOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["train"]


def train(
    *,
    trainer: str,
    records: Any,
    name: str,
    args: Mapping[str, Any] | None = None,
    resources: Mapping[str, Resources] | None = None,
    budgets: Budgets | None = None,
    restart: RestartPolicy | None = None,
    success: Success | None = None,
    image: str = "",
    group_id: str = "train",
    **fixed: Any,
) -> XComArg:
    """A training job as a task group; returns the verdict: {"job", "step", "metrics", "seconds"}.

        plan -> service (setup) -> replica[ps-0, worker-0, ..., chief-0] -> verdict -> cleanup (teardown)

    `trainer` is the dotted name of the trainer module; `records` what `prepare` returned, or a manifest's URI;
    `name` the model's. Counts, strategy, steps and the like come from the trigger form; those given here
    (`workers=4`, `evaluator=True`) can't be changed there. `args` are further hyperparameters of the trainer;
    `success` says how many workers must be left at the end (`Success("all_workers")`).

    The replicas are one mapped task, a row each: every one restarts alone. The verdict runs whatever became of
    them, and the cleanup whatever became of all.
    """
    template = JobTemplate(
        name=name,
        trainer=trainer,
        fixed=fixed,
        args=args or {},
        resources=resources or {},
        budgets=budgets or Budgets(),
        restart=restart or RestartPolicy(),
        success=success or Success(),
        image=image,
    )
    with TaskGroup(group_id) as group:
        plan = PlanOperator(task_id="plan", group=group_id, template=template, records=records)
        service = ServiceOperator(task_id="service", group=group_id)
        # The scheduler reads a mapped task's retries here: what an operator sets when it is made is too late.
        replica = ReplicaOperator.partial(
            task_id="replica",
            map_index_template="{{ task.hostname }}",
            retries=RETRIES,
            retry_policy=RetryByClass(),
            retry_delay=RETRY_DELAY,
        ).expand_kwargs(plan.output)
        verdict = VerdictOperator(
            task_id="verdict",
            group=group_id,
            replica_task=f"{group.group_id}.replica",
            trigger_rule=TriggerRule.ALL_DONE,
        )
        cleanup = CleanupOperator(task_id="cleanup", group=group_id)
        plan >> service >> replica >> verdict
        verdict >> cleanup.as_teardown(setups=service)
    return verdict.output
