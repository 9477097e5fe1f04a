"""Plan, service, replicas, verdict, cleanup: a gang of small real processes on a process kubelet."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from airflow.models.dagrun import DagRun
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from trainyard.failing import RetryByClass, StepFailed
from trainyard.groups.train import train
from trainyard.operators.gang import (
    CleanupOperator,
    JobTemplate,
    PlanOperator,
    ServiceOperator,
    VerdictOperator,
)
from trainyard.operators.replica import ReplicaOperator
from trainyard.trigger_form import DEFAULTS

from trainers.job.errors import InvalidSpec
from trainers.job.failures import Failure, FailureClass
from trainers.job.policies import RestartPolicy, Success
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import Resources, RoleKind

TEMPLATE = JobTemplate("digits", "a_trainer", resources={"default": Resources(0.1, "256Mi")})
FORM = {**DEFAULTS, "workers": 2, "ps": 1}

# What a launcher does, as far as Airflow can see: leave by the record.
LAUNCHER = """
import os, sys, time
from trainers.job.record import JobRecord, JobState
record = JobRecord.open(os.environ["TRAINYARD_JOB"])
role, index = os.environ["TRAINYARD_ROLE"], os.environ["TRAINYARD_INDEX"]
print("here is", role, index, flush=True)
if role == "chief":
    record.finish(JobState.SUCCEEDED, step=7, metrics={"accuracy": 0.5}, seconds={"train": 1.0})
while record.outcome() is None:
    time.sleep(0.05)
"""


@pytest.fixture
def plan(pipelines: Path, context_of: Any) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Runs the plan task; (the replicas' arguments, its context)."""

    def run(template: JobTemplate = TEMPLATE, **form: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        with DAG("pipeline", max_active_tasks=8):
            operator = PlanOperator(
                task_id="plan", group="train", template=template, records={"manifest": "storage://records/m"}
            )
        context = context_of(operator, params={**FORM, **form})
        return operator.execute(context), context

    return run


def _gang_task(operator_class: Any, **options: Any) -> Any:
    with DAG("pipeline"):
        return operator_class(group="train", **options)


def _verdict(context_of: Any, **others: Any) -> tuple[Any, dict[str, Any]]:
    operator = _gang_task(VerdictOperator, task_id="verdict", replica_task="replica")
    context = context_of(operator)
    context["ti"].others["replica", "failure"] = others.get("failures")
    return operator, context


def _replica(kwargs: dict[str, Any], source: str | list[str] = LAUNCHER) -> ReplicaOperator:
    cmds = [sys.executable, "-c", source] if isinstance(source, str) else source
    with DAG("pipeline"):
        return ReplicaOperator(task_id="replica", **{**kwargs, "cmds": cmds})


def test_a_plan_opens_the_record_and_tells_each_replica_little(plan: Any, pipelines: Path) -> None:
    rows, context = plan()
    assert [row["hostname"] for row in rows] == ["ps-0", "worker-0", "worker-1", "chief-0"]
    folder = Path(context["ti"].xcom["job"])
    assert folder.parent == pipelines / "jobs" / "pipeline"
    record = JobRecord.open(folder)
    assert record.state is JobState.PLANNED
    assert record.plan().cluster == "process"
    assert dict(record.plan().job.inputs) == {"records": f"{pipelines}/records/m"}
    assert len(json.dumps(rows)) < 6000
    assert {row["subdomain"] for row in rows} == {record.plan().gang}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"workers": 0}, "workers must be 1 or more with strategy parameter_server, got 0"),
        ({"ps": 0}, "ps must be 1 or more with strategy parameter_server, got 0"),
        ({"sync": True, "backup_workers": 2}, "strategy.backup_workers must be below the number of workers"),
        ({"backup_workers": 1}, "strategy.backup_workers must be 0 unless"),
        ({"strategy": "magic"}, "strategy must be one of"),
        (
            {"workers": 6},
            "workers must leave the gang at 7 replicas or fewer, as max_active_tasks is 8, got 8",
        ),
    ],
)
def test_a_plan_that_can_not_be_is_refused_by_the_fields_name(
    plan: Any, pipelines: Path, form: dict[str, Any], words: str
) -> None:
    with pytest.raises(StepFailed) as caught:
        plan(**form)
    assert caught.value.failure.failure_class is FailureClass.CONFIG
    assert words in str(caught.value)
    assert not (pipelines / "jobs").exists()


def test_local_strategy_has_a_chief_only(plan: Any) -> None:
    rows, _ = plan(strategy="local")
    assert [row["hostname"] for row in rows] == ["chief-0"]


@pytest.mark.parametrize("strategy", ["local", "mirrored", "parameter_server", "multi_worker"])
def test_an_evaluator_may_stand_beside_any_strategy(plan: Any, strategy: str) -> None:
    rows, context = plan(strategy=strategy, evaluator=True)
    assert rows[-1]["hostname"] == "evaluator-0"
    assert rows[-1]["cmds"] == ["python", "-m", "trainers.runtime.launcher"]
    job = JobRecord.open(context["ti"].xcom["job"]).plan()
    assert job.replica(RoleKind.EVALUATOR, 0).tf_config["task"] == {
        "type": "evaluator",
        "index": 0,
    }
    assert all("evaluator" not in replica.tf_config.get("cluster", {}) for replica in job.replicas)


def test_fixed_values_overrule_the_form() -> None:
    template = JobTemplate("m", "t", fixed={"workers": 3})
    job = template.job({**FORM, "workers": 1}, manifest="m", output="o")
    assert [(role.kind.value, role.replicas) for role in job.roles] == [
        ("chief", 1),
        ("worker", 3),
        ("ps", 1),
    ]
    with pytest.raises(ValueError, match="wrkers"):
        JobTemplate("m", "t", fixed={"wrkers": 3})


def test_a_gang_from_plan_to_cleanup(plan: Any, context_of: Any, cluster: Any) -> None:
    rows, context = plan()
    core = cluster.core_v1()
    service = _gang_task(ServiceOperator, task_id="service")
    service.execute(context_of(service))
    service.execute(context_of(service))  # again: it is there
    gang = rows[0]["subdomain"]
    assert core.read_namespaced_service(gang, "trainyard").spec.cluster_ip == "None"

    errors: list[BaseException] = []

    def run(operator: ReplicaOperator, index: int) -> None:
        try:
            operator.execute(context_of(operator, map_index=index))
        except BaseException as e:  # noqa: BLE001 - shown by the assertion below
            errors.append(e)

    replicas = [_replica(row) for row in rows]
    threads = [threading.Thread(target=run, args=(op, i)) for i, op in enumerate(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []

    verdict, its = _verdict(context_of)
    said = verdict.execute(its)
    assert said == {
        "job": context["ti"].xcom["job"],
        "step": 7,
        "metrics": {"accuracy": 0.5},
        "seconds": {"train": 1.0},
    }

    leftover = {
        "metadata": {"name": "left", "labels": {"trainyard.io/gang": gang}},
        "spec": {"containers": [{"name": "base", "image": "none", "command": ["sleep", "60"]}]},
    }
    core.create_namespaced_pod("trainyard", leftover)
    cleanup = _gang_task(CleanupOperator, task_id="cleanup")
    cleanup.execute(context_of(cleanup))
    cleanup.execute(context_of(cleanup))  # again: there is nothing
    cluster.wait_gone("left", namespace="trainyard", timeout=40)
    assert core.list_namespaced_service("trainyard").items == []


def test_a_replica_of_a_finished_job_starts_no_pod(
    plan: Any, context_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, context = plan()
    JobRecord(context["ti"].xcom["job"]).finish(JobState.SUCCEEDED)
    monkeypatch.setenv("AIRFLOW_CONN_TRAINYARD_KUBERNETES", "")  # nobody may call
    operator = _replica(rows[1])
    assert operator.execute(context_of(operator)) is None


def test_a_replica_of_a_failed_job_fails_for_good_with_the_jobs_failure(plan: Any, context_of: Any) -> None:
    rows, context = plan()
    failure = Failure(FailureClass.INFRA, "the disk is full", role="worker", index=1)
    JobRecord(context["ti"].xcom["job"]).finish(JobState.FAILED, failure=failure)
    operator = _replica(rows[1])
    its = context_of(operator)
    with pytest.raises(StepFailed, match="the disk is full") as caught:
        operator.execute(its)
    assert RetryByClass().evaluate(caught.value, 1, 10, its).action.value == "fail"


def test_what_no_new_pod_could_mend_ends_the_job_for_all(plan: Any, context_of: Any) -> None:
    """A missing Secret, an image that can't be had: no launcher has come up that could say so."""
    secret = {"spec": {"containers": [{"name": "base", "envFrom": [{"secretRef": {"name": "not-there"}}]}]}}
    rows, context = plan(dataclasses.replace(TEMPLATE, pods={"worker": secret}))
    worker = _replica(next(row for row in rows if row["hostname"] == "worker-1"))
    with pytest.raises(StepFailed, match='secret "not-there" not found'):
        worker.execute(context_of(worker, map_index=2))
    outcome = JobRecord(context["ti"].xcom["job"]).outcome()
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.state, outcome.failure.code) == (JobState.FAILED, "kubernetes.missing")
    assert outcome.failure.replica == "worker-1"


def test_a_replica_without_a_job_says_what_to_clear(context_of: Any, plan: Any, tmp_path: Path) -> None:
    rows, _ = plan()
    operator = _replica({**rows[0], "job": str(tmp_path / "gone")})
    with pytest.raises(StepFailed, match="clear the plan task"):
        operator.execute(context_of(operator))


def test_a_killed_replica_may_run_again_at_the_same_address(plan: Any, context_of: Any) -> None:
    rows, _ = plan()
    operator = _replica(rows[1], "import os; os.kill(os.getpid(), 9)")
    its = context_of(operator)
    with pytest.raises(StepFailed, match=r"worker-0[\s\S]*SIGKILL") as caught:
        operator.execute(its)
    assert RetryByClass().evaluate(caught.value, 1, 10, its).action.value == "retry"
    again = _replica(rows[1])
    pod = again.build_pod_request_obj(context_of(again, try_number=2), dry_run=True)
    assert (pod.spec.hostname, pod.spec.subdomain) == ("worker-0", rows[1]["subdomain"])


def test_a_pod_that_dies_after_the_job_succeeded_is_a_success(plan: Any, context_of: Any) -> None:
    rows, _ = plan()
    source = LAUNCHER.replace('if role == "chief":', "if True:") + "\nos.kill(os.getpid(), 9)\n"
    operator = _replica(rows[1], source)
    assert operator.execute(context_of(operator)) is None


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        (
            {
                1: {"class": "PEER_LOST", "reason": "worker-0 went away"},
                3: {"class": "CONFIG", "reason": "no image"},
            },
            "no image",
        ),
        ({}, "the gang ended without an outcome"),
    ],
)
def test_where_the_record_is_silent_the_replicas_decide(
    plan: Any, context_of: Any, failures: dict[int, Any], words: str
) -> None:
    _, context = plan()
    verdict, its = _verdict(context_of, failures=failures)
    with pytest.raises(StepFailed, match=words):
        verdict.execute(its)
    outcome = JobRecord(context["ti"].xcom["job"]).outcome()
    assert outcome is not None
    assert outcome.state is JobState.FAILED


def test_a_verdict_shows_the_jobs_one_failure_card(plan: Any, context_of: Any) -> None:
    _, context = plan()
    failure = Failure(FailureClass.USER, "KeyError: 'x'", role="chief", index=0, detail="Traceback ...")
    JobRecord(context["ti"].xcom["job"]).finish(JobState.FAILED, failure=failure)
    verdict, its = _verdict(context_of)
    with pytest.raises(StepFailed) as caught:
        verdict.execute(its)
    assert str(caught.value).splitlines()[:2] == [
        "FAILED USER: pipeline / verdict",
        "  what:       KeyError: 'x'",
    ]
    assert its["ti"].xcom["failure"]["role"] == "chief"


def test_a_verdict_without_a_job_says_so(context_of: Any, pipelines: Path) -> None:
    verdict, its = _verdict(context_of)
    with pytest.raises(StepFailed, match="no job in"):
        verdict.execute(its)


def test_a_cluster_that_is_not_the_process_kubelet_gets_names(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.operators.gang.is_process_kubelet", lambda api: False)
    _, context = plan()
    replica = JobRecord(context["ti"].xcom["job"]).plan().replicas[1]
    assert replica.address == f"worker-0.{replica.subdomain}.trainyard.svc:2222"


# What the launcher of a worker does whose restarts are used up, while the job goes on.
GIVEN_UP = """
import os, sys
from trainers.job import termination
from trainers.job.errors import InvalidSpec
from trainers.job.failures import Failure, FailureClass
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.replica import Replica
from trainers.runtime.success import lose_worker
replica = Replica(JobRecord.open(os.environ["TRAINYARD_JOB"]), RoleKind.WORKER, 0)
failure = Failure(FailureClass.INFRA, "it was killed", role="worker", index=0)
assert lose_worker(replica, failure) is None
termination.write_failure(failure)
sys.exit(87)
"""


def test_a_worker_that_was_given_up_is_a_failed_task_of_its_own(
    plan: Any, context_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, context = plan()
    worker = _replica(rows[1], GIVEN_UP)
    its = context_of(worker, map_index=1)
    with pytest.raises(StepFailed, match="it was killed") as caught:
        worker.execute(its)
    assert (
        RetryByClass().evaluate(caught.value, 1, 10, its).action.value == "retry"
    )  # another pod may do better
    record = JobRecord(context["ti"].xcom["job"])
    assert record.outcome() is None
    record.finish(JobState.SUCCEEDED, step=7)
    verdict, of_verdict = _verdict(context_of, failures={1: its["ti"].xcom["failure"]})
    assert verdict.execute(of_verdict)["step"] == 7
    assert "worker-0 was given up: INFRA: it was killed" in capsys.readouterr().out


@pytest.mark.parametrize("deferrable", [False, True])
def test_an_author_s_cap_of_restarts_holds(plan: Any, context_of: Any, deferrable: bool) -> None:
    rows, _ = plan(dataclasses.replace(TEMPLATE, restart=RestartPolicy({FailureClass.INFRA: 0})))

    def replica() -> ReplicaOperator:
        with DAG("pipeline"):
            cmds = [sys.executable, "-c", "import sys; sys.exit(87)"]
            return ReplicaOperator(task_id="replica", **{**rows[1], "cmds": cmds}, deferrable=deferrable)

    async def event_of(trigger: Any) -> Any:
        (event,) = [event async for event in trigger.run()]
        return event.payload

    first = replica()
    its = context_of(first, map_index=1)
    with pytest.raises(TaskDeferred if deferrable else StepFailed) as caught:
        first.execute(its)
    if deferrable:  # another process, which knows no more than the DAG file says
        event = asyncio.run(event_of(caught.value.trigger))
        again = replica()
        its = context_of(again, map_index=1)
        with pytest.raises(StepFailed) as caught:
            again.trigger_reentry(its, event)
    assert caught.value.failure.failure_class is FailureClass.INFRA
    assert RetryByClass().evaluate(caught.value, 1, 10, its).action.value == "fail"


class Task(NamedTuple):
    """A task instance, as far as the rule below looks at it."""

    task_id: str
    state: str


def test_a_failed_replica_does_not_decide_the_run() -> None:
    """By Airflow's own rule for which tasks do."""
    with DAG("pipeline") as dag:
        train(trainer="a_trainer", records={"manifest": "m"}, name="digits")
    tasks = [Task(task.task_id, "success") for task in dag.tasks]
    deciding = DagRun._tis_for_dagrun_state(SimpleNamespace(), dag=dag, tis=tasks)
    assert {ti.task_id for ti in deciding} == {"train.verdict"}


def test_a_success_rule_that_can_not_be_kept_is_refused_by_the_plan(plan: Any) -> None:
    template = dataclasses.replace(TEMPLATE, success=Success("fraction", 0.5))
    _, context = plan(template)
    assert JobRecord(context["ti"].xcom["job"]).plan().job.success == Success("fraction", 0.5)
    with pytest.raises(StepFailed, match=r"fraction 0\.5 can't be kept under multi_worker") as caught:
        plan(template, strategy="multi_worker")
    assert caught.value.failure.failure_class is FailureClass.CONFIG


COMMAND = JobTemplate("own", command={"default": ["train", "--fast"], "ps": ["serve"]}, args={"depth": 3})


def test_a_command_in_place_of_a_trainer(plan: Any) -> None:
    rows, context = plan(COMMAND, workers=1, strategy="parameter_server", evaluator=True, epochs=9)
    assert [row["hostname"] for row in rows] == ["ps-0", "worker-0", "chief-0"]
    for row in rows:
        assert row["cmds"] == ["python", "-m", "trainers.runtime.launcher"]
        assert row["env_vars"]["WORLD_SIZE"] == "2"
    record = JobRecord.open(context["ti"].xcom["job"])
    job = record.plan().job
    assert str(job.strategy.kind) == "custom"
    assert job.trainer == ""
    # Of the form what is for training, and what the pipeline has added to it.
    assert job.args["epochs"] == 9
    assert job.args["depth"] == 3
    assert "workers" not in job.args


def test_a_command_alone_needs_no_records_and_no_form() -> None:
    job = JobTemplate("own", command=["train"], fixed={"workers": 3}).job({}, manifest=None, output="o")
    assert dict(job.inputs) == {}
    assert dict(job.args) == {}
    assert [(role.kind.value, role.replicas) for role in job.roles] == [("chief", 1), ("worker", 3)]


@pytest.mark.parametrize("given", [{}, {"trainer": "a", "command": ["b"]}])
def test_a_trainer_or_a_command_and_not_both(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="a trainer module or a command, one of the two"):
        JobTemplate("own", **given)


def test_a_trainer_needs_records(pipelines: Path, context_of: Any) -> None:
    operator = _gang_task(PlanOperator, task_id="plan", template=TEMPLATE, records=None)
    with pytest.raises(StepFailed, match="records must be given to a trainer module"):
        operator.execute(context_of(operator, params=FORM))
