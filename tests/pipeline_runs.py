"""A pipeline's run on a platform that is up, from its trigger to its end, as tests of pipelines see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainyard.platform import Platform

__all__ = ["Run", "patiently", "runner"]

Result = TypeVar("Result")
PATIENCE = 300.0  # seconds without an answer of Airflow's that is no error yet, on a machine that is busy
EVERY = 0.3  # seconds between two looks


class Run:
    """A finished run, as a test reads it."""

    def __init__(self, platform: Platform, run: Any, seconds: float) -> None:
        self.client = platform.airflow
        self.dag_id, self.run_id, self.state, self.seconds = run.dag_id, run.run_id, run.state, seconds
        tasks = patiently(lambda: self.client.tasks(run.dag_id, run.run_id))
        self.tasks = {task.name: task for task in tasks}

    def xcom(self, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """What a task pushed."""
        return self.client.xcom(self.dag_id, self.run_id, task_id, key, map_index)

    def states(self) -> dict[str, str]:
        """Task -> state."""
        return {name: task.state for name, task in self.tasks.items()}

    def timeline(self) -> str:
        """When each task ran, for the test's output."""
        begun = sorted((t.started, name, t) for name, t in self.tasks.items() if t.started is not None)
        rows = [
            f"{t.started - begun[0][0]:7.1f} s  {t.seconds or 0:6.1f} s  {name}  {t.state}"
            for _, name, t in begun
        ]
        return "\n".join([f"{self.dag_id}: {self.seconds:.1f} s from trigger to end, {self.state}", *rows])

    def explain(self) -> str:
        """The timeline, and the log of each failed task: why an assertion did not hold."""
        parts = [self.timeline()]
        for name, task in self.tasks.items():
            if task.state == "failed":
                parts.append(f"--- {name}")
                parts += [
                    str(row)[:2000] for row in self.client.task_log(self.dag_id, self.run_id, task)[-12:]
                ]
        return "\n".join(parts)


def patiently(call: Callable[[], Result], *, sleep: Callable[[float], None] = time.sleep) -> Result:
    """What `call` gives; an Airflow that does not answer is asked again, so the call must bear being made twice."""
    from trainyard.platform.airflow_api import AirflowUnreachable

    until = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except AirflowUnreachable:
            if time.monotonic() > until:
                raise
            sleep(EVERY)


def runner(platform: Platform, *, hang_seconds: float = 400) -> Callable[..., Run]:
    """A function that triggers a DAG, waits for its end and gives the run.

    `meanwhile` is called with the run's id again and again. A run of more than `hang_seconds` hangs.
    """
    from trainyard.platform.pipeline_run import follow, start_run

    def run(
        dag_id: str,
        conf: dict[str, Any] | None = None,
        *,
        meanwhile: Callable[[str], None] = lambda run_id: None,
    ) -> Run:
        client = platform.airflow
        dag = patiently(lambda: client.wait_for_dag(dag_id))
        begun = time.monotonic()
        started = start_run(client, dag, conf or {})
        patiently(lambda: client.set_paused(dag_id, False))
        while True:
            snapshot = patiently(lambda: next(follow(client, started, platform.storage)))
            meanwhile(started.run_id)
            if snapshot.run.is_over:
                break
            assert time.monotonic() - begun < hang_seconds, (
                f"the run hangs: {Run(platform, snapshot.run, hang_seconds).explain()}"
            )
            time.sleep(EVERY)
        patiently(lambda: client.set_paused(dag_id, True))
        return Run(platform, snapshot.run, time.monotonic() - begun)

    return run
