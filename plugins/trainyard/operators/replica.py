"""ReplicaOperator: one replica of a training gang, with a name and an address that outlast its pods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import ConfigError
from trainers.job.failures import Failure, FailureClass
from trainers.job.plan import ReplicaPlan
from trainers.job.record import JobRecord, JobState, Outcome
from trainyard.failing import report
from trainyard.links import MlflowRunLink
from trainyard.operators.pod import PodOperator
from trainyard.tracking import run_url

if TYPE_CHECKING:
    from airflow.sdk import Context

    from trainers.job.plan import Plan

__all__ = ["ReplicaOperator", "replica_kwargs"]


class ReplicaOperator(PodOperator):
    """Run one replica's launcher in a pod, unless the job's record says that the job is over.

    `job` is the job's folder. The record comes first: a replica of a finished job starts no pod, and a pod that
    was lost after the job had succeeded is a success. Everything else comes from the plan by `replica_kwargs`.
    A retry runs the same replica, under the same host name and address, and nothing else of the gang.
    """

    template_fields = (*PodOperator.template_fields, "job")
    operator_extra_links = (MlflowRunLink(),)
    ui_color = "#dff5e1"
    component = "replica"

    def __init__(self, *, job: str, **kwargs: Any) -> None:
        kwargs.setdefault("map_index_template", "{{ task.hostname }}")
        super().__init__(**kwargs)
        self.job = job
        self.mlflow_run_url = ""

    @property
    def record(self) -> JobRecord:
        """The job's record."""
        return JobRecord(self.job)

    def execute(self, context: Context) -> None:
        """Run the replica to its end, or do as its record says."""
        if not (Path(self.job) / "plan.json").exists():
            raise report(context, _no_record(self.job), final=True)
        self.restart = self.record.plan().job.restart
        self.mlflow_run_url = run_url(self.job)
        if self.mlflow_run_url:
            context["ti"].xcom_push(key=MlflowRunLink().xcom_key, value=self.mlflow_run_url)
        outcome = self.record.outcome()
        if outcome is not None:
            self._leave(context, outcome)
        else:
            super().execute(context)

    def _leave(self, context: Context, outcome: Outcome) -> None:
        if outcome.state is JobState.SUCCEEDED:
            self.log.info("the job has succeeded already, nothing to do for %s", self.hostname)
            return
        failure = outcome.failure or Failure(FailureClass.INFRA, f"the job is {outcome.state}")
        raise report(context, failure, final=True)

    def succeeded_after_all(self) -> bool:
        """Whether the job has succeeded, whatever became of this pod."""
        outcome = self.record.outcome()
        return outcome is not None and outcome.state is JobState.SUCCEEDED

    def is_over(self) -> bool:
        """Whether the job is over: a new pod would find nothing to do."""
        return self.record.outcome() is not None


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
        "pod_resources": replica.resources.to_dict(),
        "active_deadline_seconds": int(plan.job.budgets.total),
    }
