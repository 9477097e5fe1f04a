"""What a failed run's callback takes away: a gang of a run that is out of time, and pods that nobody ends."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.sdk import DAG
from trainyard.groups.train import train
from trainyard.kubelet.testing import pod_manifest
from trainyard.operators.step import StepOperator
from trainyard.run_failed import RunFailed, on_failed_run

from tests.plugins.conftest import RUN_ID
from trainers.job import labels
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import Role, RoleKind, Strategy, TrainingJob

GANG = labels.gang_name("pipeline", RUN_ID, "train")


def pipeline(**options: Any) -> DAG:
    """A DAG with a gang."""
    with DAG("pipeline", **options) as dag:
        train(command=("true",), name="digits")
    return dag


def context(dag: DAG, reason: str, *, ended: dt.datetime | None = None) -> dict[str, Any]:
    """What Airflow's DAG processor gives a callback."""
    run = {"dag_run": SimpleNamespace(end_date=ended)} if ended else {}
    return {"dag": dag, "run_id": RUN_ID, "reason": reason, **run}


@pytest.fixture
def pods(cluster: Any, pipelines: Path) -> Any:
    """Makes running pods of the run: `pods("name", gang=GANG)`."""
    core, made = cluster.core_v1(), list[str]()

    def make(name: str, script: str = "sleep 600", *, run_id: str = RUN_ID, gang: str = "") -> None:
        own = {
            labels.LABEL_MANAGED_BY: labels.MANAGED_BY,
            "dag_id": "pipeline",
            "run_id": make_safe_label_value(run_id),
        }
        if gang:
            own[labels.LABEL_GANG] = gang
        cluster.run(pod_manifest(name, ["sh", "-c", script], labels=own), "trainyard")
        made.append(name)

    yield make
    for name in {p.metadata.name for p in core.list_namespaced_pod("trainyard").items} & set(made):
        core.delete_namespaced_pod(name, "trainyard", grace_period_seconds=0)
        cluster.wait_gone(name, namespace="trainyard")


def left(cluster: Any) -> set[str]:
    """The pods that nobody has deleted."""
    rows = cluster.core_v1().list_namespaced_pod("trainyard").items
    return {p.metadata.name for p in rows if p.metadata.deletion_timestamp is None}


def test_a_gang_of_a_run_that_is_out_of_time_is_taken_away(cluster: Any, pipelines: Path, pods: Any) -> None:
    dag = pipeline()
    ours = on_failed_run(dag)
    job = TrainingJob(
        name="digits",
        trainer="",
        roles=(Role(RoleKind.CHIEF, command=("true",)),),
        strategy=Strategy("custom"),
        output=dag.get_task("train.cleanup").folder({"run_id": RUN_ID}),
    )
    plan = make_plan(job, Cluster.process([1], "trainyard"), gang=GANG, image="none")
    record = JobRecord.create(plan)
    cluster.core_v1().create_namespaced_service("trainyard", plan.service())
    pods("replica", gang=GANG)
    pods("step")
    pods("of-another-run", run_id="manual__2026-01-02T00:00:00+00:00")

    ours(context(dag, "timed_out"))

    assert left(cluster) == {"of-another-run"}
    assert cluster.core_v1().list_namespaced_service("trainyard").items == []
    outcome = record.outcome()
    assert outcome is not None
    assert outcome.state is JobState.CANCELLED  # so the reaper knows, too
    ours(context(dag, "timed_out"))  # again: there is nothing


def test_only_what_still_runs_goes_with_a_run_that_has_failed(cluster: Any, pods: Any) -> None:
    dag = pipeline()
    pods("kept", "exit 1")
    pods("running")
    cluster.wait_phase("kept", "Failed", namespace="trainyard")
    on_failed_run(dag)(context(dag, "task_failure"))
    assert left(cluster) == {"kept"}


def test_a_pod_of_a_task_that_was_cleared_since_is_not_its(cluster: Any, pods: Any) -> None:
    dag = pipeline()
    ended = dt.datetime.now(dt.timezone.utc) - dt.timedelta(minutes=1)
    pods("of-the-next-try")
    on_failed_run(dag)(context(dag, "task_failure", ended=ended))
    assert left(cluster) == {"of-the-next-try"}


def test_a_dag_keeps_its_own_callback_and_has_ours_once(pipelines: Path) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    said = []
    dag = pipeline(on_failure_callback=said.append)
    assert dag.on_failure_callback[0] == said.append
    assert [type(callback) for callback in dag.on_failure_callback[1:]] == [RunFailed]
    # The scheduler asks the serialized DAG whether there is anything to call.
    for made in (pipeline(), dag):
        assert DagSerialization.serialize_dag(made)["has_on_failure_callback"] is True
    with DAG("steps") as steps:
        StepOperator(task_id="one", module="m", spec={})
        StepOperator(task_id="two", module="m", spec={})
    assert len(steps.on_failure_callback) == 1


def test_a_gang_that_cannot_be_taken_away_does_not_keep_the_others(cluster: Any, pods: Any) -> None:
    dag = DAG("pipeline")
    ours = on_failed_run(dag)

    def fails(run_id: str) -> None:
        raise OSError(f"no storage for {run_id}")

    ours.gangs.append(fails)
    pods("running")
    with pytest.raises(OSError, match="no storage"):
        ours(context(dag, "timed_out"))
    assert left(cluster) == set()
