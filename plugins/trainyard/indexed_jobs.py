"""A large role group as one Indexed Job: its manifest, whether it comes up in time, and what its end means.

    job_manifest(pod, name=..., completions=64, restart=job.restart, version=(1, 33))

Airflow's cost is a task's, and a task a replica is what makes large gangs dear. The pods of an Indexed Job have a
stable host name and index, so that the same launcher runs in them. What restarts them is Kubernetes, by the same table
of failures, as far as the server's Jobs know how:

    1.24  Indexed Jobs
    1.26  a failure policy: what is nobody's fault is free, what nobody can retry is not tried again
    1.29  a limit of restarts for each index

Plain functions over manifests and the Kubernetes client's objects, of the blocking client or the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainers.job import labels
from trainers.job.failures import KUBERNETES_REASONS, RETRY_POLICIES, Failure, FailureClass, classify
from trainers.job.placement import KUEUE_QUEUE
from trainers.job.pod_overlay import BASE
from trainers.job.policies import RestartPolicy
from trainyard.failing import most_telling
from trainyard.given_up import Lookout, PodGivenUp, PodLost
from trainyard.pods import COMPLETION_INDEX, MISSING_HINT, failure_of_pod, has_ended, says_why

if TYPE_CHECKING:
    from kubernetes.client import V1Job, V1Pod

__all__ = ["ABOVE", "GroupWatch", "all_are_there", "end_of", "failure_of_job", "job_manifest", "threshold"]

ABOVE = 32
"""Replicas of a role above which it is an Indexed Job, on clusters that have them."""

Version = tuple[int, int]

_INDEXED: Version = (1, 24)
_POLICY: Version = (1, 26)
_PER_INDEX: Version = (1, 29)
_TTL_S = 3600  # seconds that a Job stays when Airflow, which deletes it, has gone
_SHOWN = 5


def threshold(asked: int | None, version: Version, *, one_machine: bool) -> tuple[int, str]:
    """Above how many replicas a role is an Indexed Job (0: never), and why not where that was asked.

    None asks for `ABOVE` on a cluster, and for none on one machine.
    """
    if asked == 0 or (asked is None and one_machine):
        return 0, ""
    above = ABOVE if asked is None else asked
    if version < _INDEXED:
        said, needed = (".".join(map(str, v)) for v in (version, _INDEXED))
        return 0, f"a task a replica: the cluster is Kubernetes {said}, Indexed Jobs need {needed}"
    return above, ""


# ---- the manifest


def job_manifest(
    pod: Mapping[str, Any],
    *,
    name: str,
    completions: int,
    restart: RestartPolicy,
    version: Version,
    queue: str = "",
) -> dict[str, Any]:
    """The Job whose every pod is like `pod`, a Pod's manifest; with a `queue` Kueue says when it starts."""
    meta, spec = pod["metadata"], dict(pod["spec"])
    spec.pop("hostname", None)  # the Job's own
    deadline = spec.pop("activeDeadlineSeconds", None)  # of all pods together
    spec["containers"] = [_indexed(c) if c["name"] == BASE else c for c in spec["containers"]]
    known = meta["labels"]
    kept = (labels.LABEL_MANAGED_BY, labels.LABEL_COMPONENT, labels.LABEL_PIPELINE, labels.LABEL_GANG)
    own = {key: known[key] for key in (*kept, labels.LABEL_ROLE) if key in known}
    annotations = {k: v for k, v in (meta.get("annotations") or {}).items() if k == labels.ANNOTATION_JOB}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": {**own, **({KUEUE_QUEUE: queue} if queue else {})},
            "annotations": annotations,
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": completions,
            "parallelism": completions,
            **_restarts(restart, completions, version),
            **({"activeDeadlineSeconds": deadline} if deadline else {}),
            "ttlSecondsAfterFinished": _TTL_S,
            **({"suspend": True} if queue else {}),
            "template": {
                "metadata": {"labels": known, "annotations": meta.get("annotations") or {}},
                "spec": spec,
            },
        },
    }


def _indexed(container: Mapping[str, Any]) -> dict[str, Any]:
    """The container that learns its index from its pod's annotation."""
    origin = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
    env = [row for row in container.get("env") or () if row["name"] != labels.ENV_INDEX]
    return {**container, "env": [*env, {"name": labels.ENV_INDEX, "valueFrom": origin}]}


def _restarts(restart: RestartPolicy, completions: int, version: Version) -> dict[str, Any]:
    """How often pods are replaced. A Job counts failures, not classes of them: the largest cap holds for all."""
    charged = [cls for cls, policy in RETRY_POLICIES.items() if policy.retry and policy.charged]
    cap = int(max(restart.cap(cls) for cls in charged))
    if version < _POLICY:
        return {"backoffLimit": cap * completions}
    if version < _PER_INDEX:
        return {"backoffLimit": cap * completions, "podFailurePolicy": {"rules": _rules("FailJob")}}
    return {"backoffLimitPerIndex": cap, "podFailurePolicy": {"rules": _rules("FailIndex")}}


def _rules(never_again: str) -> list[dict[str, Any]]:
    """The table of failures as a pod failure policy; the first rule that fits holds, and what none fits counts."""
    codes = {code: RETRY_POLICIES[classify(exit_code=code)] for code in range(1, 256)}
    never = [code for code, policy in codes.items() if not policy.retry]
    free = [code for code, policy in codes.items() if policy.retry and not policy.charged]
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        *(
            {"action": action, "onExitCodes": {"containerName": BASE, "operator": "In", "values": values}}
            for action, values in ((never_again, never), ("Ignore", free))
        ),
    ]


# ---- while it runs


class GroupWatch:
    """Looks at the readings of a Job and its pods, one after the other: do they come up, and are some lost?

    `schedule` and `start` are the budgets in seconds of a group's first pods. A pod that replaces one is its launchers'
    business: its peers go on without it, or wait. Time is what passes between readings here, as for a Lookout.
    """

    def __init__(self, *, schedule: float, start: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budgets = {"schedule": schedule, "start": start}
        self._clock = clock
        self._watches: dict[str, Lookout] = {}
        self._since: dict[tuple[str, str], float] = {}
        self.lost: list[str] = []

    def look(self, job: V1Job, pods: Iterable[V1Pod]) -> Failure | None:
        """Why there is no use in waiting any longer, or None; then `lost` has the names of pods lost with a node."""
        self.lost = []
        begun = job.status.start_time
        if begun is None:  # suspended: Kueue has not let it in
            return None
        seen = set()
        for pod in pods:
            seen.add(_index_of(pod))
            failure = None if has_ended(pod) else self._look_at(pod)
            first = (pod.metadata.creation_timestamp - begun).total_seconds() <= self._budgets["schedule"]
            if failure is not None and first:
                return failure
        missing = job.spec.completions - len(seen)
        if missing <= 0 or not self._too_long("", "schedule"):
            return None
        return Failure(
            FailureClass.QUOTA,
            f"{missing} of the {job.spec.completions} pods of job {job.metadata.name} could not be made within "
            f"{self._budgets['schedule']:g} s",
            code="kubernetes.no_room",
        )

    def _look_at(self, pod: V1Pod) -> Failure | None:
        name, uid = pod.metadata.name, pod.metadata.uid
        try:
            self._watches.setdefault(uid, Lookout(self._clock)).look(pod)
        except PodLost:
            self.lost.append(name)
            return None
        except PodGivenUp as e:
            return Failure(FailureClass.CONFIG, str(e), code="kubernetes.missing", hint=MISSING_HINT)
        if pod.status.phase != "Pending" or pod.metadata.deletion_timestamp is not None:
            return None
        said = failure_of_pod(pod, BASE) if says_why(pod, BASE) else None
        if said is not None and said.failure_class is FailureClass.CONFIG:
            return said  # an image that can't be had, say: no time mends it
        found = any(c.type == "PodScheduled" and c.status == "True" for c in pod.status.conditions or ())
        stage = "start" if found else "schedule"
        if not self._too_long(uid, stage):
            return None
        what, cls, code = (
            ("did not start", FailureClass.INFRA, "kubernetes.no_start")
            if found
            else ("found no node", FailureClass.QUOTA, "kubernetes.no_room")
        )
        return said or Failure(cls, f"pod {name} {what} within {self._budgets[stage]:g} s", code=code)

    def _too_long(self, uid: str, stage: str) -> bool:
        now = self._clock()
        return now - self._since.setdefault((uid, stage), now) > self._budgets[stage]


def all_are_there(job: V1Job) -> bool:
    """Whether no pod of a Job is still to come up: then only its end is of interest."""
    status = job.status
    return (status.ready or 0) + (status.succeeded or 0) >= job.spec.completions


def _index_of(pod: V1Pod) -> int | None:
    index = (pod.metadata.annotations or {}).get(COMPLETION_INDEX)
    return None if index is None else int(index)


# ---- its end


def end_of(job: V1Job) -> tuple[bool, str, str] | None:
    """Whether a Job that has ended is complete, and else the reason and the message; None while it goes on."""
    for condition in job.status.conditions or ():
        if condition.status == "True" and condition.type in ("Complete", "Failed"):
            return condition.type == "Complete", condition.reason or "", condition.message or ""
    return None


def failure_of_job(job: V1Job, pods: Sequence[V1Pod]) -> Failure:
    """Why a Job has failed: the most telling of its indices' last failures, and which indices they are."""
    _, reason, message = end_of(job) or (False, "", "")
    if reason in KUBERNETES_REASONS:
        text = f"job {job.metadata.name}: {reason}: {message}"
        return Failure(KUBERNETES_REASONS[reason], text, code="kubernetes.job")
    last: dict[int, V1Pod] = {}
    for pod in sorted(pods, key=lambda pod: pod.metadata.creation_timestamp):
        index = _index_of(pod)
        if index is not None:
            last[index] = pod
    failed = {index: pod for index, pod in sorted(last.items()) if pod.status.phase == "Failed"}
    failures = [failure_of_pod(pod, BASE) for pod in failed.values()]
    worst = most_telling(failures)
    if worst is None:
        text = f"job {job.metadata.name} failed: {reason}: {message}"
        return Failure(FailureClass.INFRA, text, code="kubernetes.job")
    if len(failed) == 1:
        return worst
    role = worst.role or "index"
    names = ", ".join(f"{role}-{index}" for index in list(failed)[:_SHOWN])
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    fields = {name: getattr(worst, name) for name in worst.__dataclass_fields__}
    told = f"{worst.reason} ({len(failed)} of {job.spec.completions} replicas failed: {names}{more})"
    return Failure(**{**fields, "reason": told})
