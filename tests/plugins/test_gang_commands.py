"""A command of one's own in real pods of a process kubelet: plan, replicas, a killed pod, verdict, cleanup."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from trainyard.failing import StepFailed
from trainyard.operators.gang import (
    CleanupOperator,
    JobTemplate,
    PlanOperator,
    ServiceOperator,
    VerdictOperator,
)
from trainyard.operators.replica import ReplicaOperator

from trainers.job.policies import Success
from trainers.job.record import JobRecord
from trainers.job.spec import Resources

REPO = Path(__file__).resolve().parents[2]
HANG = 240.0  # seconds
TEMPLATE = JobTemplate(
    "line",
    command=["python", "-m", "line_by_sockets"],
    fixed={"workers": 2, "steps": 200},
    args={"pause": 0.05},
    success=Success("all_workers"),
    resources={"default": Resources(0.1, "128Mi")},
)


def _until(what: str, found: Any) -> Any:
    deadline = time.monotonic() + HANG
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


class Gang:
    """The tasks of a training group, as Airflow runs them: a retry for a replica that may have one."""

    def __init__(self, context_of: Any, template: JobTemplate) -> None:
        self._context_of = context_of
        plan = self._task(PlanOperator, task_id="plan", template=template, records=None)
        context = context_of(plan, params={})
        rows = plan.execute(context)
        self.record = JobRecord.open(context["ti"].xcom["job"])
        service = self._task(ServiceOperator, task_id="service")
        service.execute(context_of(service))
        self.errors: list[BaseException] = []
        self.tries: dict[str, int] = {}
        self._threads = [threading.Thread(target=self._run, args=(row, i)) for i, row in enumerate(rows)]
        for thread in self._threads:
            thread.start()

    def _task(self, kind: Any, **options: Any) -> Any:
        with DAG("pipeline"):
            return kind(group="train", **options)

    def _run(self, row: dict[str, Any], index: int) -> None:
        path = os.pathsep.join([str(REPO / "docs" / "examples"), str(REPO)])
        row = {**row, "env_vars": {**row["env_vars"], "PYTHONPATH": path}}
        for number in (1, 2):
            self.tries[row["hostname"]] = number
            with DAG("pipeline"):
                operator = ReplicaOperator(task_id="replica", **row)
            try:
                operator.execute(self._context_of(operator, map_index=index, try_number=number))
            except StepFailed as e:
                if number == 2 or not e.failure.policy.retry:
                    self.errors.append(e)
                    return
            else:
                return

    def end(self) -> dict[str, Any]:
        """What the verdict says, after all replicas have ended and the cleanup has cleaned up."""
        for thread in self._threads:
            thread.join()
        verdict = self._task(VerdictOperator, task_id="verdict", replica_task="replica")
        said = verdict.execute(self._context_of(verdict))
        cleanup = self._task(CleanupOperator, task_id="cleanup")
        cleanup.execute(self._context_of(cleanup))
        assert self.errors == []
        return dict(said)


@pytest.mark.timeout(HANG + 60)
def test_a_gang_of_plain_python_comes_through_a_killed_pod(
    pipelines: Path, context_of: Any, cluster: Any
) -> None:
    gang = Gang(context_of, TEMPLATE)
    try:
        _until("a checkpoint", (gang.record.folder / "checkpoints" / "line.json").exists)
        core = cluster.core_v1()
        selector = "trainyard.io/role=worker,trainyard.io/index=0"
        (pod,) = core.list_namespaced_pod("trainyard", label_selector=selector).items
        core.delete_namespaced_pod(pod.metadata.name, "trainyard", grace_period_seconds=0)
    finally:
        said = gang.end()
    assert said["step"] == 200
    assert said["metrics"]["w"] == pytest.approx(3, abs=0.05)
    assert said["metrics"]["b"] == pytest.approx(2, abs=0.05)
    assert gang.tries == {"worker-0": 2, "worker-1": 1, "chief-0": 1}
    assert gang.record.generation().number >= 2
    log = (gang.record.folder / "logs" / "worker-1.log").read_text()
    assert "goes on from step" in log.split("goes on from step 0", 1)[1], "the others waited, and went on"
    assert core.list_namespaced_pod("trainyard").items == []
    assert core.list_namespaced_service("trainyard").items == []
