"""A gang whose replicas run a shell script: what deferred tasks go through, without any training."""

from __future__ import annotations

import datetime as dt
from typing import Any

from airflow.sdk import DAG, Param, TaskGroup, TriggerRule, get_current_context, task
from trainyard.operators.gang import CleanupOperator, ServiceOperator
from trainyard.operators.pod import PodOperator
from trainyard.operators.replica import ReplicaOperator, replica_kwargs

from trainers.job import labels
from trainers.job.spec import Resources

SMALL = Resources(cpu=0.01, memory="32Mi")
FORM = {
    "replicas": Param(2, type="integer"),
    "script": Param("true", type="string"),
    "total": Param(600, type="number"),
    "launcher": Param(False, type="boolean"),
}


@task(multiple_outputs=False)
def plan() -> list[dict[str, Any]]:
    """The gang's record, and what each replica is told."""
    from trainyard.cluster import core_api, is_process_kubelet
    from trainyard.settings import PipelineSettings

    from trainers.job.plan import Cluster, make_plan
    from trainers.job.policies import Budgets
    from trainers.job.ports import free_ports
    from trainers.job.record import JobRecord
    from trainers.job.spec import Role, RoleKind, Strategy, TrainingJob

    context = get_current_context()
    form, settings = context["params"], PipelineSettings.from_environment()
    dag_id, run_id = context["dag"].dag_id, context["run_id"]
    command = ("sh", "-c", form["script"])
    roles = [Role(RoleKind.CHIEF, resources=SMALL, command=command)]
    if form["replicas"] > 1:
        roles.append(Role(RoleKind.WORKER, form["replicas"] - 1, resources=SMALL, command=command))
    job = TrainingJob(
        name="waiting",
        trainer="",
        roles=tuple(roles),
        strategy=Strategy("custom"),
        budgets=Budgets(total=form["total"]),
        output=str(settings.job_folder(dag_id, labels.run_slug(run_id))),
    )
    local = is_process_kubelet(core_api())
    where = (
        Cluster.process(free_ports(form["replicas"]), settings.namespace)
        if local
        else Cluster.kubernetes(settings.namespace)
    )
    made = make_plan(job, where, gang=labels.gang_name(dag_id, run_id), image=settings.image)
    JobRecord.create(made)
    # Without the launcher it is what a hundred of them cost this machine: a shell each.
    own = {} if form["launcher"] else {"cmds": list(command)}
    return [replica_kwargs(made, replica) | own for replica in made.replicas]


@task
def bystander() -> str:
    """A task that needs a slot."""
    return "done"


def gang() -> None:
    """plan, service, replicas, cleanup; as `train` has them, without training."""
    with TaskGroup("train"):
        told = plan()
        service = ServiceOperator(task_id="service", group="train")
        replica = ReplicaOperator.partial(task_id="replica").expand_kwargs(told)
        (
            told
            >> service
            >> replica
            >> CleanupOperator(task_id="cleanup", group="train").as_teardown(setups=service)
        )


with DAG("waiting", schedule=None, params=FORM, max_active_tasks=200):
    gang()

with DAG("waiting_beside", schedule=None):
    bystander()

with DAG("waiting_late", schedule=None, params=FORM, dagrun_timeout=dt.timedelta(hours=12)):
    gang()

with DAG("waiting_step", schedule=None, params=FORM, default_args={"pod_resources": SMALL}):
    PodOperator(task_id="step", cmds=["sh", "-c"], arguments=["{{ params.script }}"])

with DAG("waiting_step_late", schedule=None, params=FORM, default_args={"pod_resources": SMALL}):
    PodOperator(
        task_id="step",
        cmds=["sh", "-c"],
        arguments=["{{ params.script }}"],
        execution_timeout=dt.timedelta(seconds=10),
        retries=0,
        trigger_rule=TriggerRule.ALL_SUCCESS,
    )
