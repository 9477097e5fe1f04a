"""What failed in a run, as one failure card: the failure that our operators hand over, else the task's own error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.job.failures import Failure, FailureClass
from trainyard.platform.airflow_api import AirflowClient, DagRun, TaskInstance

__all__ = ["FailedTask", "failed_task", "failure_of_log"]

# Where the operators put it: trainyard.failing.FAILURE_KEY, which can't be imported without Airflow.
_FAILURE_KEY = "failure"
_LOG_TAIL = 15


@dataclass(frozen=True)
class FailedTask:
    """The task that explains a failed run, and why it failed."""

    task: TaskInstance
    failure: Failure
    page: str

    def card(self) -> str:
        """The failure card, with where to read on."""
        return f"{self.failure.card(self.task.name)}\n  {'its page:':<12}{self.page}"


def failed_task(client: AirflowClient, run: DagRun, tasks: Sequence[TaskInstance]) -> FailedTask | None:
    """The failure that explains a failed run, None when no task failed (somebody marked the run).

    A gang's verdict speaks for its replicas; otherwise the first task that failed is the cause of the others.
    """
    failed = [task for task in tasks if task.state == "failed"]
    failed.sort(key=lambda task: (not task.task_id.endswith("verdict"), task.ended or 0.0))
    for task in failed:
        value = client.xcom(run.dag_id, run.run_id, task.task_id, _FAILURE_KEY, task.map_index)
        if isinstance(value, Mapping):
            return _found(client, run, task, Failure.from_dict(value))
    if not failed:
        return None
    return _found(client, run, failed[0], failure_of_log(client.task_log(run.dag_id, run.run_id, failed[0])))


def failure_of_log(events: Sequence[Mapping[str, Any]]) -> Failure:
    """The failure that a task's log tells: its last error with the frames of the user's own code."""
    for event in reversed(events):
        for error in event.get("error_detail") or ():
            frames = [f for f in error.get("frames", ()) if not _is_foreign(f["filename"])]
            trace = [f'File "{f["filename"]}", line {f["lineno"]}, in {f["name"]}' for f in frames]
            reason = f"{error['exc_type']}: {error['exc_value']}"
            # What Python raises by itself is the code's fault as long as nothing says otherwise.
            return Failure(
                FailureClass.USER, reason, code=f"python.{error['exc_type']}", detail="\n".join(trace)
            )
    tail = tuple(str(event.get("event", "")) for event in events[-_LOG_TAIL:])
    return Failure(
        FailureClass.INFRA, "the task ended without saying why", code="airflow.task", log_tail=tail
    )


def _is_foreign(filename: str) -> bool:
    parts = Path(filename).parts
    return "site-packages" in parts or any(part.startswith("python3.") for part in parts)


def _found(client: AirflowClient, run: DagRun, task: TaskInstance, failure: Failure) -> FailedTask:
    return FailedTask(task, failure, client.page(run.dag_id, run.run_id, task))
