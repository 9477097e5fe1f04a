"""The tasks around a gang's replicas: plan, service, verdict, cleanup.

The gang's name and the job's folder follow from DAG, run and group, so that a verdict or a cleanup needs no word
from a plan that may have failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import BaseOperator

from trainers.job import labels
from trainers.job.errors import InvalidSpec
from trainers.job.failures import Failure, FailureClass
from trainers.job.plan import Cluster, make_plan
from trainers.job.policies import Budgets, RestartPolicy, Success
from trainers.job.ports import free_ports
from trainers.job.record import JobRecord, JobState, Outcome
from trainers.job.spec import Resources, TrainingJob, standard_roles
from trainers.runtime.strategies import check_supported
from trainers.runtime.success import given_up
from trainyard.cluster import core_api, create_service, delete_gang, is_process_kubelet
from trainyard.failing import FAILURE_KEY, RetryByClass, cards, report
from trainyard.links import MlflowRunLink
from trainyard.operators.replica import replica_kwargs
from trainyard.settings import PipelineSettings
from trainyard.tracking import early_run, run_url
from trainyard.trigger_form import DEFAULTS, strategy_of, training_args_of

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["CleanupOperator", "JobTemplate", "PlanOperator", "ServiceOperator", "VerdictOperator"]

# Of several replicas' failures, the one that says most: a cause before what followed from it.
_TELLING = (
    FailureClass.USER,
    FailureClass.DATA,
    FailureClass.CONFIG,
    FailureClass.OOM,
    FailureClass.QUOTA,
    FailureClass.STALLED,
    FailureClass.INFRA,
    FailureClass.PREEMPTED,
    FailureClass.PEER_LOST,
)


@dataclasses.dataclass(frozen=True)
class JobTemplate:
    """What a pipeline's author says of a training job; the form says the rest.

    `fixed` are values that the form can't change; `args` hyperparameters that it does not have; `resources` maps
    a role's name, or "default", to its Resources.
    """

    name: str
    trainer: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resources: Mapping[str, Resources] = dataclasses.field(default_factory=dict)
    budgets: Budgets = dataclasses.field(default_factory=Budgets)
    restart: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    success: Success = dataclasses.field(default_factory=Success)
    image: str = ""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.fixed) - set(DEFAULTS))
        if unknown:
            raise InvalidSpec("train", f"be given fields of {', '.join(DEFAULTS)}", unknown)

    def job(self, form: Mapping[str, Any], *, manifest: str, output: str) -> TrainingJob:
        """The job of one run; InvalidSpec names the field that is wrong."""
        values = {**DEFAULTS, **form, **self.fixed}
        strategy = strategy_of(values)
        return TrainingJob(
            name=self.name,
            trainer=self.trainer,
            args={**training_args_of(values), **self.args},
            roles=standard_roles(
                strategy,
                workers=values["workers"],
                ps=values["ps"],
                evaluator=values["evaluator"],
                resources=self.resources,
                image=self.image,
            ),
            strategy=strategy,
            success=self.success,
            restart=self.restart,
            budgets=self.budgets,
            inputs={"records": manifest},
            output=output,
        )


class _GangOperator(BaseOperator):
    """A light task that knows its gang."""

    ui_color = "#fff3d6"

    def __init__(self, *, group: str, **kwargs: Any) -> None:
        kwargs.setdefault("retry_policy", RetryByClass())
        super().__init__(**kwargs)
        self.group = group

    def gang(self, context: Context) -> str:
        """The gang's name."""
        return labels.gang_name(self.dag_id, context["run_id"], self.group)

    def folder(self, context: Context) -> str:
        """The job's folder."""
        run = labels.run_slug(context["run_id"])
        return str(PipelineSettings.from_environment().job_folder(self.dag_id, run, self.group))


class PlanOperator(_GangOperator):
    """Plan the job and open its record; returns what each replica must be told.

    Refuses a gang that this Airflow could not run all at once: it would wait for itself for ever.
    """

    template_fields = ("records",)

    def __init__(self, *, template: JobTemplate, records: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.template = template
        self.records = records

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Plan; a list with a small dict a replica."""
        with cards(context):
            return self._plan(context)

    def _plan(self, context: Context) -> list[dict[str, Any]]:
        settings = PipelineSettings.from_environment()
        manifest = self.records["manifest"] if isinstance(self.records, Mapping) else self.records
        job = self.template.job(
            context["params"], manifest=settings.resolve(manifest), output=self.folder(context)
        )
        check_supported(job)
        count = sum(role.replicas for role in job.roles)
        if not settings.deferrable:
            _check_slots(count, context["dag"].max_active_tasks)
        plan = make_plan(
            job,
            self._cluster(count, settings.namespace),
            gang=self.gang(context),
            extra_labels={labels.LABEL_PIPELINE: labels.dns_label(self.dag_id)},
            image=settings.image,
        )
        record = JobRecord.create(plan)
        run = early_run(
            record.folder,
            settings.mlflow,
            experiment=job.name,
            name=labels.run_slug(context["run_id"]),
            tags={"trainyard.pipeline": self.dag_id, "trainyard.run": context["run_id"]},
        )
        print(plan.describe())
        print(f"job folder: {record.folder}")
        if run:
            print(f"mlflow run: {run_url(record.folder)}")
        context["ti"].xcom_push(key="job", value=str(record.folder))
        return [replica_kwargs(plan, replica) for replica in plan.replicas]

    def _cluster(self, count: int, namespace: str) -> Cluster:
        if is_process_kubelet(core_api()):
            return Cluster.process(free_ports(count), namespace)
        return Cluster.kubernetes(namespace)


def _check_slots(replicas: int, max_active_tasks: int) -> None:
    """Every replica of a gang holds a slot while it runs, and one must be left for the rest of the run."""
    for name, slots in (
        ("core.parallelism", conf.getint("core", "parallelism")),
        ("max_active_tasks", max_active_tasks),
    ):
        if slots and replicas >= slots:
            raise InvalidSpec(
                "workers",
                f"leave the gang at {slots - 1} replicas or fewer, as {name} is {slots}",
                replicas,
                hint=f"ask for fewer workers or parameter servers, or raise {name}; "
                "TRAINYARD_DEFERRABLE=true needs no slots",
            )


class ServiceOperator(_GangOperator):
    """Create the gang's headless Service, by which its replicas find each other."""

    def execute(self, context: Context) -> None:
        """Create it, unless it is there."""
        with cards(context):
            plan = JobRecord.open(self.folder(context)).plan()
        create_service(core_api(), plan.service())


class VerdictOperator(_GangOperator):
    """Say how the job ended, from its record; the one failure card of the gang.

    Returns {"job", "step", "metrics", "seconds"}. A worker that was given up is a failed task of its own, and no
    failure of the run where the record says that the job has succeeded. Where the record is silent, as when no pod
    ever started, the replicas' own failures decide, and the record learns of it.
    """

    operator_extra_links = (MlflowRunLink(),)

    def __init__(self, *, replica_task: str, **kwargs: Any) -> None:
        super().__init__(retries=0, multiple_outputs=True, **kwargs)
        self.replica_task = replica_task
        self.mlflow_run_url = ""

    def execute(self, context: Context) -> dict[str, Any]:
        """Read the record; the job's end as a small dict."""
        folder = self.folder(context)
        self.mlflow_run_url = run_url(folder)
        with cards(context):
            record = JobRecord.open(folder)
        outcome = record.outcome() or self._silent(context, record)
        if outcome.state is not JobState.SUCCEEDED:
            failure = outcome.failure or Failure(FailureClass.INFRA, f"the job is {outcome.state}")
            raise report(context, failure, final=True)
        for index, lost in given_up(folder).items():
            print(f"worker-{index} was given up: {lost.failure_class}: {lost.reason}")
        print(f"the job succeeded after {outcome.step} steps: {dict(outcome.metrics)}")
        return {
            "job": folder,
            "step": outcome.step,
            "metrics": dict(outcome.metrics),
            "seconds": dict(outcome.seconds),
        }

    def _silent(self, context: Context, record: JobRecord) -> Outcome:
        count = len(record.plan().replicas)
        rows = context["ti"].xcom_pull(
            task_ids=self.replica_task, key=FAILURE_KEY, map_indexes=list(range(count))
        )
        failures = [Failure.from_dict(row) for row in rows or () if row]
        failure = min(failures, key=lambda f: _TELLING.index(f.failure_class), default=None) or Failure(
            FailureClass.INFRA,
            "the gang ended without an outcome",
            code="train.no_outcome",
            hint="look at the logs of the replicas; clear the train group to go on from the last checkpoint",
        )
        return record.finish(JobState.FAILED, failure=failure)


class CleanupOperator(_GangOperator):
    """Delete what is left of the gang's pods, by their owner label, and its Service; whatever happened."""

    def execute(self, context: Context) -> None:
        """Delete; nothing to delete is well too."""
        namespace = PipelineSettings.from_environment().namespace
        deleted = delete_gang(core_api(), self.gang(context), namespace)
        print(f"deleted: {', '.join(deleted) or 'nothing'}")
