"""Large role groups as real Indexed Jobs on the process kubelet: their runs, failures, waiting, cleaning up."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from kubernetes.client import (
    BatchV1Api,
    V1Job,
)
from trainyard.failing import RetryByClass, StepFailed
from trainyard.kubelet import FakeCluster
from trainyard.operators.gang import CleanupOperator, JobTemplate, PlanOperator
from trainyard.operators.replica import ReplicaOperator
from trainyard.reaper import find_orphans, remove_orphans
from trainyard.trigger_form import DEFAULTS
from trainyard.triggers.job import JobTrigger

from tests.plugins.test_gang_operators import LAUNCHER, _replica
from trainers.job.failures import FailureClass
from trainers.job.policies import Budgets, RestartPolicy, Success
from trainers.job.record import JobRecord, JobState
from trainers.job.replica_log import ReplicaLog
from trainers.job.resources import Resources
from trainers.job.spec import RoleKind

SMALL = {"default": Resources(0.05, "64Mi")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    """Restarts pods of a Job without waiting long."""
    with FakeCluster(backoff=(0.05, 0.2)) as running:
        yield running


WRITES = """
from pathlib import Path
from trainers.job.replica_log import ReplicaLog
ReplicaLog(Path(os.environ["TRAINYARD_JOB"]), f"{role}-{index}").write(f"here is {role} {index}\\n".encode())
"""
LAUNCHES = LAUNCHER.replace('print("here is"', f'{WRITES}print("here is"')


@pytest.fixture
def group(pipelines: Path, context_of: Any) -> Any:
    """Plans a gang of 2 workers that are one Job; gives a function that makes the operator of a row with a source."""

    def make(source: str = LAUNCHES, **options: Any) -> tuple[JobRecord, list[ReplicaOperator]]:
        template = JobTemplate("digits", "a_trainer", resources=SMALL, indexed_above=1, **options)
        with DAG("pipeline", max_active_tasks=8):
            plan = PlanOperator(task_id="plan", group="train", template=template, records="storage://m")
        context = context_of(plan, params={**DEFAULTS, "workers": 2, "ps": 1})
        rows = plan.execute(context)
        assert [row["hostname"] for row in rows] == ["worker", "ps-0", "chief-0"]
        found = [_replica(row, source) for row in rows]
        return JobRecord(context["ti"].xcom["job"]), found

    return make


def _batch(cluster: FakeCluster) -> BatchV1Api:
    return BatchV1Api(cluster.core_v1().api_client)


def _jobs(cluster: FakeCluster) -> list[V1Job]:
    return list(_batch(cluster).list_namespaced_job("trainyard").items)


def _until(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def _no_pods(cluster: FakeCluster) -> bool:
    return not cluster.core_v1().list_namespaced_pod("trainyard").items


def _run_all(replicas: list[ReplicaOperator], context_of: Any) -> None:
    errors: list[BaseException] = []

    def run(operator: ReplicaOperator, index: int) -> None:
        try:
            operator.execute(context_of(operator, map_index=index))
        except BaseException as e:  # noqa: BLE001 - shown by the assertion below
            errors.append(e)

    threads = [threading.Thread(target=run, args=(op, i)) for i, op in enumerate(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_gang_whose_workers_are_one_job_runs(
    group: Any, context_of: Any, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    _, replicas = group()
    _run_all(replicas, context_of)
    said = capsys.readouterr().out
    for index in (0, 1):
        assert f"[worker-{index}] here is worker {index}" in said
    assert _jobs(cluster) == []
    _until(lambda: _no_pods(cluster), "pods are left")


COMMAND = """
import os, pathlib
folder = pathlib.Path(os.environ["TRAINYARD_CHECKPOINTS"])
names = ("RANK", "WORLD_SIZE", "TRAINYARD_ROLE", "TRAINYARD_INDEX", "TRAINYARD_ADDRESS")
rank, size, role, index, address = (os.environ[name] for name in names)
(folder / rank).write_text(f"{role}-{index} {address} {size}")
lost = folder / "lost"
if (role, index) == ("worker", "1") and not lost.exists():
    lost.touch()
    os.kill(os.getppid(), 9)
"""


def test_the_real_launcher_runs_in_a_job_and_a_lost_pod_comes_back_to_its_gang(
    pipelines: Path, context_of: Any, cluster: FakeCluster
) -> None:
    """A job of a plain command: three workers that are one Job, a chief; worker-1 is lost with its launcher."""
    template = JobTemplate(
        "own",
        command=[sys.executable, "-c", COMMAND],
        resources=SMALL,
        fixed={"workers": 3},
        success=Success("all_workers"),
        indexed_above=2,
    )
    with DAG("pipeline", max_active_tasks=8):
        operator = PlanOperator(task_id="plan", group="train", template=template, records=None)
    context = context_of(operator, params=DEFAULTS)
    rows = operator.execute(context)
    assert [row["hostname"] for row in rows] == ["worker", "chief-0"]
    _run_all([_replica(row, row["cmds"]) for row in rows], context_of)
    record = JobRecord(context["ti"].xcom["job"])
    assert record.outcome().state is JobState.SUCCEEDED
    assert record.generation().number > 0
    plan = record.plan()
    world = [*plan.role(RoleKind.CHIEF), *plan.role(RoleKind.WORKER)]
    told = {str(rank): f"{r.replica} {r.address} 4" for rank, r in enumerate(world)}
    folder = Path(plan.job.output) / "checkpoints"
    assert {rank: (folder / rank).read_text() for rank in told} == told
    assert _jobs(cluster) == []


@pytest.mark.parametrize(
    ("ends", "failure_class", "words", "again"),
    [
        ("sys.exit(81 if index == '1' else 0)", "USER", "exit code 81", "fail"),
        ("sys.exit(83)", "CONFIG", "2 of 2 replicas failed: worker-0, worker-1", "fail"),
        ("os.kill(os.getpid(), 9)", "INFRA", "SIGKILL", "fail"),
    ],
)
def test_a_group_whose_pods_fail_is_one_card(
    group: Any,
    context_of: Any,
    cluster: FakeCluster,
    ends: str,
    failure_class: str,
    words: str,
    again: str,
) -> None:
    restart = RestartPolicy(
        dict.fromkeys((FailureClass.INFRA, FailureClass.STALLED, FailureClass.PEER_LOST), 1)
    )
    source = f"import os, sys; index = os.environ['TRAINYARD_INDEX']; {ends}"
    _, (workers, *_) = group(source, restart=restart)
    context = context_of(workers, map_index=0)
    with pytest.raises(StepFailed) as caught:
        workers.execute(context)
    assert caught.value.failure.failure_class.value == failure_class
    assert words in caught.value.failure.reason
    assert caught.value.failure.role == "worker"
    assert RetryByClass().evaluate(caught.value, 1, 10, context).action.value == again
    assert _jobs(cluster) == []


def test_a_failed_group_of_a_job_that_has_succeeded_is_no_failure(group: Any, context_of: Any) -> None:
    source = LAUNCHER.replace('if role == "chief":', "if True:") + "\nsys.exit(81)\n"
    record, (workers, *_) = group(source)
    workers.execute(context_of(workers, map_index=0))
    assert record.outcome().state is JobState.SUCCEEDED


def test_the_record_comes_first_for_a_group_too(
    group: Any, context_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, (workers, *_) = group()
    record.finish(JobState.SUCCEEDED)
    monkeypatch.setenv("AIRFLOW_CONN_TRAINYARD_KUBERNETES", "")  # nobody may call
    assert workers.execute(context_of(workers, map_index=0)) is None


def _deferred(operator: ReplicaOperator, context: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    assert caught.value.method_name == "group_reentry"
    return caught.value


def _made_anew(trigger: Any) -> JobTrigger:
    """The trigger as the triggerer makes it, from what is stored."""
    path, arguments = trigger.serialize()
    assert path == "trainyard.triggers.job.JobTrigger"
    return JobTrigger(**{**json.loads(json.dumps(arguments)), "poll": 0.1})


async def _fired(trigger: JobTrigger) -> dict[str, Any]:
    async for event in trigger.run():
        return event.payload
    raise AssertionError("it fires")


def test_a_group_waits_without_a_slot_and_is_found_again(
    group: Any, context_of: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    record, (workers, *_) = group()
    trigger = _made_anew(_deferred(workers, context_of(workers, map_index=0)).trigger)
    # A worker that was lost between making the Job and giving up its slot: the next try goes on with the same Job.
    (made,) = _jobs(cluster)
    _deferred(workers, context_of(workers, map_index=0, try_number=2))
    assert [job.metadata.uid for job in _jobs(cluster)] == [made.metadata.uid]
    _until(lambda: _jobs(cluster)[0].status.ready == 2, "the pods")
    said: list[str] = []
    trigger.tell = lambda stamp, text: said.append(text)

    async def live() -> dict[str, Any]:
        fired = asyncio.ensure_future(_fired(trigger))
        await asyncio.to_thread(
            _until, lambda: "[worker-0] here is worker 0" in said, "its line, while it runs"
        )
        log = ReplicaLog(record.folder, "worker-1")
        log.write(b"a word\n")
        await asyncio.to_thread(_until, lambda: "[worker-1] a word" in said, "the word")
        assert not fired.done()
        log.write(b"the last word\n")
        record.finish(JobState.SUCCEEDED)
        return await fired

    event = asyncio.run(live())
    assert event == {"told": True}
    assert (said[-1], said.count("[worker-1] a word")) == ("[worker-1] the last word", 1)
    capsys.readouterr()
    workers.group_reentry(context_of(workers, map_index=0), event)
    assert "[worker-1]" not in capsys.readouterr().out, "it was told already"
    assert _jobs(cluster) == []


def test_the_last_lines_of_a_group_are_told_where_the_triggerer_sees_no_folder(
    group: Any, context_of: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    record, (workers, *_) = group()
    trigger = _made_anew(_deferred(workers, context_of(workers, map_index=0)).trigger)
    trigger.job = "/not/here"
    _until(lambda: _jobs(cluster)[0].status.ready == 2, "the pods")
    ReplicaLog(record.folder, "worker-1").write(b"a word\n")
    record.finish(JobState.SUCCEEDED)
    assert asyncio.run(_fired(trigger)) == {}
    workers.group_reentry(context_of(workers, map_index=0), {})
    assert "[worker-1] a word" in capsys.readouterr().out
    assert _jobs(cluster) == []


def test_a_deferred_group_that_does_not_fit_is_released(
    group: Any, context_of: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    huge = {**SMALL, "worker": Resources(0.05, "900Ti")}
    template = {"budgets": Budgets(schedule=0.5)}
    record, (workers, *_) = group(**template)
    workers.pod_resources = huge["worker"]
    trigger = _made_anew(_deferred(workers, context_of(workers, map_index=0)).trigger)
    event = asyncio.run(_fired(trigger))
    context = context_of(workers, map_index=0)
    with pytest.raises(StepFailed, match="Insufficient memory") as caught:
        workers.group_reentry(context, event)
    assert caught.value.failure.failure_class is FailureClass.QUOTA
    assert RetryByClass().evaluate(caught.value, 1, 10, context).action.value == "retry"
    assert _jobs(cluster) == []
    _until(lambda: _no_pods(cluster), "pods are left")
    assert record.outcome() is None


def test_a_killed_group_leaves_nothing(
    group: Any, context_of: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    _, (workers, *_) = group()
    trigger = _made_anew(_deferred(workers, context_of(workers, map_index=0)).trigger)
    _until(lambda: _jobs(cluster)[0].status.ready == 2, "the pods")
    asyncio.run(trigger.on_kill())
    assert _jobs(cluster) == []
    _until(lambda: _no_pods(cluster), "pods are left")
    asyncio.run(trigger.on_kill())  # again: there is nothing
    with pytest.raises(StepFailed, match="deleted before it ended") as caught:
        workers.group_reentry(context_of(workers, map_index=0), {})
    assert caught.value.failure.failure_class is FailureClass.PREEMPTED

    _deferred(workers, context_of(workers, map_index=0))
    workers.on_kill()
    assert _jobs(cluster) == []


def test_cleanup_and_the_reaper_delete_jobs(
    group: Any, context_of: Any, cluster: FakeCluster, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    _, (workers, *_) = group()
    _deferred(workers, context_of(workers, map_index=0))
    with DAG("pipeline"):
        cleanup = CleanupOperator(group="train", task_id="cleanup")
    cleanup.execute(context_of(cleanup))
    assert _jobs(cluster) == []
    assert _no_pods(cluster)

    record, (workers, *_) = group()
    _deferred(workers, context_of(workers, map_index=0))
    _until(lambda: _jobs(cluster)[0].status.ready == 2, "the pods")
    api = cluster.core_v1()
    assert find_orphans(api, "trainyard") == []
    record.finish(JobState.SUCCEEDED)
    found = find_orphans(api, "trainyard", grace=0.0)
    assert [(o.kind, o.name) for o in found] == [("job", f"{record.plan().gang}-worker")]
    assert remove_orphans(api, "trainyard", found) == found
    assert remove_orphans(api, "trainyard", found) == []
    _until(lambda: _no_pods(cluster), "pods are left")
