"""Finding and removing what a lost Airflow has left on a cluster: Jobs, pods and Services that nobody waits for.

    for orphan in find_orphans(core_api(), "trainyard"):
        print(orphan.kind, orphan.name, orphan.why)

Only objects with our label are looked at. A gang is an orphan once its job is over, or its job's folder is gone; a pod
that has ended is one once nobody has collected it, and one whose deletion has not come to its end, as its node is lost;
whatever is older than `older_than` is one without a question.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job import labels
from trainers.job.record import JobRecord
from trainers.job.shared import ENV_STORE
from trainyard.cluster import delete_job, list_jobs
from trainyard.shared_files import job_files

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, V1Job, V1Pod, V1Service

__all__ = ["GRACE", "Orphan", "find_orphans", "remove_orphans"]

GRACE = 600.0
"""Seconds after a job's or pod's end within which its own tasks clean up."""

_STUCK = 300.0  # seconds beyond its deletion's end after which nothing will end a pod; clocks differ by less
_TIMEOUT = 30  # seconds a request
_PAGE = 500


@dataclasses.dataclass(frozen=True)
class Orphan:
    """An object that nobody waits for: "job", "pod" or "service"; its gang ("" for a step), age in seconds, and why.

    A `stuck` one was deleted long ago, and goes by force only.
    """

    kind: str
    name: str
    gang: str
    age: float
    why: str
    stuck: bool = False


def find_orphans(
    api: CoreV1Api,
    namespace: str,
    *,
    grace: float = GRACE,
    older_than: float | None = None,
    now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.timezone.utc),
) -> list[Orphan]:
    """The orphans of a namespace, the oldest first. Raises ApiException."""
    moment = now()
    selector = f"{labels.LABEL_MANAGED_BY}={labels.MANAGED_BY}"
    things: list[tuple[str, Any]] = [("job", job) for job in list_jobs(api, namespace, selector)]
    things += [("pod", pod) for pod in _all(api.list_namespaced_pod, namespace, selector)]
    things += [("service", s) for s in _all(api.list_namespaced_service, namespace, selector) if _gang(s)]
    jobs: dict[Path, tuple[str, float] | None] = {}
    found = []
    for kind, thing in things:
        folder = _job_folder(thing)
        if folder is not None and folder not in jobs:
            jobs[folder] = _job_end(folder, moment)
        age = _age(thing, moment)
        ended = _ENDED[kind](thing, moment)
        why = _why(age, jobs[folder] if folder else None, ended, grace, older_than)
        if kind == "pod" and _of_a_job(thing):
            why = ""  # it goes with its Job
        overdue = _overdue(thing, moment) if kind == "pod" and ended is None else 0.0
        stuck = overdue > _STUCK
        if stuck:
            why = f"its node has not ended it {overdue:.0f} s after it should have"
        if why:
            found.append(Orphan(kind, thing.metadata.name, _gang(thing), age, why, stuck))
    return sorted(found, key=lambda orphan: -orphan.age)


def remove_orphans(api: CoreV1Api, namespace: str, orphans: Iterable[Orphan]) -> list[Orphan]:
    """Delete them; those that were still there. Raises ApiException for what can't be deleted."""
    from kubernetes.client.exceptions import ApiException

    removed = []
    for orphan in orphans:
        if orphan.kind == "job":
            if delete_job(api, orphan.name, namespace):
                removed.append(orphan)
            continue
        delete = api.delete_namespaced_pod if orphan.kind == "pod" else api.delete_namespaced_service
        try:
            force = {"grace_period_seconds": 0} if orphan.stuck else {}
            delete(orphan.name, namespace, _request_timeout=_TIMEOUT, **force)
        except ApiException as e:
            if e.status != 404:
                raise
        else:
            removed.append(orphan)
    return removed


def _all(listing: Callable[..., Any], namespace: str, selector: str) -> list[Any]:
    """All pages of a list."""
    rows: list[Any] = []
    token = None
    while True:
        page = listing(
            namespace, label_selector=selector, limit=_PAGE, _continue=token, _request_timeout=_TIMEOUT
        )
        rows += page.items
        token = page.metadata._continue if page.metadata else None
        if not token:
            return rows


def _gang(thing: V1Job | V1Pod | V1Service) -> str:
    return str((thing.metadata.labels or {}).get(labels.LABEL_GANG, ""))


def _age(thing: V1Job | V1Pod | V1Service, moment: dt.datetime) -> float:
    return (moment - thing.metadata.creation_timestamp).total_seconds()


def _job_folder(thing: V1Job | V1Pod | V1Service) -> Path | None:
    folder = (thing.metadata.annotations or {}).get(labels.ANNOTATION_JOB)
    return Path(folder) if folder else None


def _job_end(folder: Path, moment: dt.datetime) -> tuple[str, float] | None:
    """What became of a job and for how many seconds it has been so; None while it goes on."""
    if os.environ.get(ENV_STORE):
        with job_files(folder, "plan.json", "outcome.json", writes=False):
            return _end_here(folder, moment)
    return _end_here(folder, moment)


def _end_here(folder: Path, moment: dt.datetime) -> tuple[str, float] | None:
    if not (folder / "plan.json").exists():
        # Of a storage root that isn't mounted here every job would seem gone.
        return ("its job's folder is gone", float("inf")) if folder.parent.parent.is_dir() else None
    record = JobRecord(folder)
    outcome = record.outcome()
    if outcome is None:
        return None
    return f"its job has {outcome.state.value.lower()}", moment.timestamp() - outcome.at


def _of_a_job(pod: V1Pod) -> bool:
    return any(owner.kind == "Job" for owner in pod.metadata.owner_references or ())


def _job_ended(job: V1Job, moment: dt.datetime) -> float | None:
    """How many seconds ago an Indexed Job ended, None while it runs."""
    ends = [
        condition.last_transition_time
        for condition in (job.status.conditions if job.status else None) or ()
        if condition.status == "True" and condition.type in ("Complete", "Failed")
    ]
    return (moment - max(ends)).total_seconds() if ends else None


def _ended(pod: V1Pod, moment: dt.datetime) -> float | None:
    """How many seconds ago the pod ended, None while it runs."""
    if pod.status is None or pod.status.phase not in ("Succeeded", "Failed"):
        return None
    ends = [
        status.state.terminated.finished_at
        for status in pod.status.container_statuses or ()
        if status.state and status.state.terminated and status.state.terminated.finished_at
    ]
    return (moment - max(ends)).total_seconds() if ends else _age(pod, moment)


def _overdue(pod: V1Pod, moment: dt.datetime) -> float:
    """How many seconds ago the pod's deletion should have been over."""
    due = pod.metadata.deletion_timestamp
    return max(0.0, (moment - due).total_seconds()) if due else 0.0


_ENDED: Mapping[str, Callable[[Any, dt.datetime], float | None]] = {
    "job": _job_ended,
    "pod": _ended,
    "service": lambda service, moment: None,
}


def _why(
    age: float,
    job: tuple[str, float] | None,
    ended: float | None,
    grace: float,
    older_than: float | None,
) -> str:
    if older_than is not None and age > older_than:
        return f"it is older than {older_than:g} s"
    if job is not None and job[1] > grace and age > grace:
        return job[0]
    if ended is not None and ended > grace:
        return "it has ended and nobody has collected it"
    return ""
