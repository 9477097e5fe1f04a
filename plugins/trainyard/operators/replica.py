"""ReplicaOperator: one replica of a training gang, with a name and an address that outlast its pods; or a group."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.sdk.bases.hook import BaseHook

from trainers.job import labels
from trainers.job.errors import ConfigError
from trainers.job.failures import Failure, FailureClass
from trainers.job.plan import ReplicaPlan
from trainers.job.record import JobRecord, JobState, Outcome
from trainers.job.replica_log import stamp
from trainers.job.spec import LAUNCHER_COMMAND, RoleKind
from trainyard.cluster import version_of
from trainyard.failing import report
from trainyard.indexed_jobs import GroupWatch, job_manifest
from trainyard.lease import OWNER_FILE, owner_in
from trainyard.links import MlflowRunLink
from trainyard.operators.group import GroupFailed, GroupJob
from trainyard.operators.pod import PodOperator
from trainyard.settings import PipelineSettings
from trainyard.shared_files import job_files
from trainyard.tracking import run_url

if TYPE_CHECKING:
    from airflow.sdk import Context
    from kubernetes.client import V1Pod

    from trainers.job.plan import Plan

__all__ = ["ReplicaOperator", "plan_rows", "replica_kwargs"]


class ReplicaOperator(PodOperator):
    """Run one replica's launcher in a pod, unless the job's record says that the job is over.

    `job` is the job's folder. The record comes first: a replica of a finished job starts no pod, and a pod that
    was lost after the job had succeeded is a success. Everything else comes from the plan by `replica_kwargs`.
    A retry runs the same replica, under the same host name and address, and nothing else of the gang.

    With `completions` it is a whole role group, the pods of an Indexed Job called `name`, which Kubernetes restarts.
    """

    # All that a replica is told comes from the plan, where {{ }} in a command or a value is no template. Airflow
    # renders, checks, sends and keeps each field named here, twice a replica: only those that people look for.
    template_fields = ("job", "hostname", "namespace", "image", "pod_resources")
    operator_extra_links = (MlflowRunLink(),)
    ui_color = "#dff5e1"
    component = "replica"

    def __init__(self, *, job: str, completions: int = 0, **kwargs: Any) -> None:
        kwargs.setdefault("map_index_template", "{{ task.hostname }}")
        super().__init__(**kwargs)
        self.job = job
        self.completions = completions
        self.mlflow_run_url = ""

    @property
    def record(self) -> JobRecord:
        """The job's record."""
        return JobRecord(self.job)

    def execute(self, context: Context) -> None:
        """Run the replica to its end, or do as its record says."""
        with self._record_here():
            known = (Path(self.job) / "plan.json").exists()
        if not known:
            raise report(context, _no_record(self.job), final=True)
        plan = self.record.plan()
        self.restart = plan.job.restart
        # From the plan and not by XCom: an author's volumes and affinities, once for each of many replicas.
        mine = self._mine(plan)
        self.pod_overlay = mine[0].pod if mine else {}
        self.mlflow_run_url = run_url(self.job)
        if self.mlflow_run_url:
            context["ti"].xcom_push(key=MlflowRunLink().xcom_key, value=self.mlflow_run_url)
        outcome = self.record.outcome()
        if outcome is not None:
            self._leave(context, outcome)
        elif self.completions:
            self._explained(context, lambda: self._run_group(context, plan))
        else:
            super().execute(context)

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any] | None:
        """Come back from the triggerer: the pod has ended, or is given up."""
        # In another process than `execute`: how often it may be tried again stands in the plan.
        with self._record_here():
            self.restart = self.record.plan().job.restart
        return super().trigger_reentry(context, event)

    def _mine(self, plan: Plan) -> list[ReplicaPlan]:
        """The replica, or those of the group."""
        return [
            r for r in plan.replicas if (r.role.value if self.completions else r.replica) == self.hostname
        ]

    # ---- a group

    def _group(self) -> GroupJob:
        return GroupJob(self.client, self.name, self.namespace, self.log.info)

    def _run_group(self, context: Context, plan: Plan) -> None:
        # Imported here: a DAG file that is parsed needs no trigger.
        from trainyard.triggers.job import JobTrigger

        pod = self.client.api_client.sanitize_for_serialization(self.build_pod_request_obj(context))
        manifest = job_manifest(
            pod,
            name=self.name,
            completions=self.completions,
            restart=plan.job.restart,
            version=version_of(self.client),
            queue=plan.job.placement.queue,
        )
        group = self._group()
        begun = stamp(time.time())
        group.ensure(manifest)
        budgets = plan.job.budgets
        names = [r.replica for r in self._mine(plan)]
        settings = PipelineSettings.from_environment()
        if self.deferrable or (self._deferrable_by_setting and settings.deferrable):
            trigger = JobTrigger(
                name=self.name,
                namespace=self.namespace,
                kubernetes_conn_id=self.kubernetes_conn_id,
                connection_extras=BaseHook.get_connection(self.kubernetes_conn_id).extra_dejson,
                schedule=budgets.schedule,
                start=budgets.start,
                # Of an object store's folder only a copy is here.
                job="" if settings.store else self.job,
                replicas=names,
                since=begun,
            )
            self.defer(trigger=trigger, method_name="group_reentry")
        watch = GroupWatch(schedule=budgets.schedule, start=budgets.start)
        self._collected(context, group, lambda: group.follow(self.record.folder, names, watch))

    def group_reentry(self, context: Context, event: dict[str, Any]) -> None:
        """Come back from the triggerer: the Job has ended, or does not come up."""
        plan = self.record.plan()
        self.restart = plan.job.restart
        group = self._group()
        names = [r.replica for r in self._mine(plan)]

        def lines() -> Iterator[tuple[str, str]]:
            if not event.get("told"):  # the triggerer sees no such folder: at least the last lines of all
                yield from group.tail(self.record.folder, names)
            if event.get("failure"):
                raise GroupFailed(group.with_events(Failure.from_dict(event["failure"])))

        self._explained(context, lambda: self._collected(context, group, lines))

    def _collected(
        self, context: Context, group: GroupJob, lines: Callable[[], Iterator[tuple[str, str]]]
    ) -> None:
        try:
            for replica, text in lines():
                self.log.info("[%s] %s", replica, text)
            group.collect()
        except GroupFailed as e:
            group.delete()
            if self.succeeded_after_all():
                self.log.warning("the job has succeeded although not all of %s have: %s", self.hostname, e)
                return
            raise report(context, e.failure, final=e.final or self.is_over()) from None

    def on_kill(self) -> None:
        """Delete the pod, or the group's Job with all its pods."""
        if self.completions:
            self._killed = True
            self._group().delete()
        else:
            super().on_kill()

    def _leave(self, context: Context, outcome: Outcome) -> None:
        if outcome.state is JobState.SUCCEEDED:
            self.log.info("the job has succeeded already, nothing to do for %s", self.hostname)
            return
        failure = outcome.failure or Failure(FailureClass.INFRA, f"the job is {outcome.state}")
        raise report(context, failure, final=True)

    def get_or_create_pod(self, pod_request_obj: V1Pod, context: Context) -> V1Pod:
        """The replica's pod, which goes with the gang's lease."""
        owner = owner_in(self.job)
        if owner:
            pod_request_obj.metadata.owner_references = [owner]
        return super().get_or_create_pod(pod_request_obj, context)

    def log_source(self) -> dict[str, str]:
        """The gang whose Service goes with the run, and the replica's own log in the job's folder.

        That is written by the launcher, and seen here where the storage root is one for all.
        """
        seen = writes_log(self.cmds) and not PipelineSettings.from_environment().store
        kept = {"job": self.job, "replica": self.hostname or ""} if seen else {}
        owner = owner_in(self.job) or {}
        return {**kept, "gang": self.subdomain or "", "lease": owner.get("uid", "")}

    def ends_with_pod(self) -> bool:
        """Whether a success needs no process of its own: nothing is returned, and nobody wants to be called.

        What Airflow would run in that process at a success, it runs nowhere else.
        """
        wanted = (self.on_success_callback, self.outlets, self._post_execute_hook, self.callbacks)
        return self.on_finish_action == OnFinishAction.DELETE_POD and not any(wanted)

    def explain(self, error: Exception) -> Failure:
        """The failure that an error means; one that no new pod could mend ends the job, for nobody else will say so.

        The others of the gang would hold their machines until the start budget is over.
        """
        failure = super().explain(error)
        role, _, index = (self.hostname or "").partition("-")  # a group is called by its role
        if failure.failure_class is FailureClass.CONFIG and role != RoleKind.EVALUATOR.value:
            mine = dataclasses.replace(failure, role=role, index=int(index) if index else None)
            with job_files(self.job, "outcome.json"):
                self.record.finish(JobState.FAILED, failure=mine)
        return failure

    def succeeded_after_all(self) -> bool:
        """Whether the job has succeeded, whatever became of this pod."""
        with self._record_here():
            outcome = self.record.outcome()
        return outcome is not None and outcome.state is JobState.SUCCEEDED

    def is_over(self) -> bool:
        """Whether the job is over: a new pod would find nothing to do."""
        with self._record_here():
            return self.record.outcome() is not None

    def _record_here(self) -> contextlib.AbstractContextManager[None]:
        return job_files(self.job, "plan.json", "outcome.json", OWNER_FILE, "tracking", writes=False)


def writes_log(command: Sequence[str]) -> bool:
    """Whether a replica's command is the launcher, which keeps its log in the job's folder."""
    return tuple(command[: len(LAUNCHER_COMMAND)]) == LAUNCHER_COMMAND


def _no_record(folder: str) -> Failure:
    error = ConfigError(
        f"no job in {folder}", hint="clear the plan task, or check that this worker sees the storage root"
    )
    return Failure(FailureClass.CONFIG, error.message, code="record.missing", hint=error.hint)


def replica_kwargs(plan: Plan, replica: ReplicaPlan) -> dict[str, Any]:
    """What `ReplicaOperator.partial(...).expand_kwargs` needs to know of one replica: small JSON values.

    TF_CONFIG is not in it: the launcher makes it from the record, which alone says who is where.
    """
    return {
        "job": plan.job.output,
        "name": replica.name,
        "hostname": replica.hostname,
        "subdomain": replica.subdomain,
        "namespace": plan.namespace,
        "image": replica.image,
        "cmds": list(replica.command),
        "env_vars": dict(replica.env),
        "labels": dict(replica.labels),
        "annotations": {labels.ANNOTATION_JOB: plan.job.output},
        "pod_resources": replica.resources.to_dict(),
        "active_deadline_seconds": int(plan.job.budgets.total),
        "schedule_timeout_seconds": math.ceil(plan.job.budgets.schedule),
        "startup_timeout_seconds": math.ceil(plan.job.budgets.start),
    }


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """What the mapped task of a gang is expanded over: a row a replica, or a row a group that is an Indexed Job."""
    alone = [replica_kwargs(plan, r) for r in plan.replicas if r.role not in plan.indexed]
    return [*(_group_kwargs(plan, kind) for kind in plan.indexed), *alone]


def _group_kwargs(plan: Plan, kind: RoleKind) -> dict[str, Any]:
    """As `replica_kwargs`, of all replicas of a role: what differs between them, their launcher reads in the plan."""
    group = plan.role(kind)
    first = replica_kwargs(plan, group[0])
    env = first["env_vars"]
    own = {key for key in env if any(r.env.get(key) != env[key] for r in group)}
    own |= {key for key in env if any(f"$({name})" in env[key] for name in own)}
    return {
        **first,
        "name": plan.job_name(kind),
        "hostname": kind.value,
        "completions": len(group),
        "env_vars": {key: value for key, value in env.items() if key not in own},
        "labels": {key: value for key, value in first["labels"].items() if key != labels.LABEL_INDEX},
    }
