"""train: a gang of replicas, from plan to verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup, TriggerRule

from trainers.job.placement import Placement
from trainers.job.policies import Budgets, RestartPolicy, Success
from trainers.job.resources import Resources
from trainyard.failing import RETRIES, RETRY_DELAY, RetryByClass
from trainyard.operators.admit import AdmitOperator
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
    trainer: str = "",
    records: Any = None,
    name: str,
    command: Sequence[str] | Mapping[str, Sequence[str]] = (),
    args: Mapping[str, Any] | None = None,
    resources: Mapping[str, Resources] | None = None,
    budgets: Budgets | None = None,
    restart: RestartPolicy | None = None,
    success: Success | None = None,
    image: str | Mapping[str, str] = "",
    pods: Mapping[str, Mapping[str, Any] | str] | None = None,
    placement: Placement | None = None,
    indexed_above: int | None = None,
    group_id: str = "train",
    **fixed: Any,
) -> XComArg:
    """A training job as a task group; returns the verdict: {"job", "step", "metrics", "seconds"}.

        plan -> admit -> service (setup) -> replica[ps-0, worker-0, ..., chief-0] -> verdict -> cleanup (teardown)

    `trainer` is the dotted name of the trainer module; `records` what `prepare` returned, or a manifest's URI;
    `name` the model's. Counts, strategy, steps and the like come from the trigger form; those given here
    (`workers=4`, `evaluator=True`) can't be changed there. `args` are further hyperparameters of the trainer;
    `success` says how many workers must be left at the end (`Success("all_workers")`). On a cluster `pods` maps a
    role, or "default", to what is laid over its pods, a part of a Pod manifest (volumes, secrets, affinity, a service
    account) or a pod template file, and `placement` says whose turn it is and whether replicas are spread or packed.

    `command` in place of `trainer` runs any other framework (docs/other-frameworks.md): what every replica runs, or a
    mapping of "chief", "worker", "ps" or "default" to it; so may `image` be one. Chief and workers get MASTER_ADDR,
    WORLD_SIZE, RANK and the like; parameter servers are there only if `command` names them.

    A role of more than `indexed_above` replicas is one row, and one Indexed Job, where the cluster has those (0: never;
    None: 32 on a cluster, never on one machine).

    A gang is let in as a whole, within `budgets.admit`, or waits without holding anything. The replicas are one mapped
    task, a row each: every one restarts alone. The verdict runs whatever became of them, the cleanup whatever became of
    all.
    """
    template = JobTemplate(
        name=name,
        trainer=trainer,
        command=command,
        fixed=fixed,
        args=args or {},
        resources=resources or {},
        budgets=budgets or Budgets(),
        restart=restart or RestartPolicy(),
        success=success or Success(),
        image=image,
        pods=pods or {},
        placement=placement or Placement(),
        indexed_above=indexed_above,
    )
    with TaskGroup(group_id) as group:
        plan = PlanOperator(task_id="plan", group=group_id, template=template, records=records)
        admit = AdmitOperator(task_id="admit", group=group_id)
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
        plan >> admit >> service >> replica >> verdict
        verdict >> cleanup.as_teardown(setups=service)
    return verdict.output
