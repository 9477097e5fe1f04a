"""The tasks around a gang's replicas: plan, service, verdict, cleanup.

The gang's name and the job's folder follow from DAG, run and group, so that a verdict or a cleanup needs no word
from a plan that may have failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import BaseOperator

from trainers.job import labels
from trainers.job.checks import check, is_whole
from trainers.job.errors import InvalidSpec, MissingRecord
from trainers.job.failures import Failure, FailureClass
from trainers.job.placement import Placement
from trainers.job.plan import Cluster, make_plan
from trainers.job.policies import Budgets, RestartPolicy, Success
from trainers.job.ports import free_ports
from trainers.job.record import JobRecord, JobState, Outcome
from trainers.job.resources import Resources
from trainers.job.spec import Strategy, StrategyKind, TrainingJob, standard_roles
from trainers.runtime.strategies import check_supported
from trainers.runtime.success import given_up
from trainyard import indexed_jobs
from trainyard.cluster import core_api, create_service, delete_gang, is_process_kubelet, version_of
from trainyard.failing import FAILURE_KEY, RetryByClass, cards, most_telling, report
from trainyard.lease import OWNER_FILE, make_lease
from trainyard.links import MlflowRunLink
from trainyard.operators.admit import leave
from trainyard.operators.replica import plan_rows
from trainyard.pod_defaults import overlay_of
from trainyard.run_failed import on_failed_run
from trainyard.settings import PipelineSettings
from trainyard.shared_files import check_store, job_files
from trainyard.tracking import deliver_leftovers, deliver_soon, early_run, run_url
from trainyard.trigger_form import DEFAULTS, strategy_of, training_args_of

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["CleanupOperator", "JobTemplate", "PlanOperator", "ServiceOperator", "VerdictOperator"]


@dataclasses.dataclass(frozen=True)
class JobTemplate:
    """What a pipeline's author says of a training job; the form says the rest.

    `fixed` are values that the form can't change; `args` hyperparameters that it does not have; `resources` maps
    a role's name, or "default", to its Resources, `pods` to what is laid over its pods (`trainers.job.pod_overlay`);
    `indexed_above` says which roles are one Indexed Job (`trainyard.indexed_jobs.threshold`).
    With a `command`, or a mapping of them, in place of `trainer` the strategy is `custom`, whatever the form says.
    """

    name: str
    trainer: str = ""
    command: Sequence[str] | Mapping[str, Sequence[str]] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resources: Mapping[str, Resources] = dataclasses.field(default_factory=dict)
    budgets: Budgets = dataclasses.field(default_factory=Budgets)
    restart: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    success: Success = dataclasses.field(default_factory=Success)
    image: str | Mapping[str, str] = ""
    pods: Mapping[str, Mapping[str, Any] | str] = dataclasses.field(default_factory=dict)
    placement: Placement = dataclasses.field(default_factory=Placement)
    indexed_above: int | None = None

    def __post_init__(self) -> None:
        above = self.indexed_above
        check(above is None or (is_whole(above) and above >= 0), "indexed_above", "be 0 or more", above)
        unknown = sorted(set(self.fixed) - set(DEFAULTS))
        if unknown:
            raise InvalidSpec("train", f"be given fields of {', '.join(DEFAULTS)}", unknown)
        if bool(self.trainer) == bool(self.command):
            given = {"trainer": self.trainer, "command": self.command}
            raise InvalidSpec("train", "be given a trainer module or a command, one of the two", given)

    def job(self, form: Mapping[str, Any], *, manifest: str | None, output: str) -> TrainingJob:
        """The job of one run, without records where there is no `manifest`; InvalidSpec names the wrong field."""
        values = {**DEFAULTS, **form, **self.fixed}
        strategy = Strategy(StrategyKind.CUSTOM) if self.command else strategy_of(values)
        return TrainingJob(
            name=self.name,
            trainer=self.trainer,
            args={**self._form_args(values, form), **self.args},
            roles=standard_roles(
                strategy,
                workers=values["workers"],
                ps=values["ps"],
                evaluator=values["evaluator"] and not self.command,
                resources=self.resources,
                image=self.image,
                command=self.command,
                pods={role: overlay_of(f"pods.{role}", pod) for role, pod in self.pods.items()},
            ),
            strategy=strategy,
            success=self.success,
            restart=self.restart,
            budgets=self.budgets,
            placement=self.placement,
            inputs={"records": manifest} if manifest else {},
            output=output,
        )

    def _form_args(self, values: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
        """What of the form are arguments of the job; to a command, all fields that there are for training."""
        args = training_args_of(values)
        if not self.command:
            return args
        given = {**form, **self.fixed}
        own = {name: value for name, value in form.items() if name not in DEFAULTS}
        return {name: value for name, value in args.items() if name in given} | own


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
        return _folder(self.dag_id, context["run_id"], self.group)


def _folder(dag_id: str, run_id: str, group: str) -> str:
    return str(PipelineSettings.from_environment().job_folder(dag_id, labels.run_slug(run_id), group))


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
        if manifest is None and self.template.trainer:
            raise InvalidSpec("records", "be given to a trainer module", None)
        job = self.template.job(
            context["params"], manifest=settings.resolve(manifest), output=self.folder(context)
        )
        check_supported(job)
        _check_storage(settings, job)
        count = sum(role.replicas for role in job.roles)
        cluster = self._cluster(count, settings.namespace)
        plan = make_plan(
            job,
            cluster,
            gang=self.gang(context),
            extra_labels={labels.LABEL_PIPELINE: labels.dns_label(self.dag_id)},
            image=settings.image,
            # The task of a group reads its replicas' logs in the job's folder, where all share one.
            indexed_above=0 if settings.store else self._indexed_above(job, cluster),
        )
        rows = plan_rows(plan)
        if not settings.deferrable:
            _check_slots(len(rows), context["dag"].max_active_tasks)
        with job_files(job.output, whole=True):
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
        return rows

    def _cluster(self, count: int, namespace: str) -> Cluster:
        if is_process_kubelet(core_api()):
            return Cluster.process(free_ports(count), namespace)
        return Cluster.kubernetes(namespace)

    def _indexed_above(self, job: TrainingJob, cluster: Cluster) -> int:
        """Above how many replicas a role is one Indexed Job, 0 for never; says so where the cluster has none."""
        asked = self.template.indexed_above
        largest = max(role.replicas for role in job.roles)
        if largest <= (indexed_jobs.ABOVE if asked is None else asked):
            return 0
        one_machine = cluster.kind == "process"
        above, why_not = indexed_jobs.threshold(asked, version_of(core_api()), one_machine=one_machine)
        if why_not:
            print(f"{largest} replicas of a role are {why_not}")
        return above


def _check_storage(settings: PipelineSettings, job: TrainingJob) -> None:
    """Refuse what an object store can't hold, before any pod starts."""
    if not settings.store:
        return
    if job.strategy.kind in (StrategyKind.MULTI_WORKER, StrategyKind.CUSTOM):
        raise InvalidSpec(
            "strategy",
            "be one whose chief alone restores checkpoints where TRAINYARD_STORE is an object store",
            job.strategy.kind.value,
            hint="several replicas that restore from one checkpoint need a folder that they share: "
            "use a volume (TRAINYARD_STORAGE_CLAIM), or parameter_server, mirrored or local",
        )
    check_store(settings)


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
    """Create the gang's headless Service, by which its replicas find each other, and on a cluster its lease."""

    def execute(self, context: Context) -> None:
        """Create them, unless they are there."""
        folder = self.folder(context)
        with job_files(folder, "plan.json", OWNER_FILE):
            with cards(context):
                plan = JobRecord.open(folder).plan()
            api = core_api()
            # The process kubelet collects nothing for an owner, and ends its pods with itself.
            owner = None if plan.cluster == "process" else make_lease(api, plan)
        service = plan.service()
        if owner:
            service["metadata"]["ownerReferences"] = [owner]
        create_service(api, service)


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
        with job_files(self.folder(context)):
            return self._verdict(context)

    def _verdict(self, context: Context) -> dict[str, Any]:
        folder = self.folder(context)
        self.mlflow_run_url = run_url(folder)
        with cards(context):
            record = JobRecord.open(folder)
        outcome = record.outcome() or self._silent(context, record)
        if deliver_soon(folder):  # how the run ended, where the chief could not say it
            deliver_leftovers(record.folder.parent, but=record.folder)
        if outcome.state is not JobState.SUCCEEDED:
            failure = outcome.failure or Failure(FailureClass.INFRA, f"the job is {outcome.state}")
            raise report(context, failure, final=True)
        for index, lost in given_up(folder).items():
            print(f"worker-{index} was given up: {lost.failure_class}: {lost.reason}")
        after = "" if outcome.step is None else f" after {outcome.step} steps"
        print(f"the job succeeded{after}: {dict(outcome.metrics)}")
        return {
            "job": folder,
            "step": outcome.step,
            "metrics": dict(outcome.metrics),
            "seconds": dict(outcome.seconds),
        }

    def _silent(self, context: Context, record: JobRecord) -> Outcome:
        count = len(plan_rows(record.plan()))
        rows = context["ti"].xcom_pull(
            task_ids=self.replica_task, key=FAILURE_KEY, map_indexes=list(range(count))
        )
        failures = [Failure.from_dict(row) for row in rows or () if row]
        failure = most_telling(failures) or Failure(
            FailureClass.INFRA,
            "the gang ended without an outcome",
            code="train.no_outcome",
            hint="look at the logs of the replicas; clear the train group to go on from the last checkpoint",
        )
        return record.finish(JobState.FAILED, failure=failure)


class CleanupOperator(_GangOperator):
    """Delete what is left of the gang's pods, by their owner label, and its Service; whatever happened.

    Its reservation or place in the queue of admission goes too.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.has_dag():
            # Airflow skips this task, too, where the run is out of time.
            on_failed_run(self.dag).gangs.append(partial(_take_away, self.dag_id, self.group))

    def execute(self, context: Context) -> None:
        """Delete; nothing to delete is well too."""
        _delete(self.gang(context))
        _end_what_was_stopped(self.folder(context))


def _delete(gang: str, *, wait: bool = True) -> None:
    namespace = PipelineSettings.from_environment().namespace
    api = core_api()
    deleted = delete_gang(api, gang, namespace, wait=wait)
    leave(api, gang, namespace)
    print(f"deleted: {', '.join(deleted) or 'nothing'}")


def _end_what_was_stopped(folder: str) -> None:
    """A job that comes here without an end was stopped by hand, or by the clock: nobody else will say so."""
    with job_files(folder):
        try:
            record = JobRecord.open(folder)
        except MissingRecord:
            return  # the plan failed
        if record.outcome() is None:
            record.finish(JobState.CANCELLED, failure=Failure(FailureClass.INFRA, "the run was stopped"))
            deliver_soon(record.folder)


def _take_away(dag_id: str, group: str, run_id: str) -> None:
    """The cleanup of a run that is out of time, by its DAG's callback, which has less than a minute.

    The record comes first: by it replicas end of themselves, and the reaper knows what may go.
    """
    _end_what_was_stopped(_folder(dag_id, run_id, group))
    _delete(labels.gang_name(dag_id, run_id, group), wait=False)
