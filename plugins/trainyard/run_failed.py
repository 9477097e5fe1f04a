"""What a failed run leaves on the cluster, taken away by a callback of its DAG.

Airflow skips all tasks of a run that is out of time (`dagrun_timeout`), the gang's cleanup among them, and tells
nobody who runs their pods where a task is neither in a worker nor with a triggerer just then: one that is deferred
while no triggerer runs, say. The `on_failure_callback` of the DAG is called in the DAG processor whatever became of
its tasks.

A gang goes whole where the run is out of time. Of the run's other pods those go that still run: a pod that has ended
was collected, or is kept because its author wants it so.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainers.job import labels

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

__all__ = ["RunFailed", "on_failed_run"]

log = logging.getLogger(__name__)

_OUT_OF_TIME = "timed_out"  # Airflow's word
_SECONDS = 30.0  # how long an API is waited for: Airflow gives a DAG file's callbacks 50 s
_TIMEOUT = 10  # seconds a request


class RunFailed:
    """The callback of one DAG; `gangs` are what takes its gangs away, called with the id of a run."""

    def __init__(self) -> None:
        self.gangs: list[Callable[[str], None]] = []

    def __call__(self, context: Mapping[str, Any]) -> None:
        """Take away what is left; one that can't be must not keep the others."""
        dag_id, run_id = context["dag"].dag_id, context["run_id"]
        gangs = self.gangs if context.get("reason") == _OUT_OF_TIME else ()
        run = context.get("dag_run")
        failed = None
        for act in (*(lambda g=gang: g(run_id) for gang in gangs), lambda: _end_pods(dag_id, run_id, run)):
            try:
                act()
            except Exception as e:  # noqa: BLE001 - the others have their turn, and it is raised after that
                failed = failed or e
        if failed is not None:
            raise failed


def on_failed_run(dag: Any) -> RunFailed:
    """The DAG's callback, beside those it has already."""
    given = dag.on_failure_callback or []
    callbacks = list(given) if isinstance(given, list | tuple) else [given]
    for callback in callbacks:
        if isinstance(callback, RunFailed):
            return callback
    ours = RunFailed()
    dag.on_failure_callback = [*callbacks, ours]
    dag.has_on_failure_callback = True  # what the scheduler goes by, said when the DAG was made
    return ours


def _end_pods(dag_id: str, run_id: str, run: Any) -> None:
    """Delete the run's pods that have not ended, but none of a task that was cleared since."""
    from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
    from kubernetes.client.exceptions import ApiException

    from trainyard.cluster import core_api
    from trainyard.patience import patiently
    from trainyard.pods import has_ended
    from trainyard.settings import PipelineSettings

    api, namespace = core_api(), PipelineSettings.from_environment().namespace
    selector = ",".join(
        (
            f"{labels.LABEL_MANAGED_BY}={labels.MANAGED_BY}",
            f"dag_id={make_safe_label_value(dag_id)}",
            f"run_id={make_safe_label_value(run_id)}",
        )
    )
    pods = patiently(
        lambda: api.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=_TIMEOUT).items,
        seconds=_SECONDS,
    )
    ended = getattr(run, "end_date", None)
    for pod in pods:
        if has_ended(pod) or _is_younger(pod, ended):
            continue
        log.warning(
            "run %s of %s has failed and pod %s still runs: it is deleted", run_id, dag_id, pod.metadata.name
        )
        try:
            api.delete_namespaced_pod(pod.metadata.name, namespace, _request_timeout=_TIMEOUT)
        except ApiException as e:
            if e.status != 404:  # somebody was faster
                raise


def _is_younger(pod: V1Pod, moment: dt.datetime | None) -> bool:
    return moment is not None and pod.metadata.creation_timestamp > moment
