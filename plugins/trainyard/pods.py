"""What a finished pod says: its result, or why it failed. Plain functions over the Kubernetes client's objects."""

from __future__ import annotations

import dataclasses
import json
import re
import signal as signals
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trainers.job import labels
from trainers.job.failures import KUBERNETES_REASONS, Failure, FailureClass, classify, signal_name
from trainers.job.termination import parse

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, CoreV1Event, V1Pod
    from kubernetes.client.exceptions import ApiException

__all__ = [
    "COMPLETION_INDEX",
    "GONE_HINT",
    "IMAGE_HINT",
    "LOST_HINT",
    "MISSING_HINT",
    "events_of_pod",
    "failure_of_api_error",
    "failure_of_pod",
    "has_ended",
    "never_starts",
    "node_is_silent",
    "pod_from",
    "result_of_pod",
    "says_why",
]

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation that says which of an Indexed Job's pods one is."""

GONE_HINT = "it is started again; if nobody deleted it, look at the node's events"
LOST_HINT = "nothing: it is started again on another node; see what became of the node"
MISSING_HINT = (
    "create the ConfigMap, Secret or key that is named, or correct the pod's settings, then run it again"
)
IMAGE_HINT = (
    "an image needs `python` (3.10 or later) on its PATH and the trainer package: docs/other-frameworks.md"
)
_LOG_LINES = 20
# What Python, or the container's runtime, says of an image that can't run the launcher or a step.
_NOT_OURS = re.compile(r"No module named '?trainers\b|exec: \\?\"python\\?\"|future feature annotations")

# Events that are no warnings to Kubernetes, and still say why a pod ended.
_TELLING_EVENTS = frozenset(
    {"Evicted", "Killing", "NodeNotReady", "Preempted", "Rebooted", "TaintManagerEviction"}
)
_EVENTS, _EVENT_LENGTH = 5, 300


def events_of_pod(api: CoreV1Api, pod: V1Pod, *, timeout: float = 10.0) -> tuple[str, ...]:
    """The newest warnings that the cluster has of a pod, oldest first: "FailedScheduling: 0/3 nodes ... (12 times)".

    Raises ApiException and urllib3's HTTPError; `timeout` is in seconds.
    """
    found = api.list_namespaced_event(
        pod.metadata.namespace,
        field_selector=f"involvedObject.name={pod.metadata.name}",
        _request_timeout=timeout,
    ).items
    own = [
        event
        for event in found
        if (event.type == "Warning" or event.reason in _TELLING_EVENTS)
        and event.involved_object.uid in (None, pod.metadata.uid)
    ]
    own.sort(key=_when)
    return tuple(_told(event) for event in own[-_EVENTS:])


def _when(event: CoreV1Event) -> float:
    moment = event.last_timestamp or event.event_time or event.metadata.creation_timestamp
    return moment.timestamp() if moment else 0.0


def _told(event: CoreV1Event) -> str:
    count = event.count or (event.series.count if event.series else None) or 1
    times = f" ({count} times)" if count > 1 else ""
    text = " ".join((event.message or "").split())
    return f"{event.reason}: {text[:_EVENT_LENGTH]}{times}"


def pod_from(manifest: Mapping[str, Any]) -> V1Pod:
    """The client's object for a pod's JSON, or for a part of it."""
    from kubernetes.client import ApiClient

    return ApiClient().deserialize(SimpleNamespace(data=json.dumps(manifest)), "V1Pod")


def _state(pod: V1Pod, container: str) -> Any:
    statuses = (pod.status.container_statuses if pod.status else None) or []
    return next((status.state for status in statuses if status.name == container), None)


def has_ended(pod: V1Pod | None) -> bool:
    """Whether the pod has run to its end."""
    return pod is not None and pod.status is not None and pod.status.phase in ("Succeeded", "Failed")


def says_why(pod: V1Pod, container: str) -> bool:
    """Whether the pod's status tells why it is not running."""
    state = _state(pod, container)
    return has_ended(pod) or bool(state and state.terminated) or _reason(pod, state) is not None


# What a node says of a missing part of a container's settings; "failed to sync ... cache" passes by itself.
_MISSING = ("not found", "couldn't find key", "runAsNonRoot", "non-existent")


def never_starts(pod: V1Pod) -> str | None:
    """Why a pod waits for what will not come by itself, in its node's words; None where it may still start.

    Of images the provider knows the same; here it is ConfigMaps, Secrets and security settings.
    """
    status = pod.status
    rows = [*(status.init_container_statuses or ()), *(status.container_statuses or ())] if status else []
    for row in rows:
        waiting = row.state.waiting if row.state else None
        if waiting and waiting.reason == "CreateContainerConfigError":
            message = waiting.message or ""
            if any(words in message for words in _MISSING):
                return f"{waiting.reason}: {message}"
    return None


def node_is_silent(pod: V1Pod) -> bool:
    """Whether the control plane has found that the pod's node doesn't answer.

    It then says that the pod isn't ready, and leaves what the node has said of the containers as it was; a node never
    contradicts itself like that. So nodes, which a tenant may not read, need not be looked at.
    """
    told = {row.type: row.status for row in (pod.status.conditions if pod.status else None) or []}
    gates = (pod.spec.readiness_gates if pod.spec else None) or ()
    return not gates and told.get("Ready") == "False" and told.get("ContainersReady") == "True"


def result_of_pod(pod: V1Pod | None, container: str) -> dict[str, Any] | None:
    """The result in the termination message, or None when there is none."""
    state = _state(pod, container) if pod is not None else None
    termination = parse(state.terminated.message) if state and state.terminated else None
    return dict(termination.result) if termination and termination.result is not None else None


def failure_of_pod(pod: V1Pod, container: str) -> Failure:
    """Why a pod that did not succeed failed.

    The process's own word comes first (its termination message), then Kubernetes' reason, then the exit code; where
    an init container failed, those are its.
    A pod that has not ended was taken away, which is nobody's fault here: PREEMPTED.
    """
    whose = _replica(pod)
    name = f"pod {pod.metadata.name}"
    state = _state(pod, container)
    if not (state and state.terminated) and (before := _failed_before(pod)):
        name, state = f"init container {before.name} of {name}", before.state
    terminated = state.terminated if state else None
    reason = _reason(pod, state)
    termination = parse(terminated.message) if terminated else None
    if termination and termination.failure and reason is None:
        return termination.failure
    if terminated is None:
        if reason is not None:
            text = f"{name}: {_joined(reason, _message(pod, state, reason))}"
            return Failure(classify(reason=reason), text, **whose)
        return Failure(
            FailureClass.PREEMPTED,
            f"{name} was deleted before it ended",
            hint=GONE_HINT,
            **whose,
        )
    number = terminated.signal or None
    failure_class = classify(exit_code=terminated.exit_code, signal=number, reason=reason)
    if reason is None and pod.metadata.deletion_timestamp and _was_killed(terminated):
        failure_class = FailureClass.PREEMPTED  # whoever deletes a pod takes its place, not its work
    said = termination.failure if termination else None
    if said is not None:  # killed from outside, and it had time for a last word
        return Failure(
            **{**_fields(said), "failure_class": failure_class, "reason": f"{reason}: {said.reason}"}
        )
    if reason is not None:
        text = f"{name}: {_joined(reason, _message(pod, state, reason))}"
    elif number or terminated.exit_code > 128:
        text = f"{name} was ended by {signal_name(number or terminated.exit_code - 128)}"
    else:
        text = f"{name} ended with exit code {terminated.exit_code}"
    tail = () if termination else tuple((terminated.message or "").splitlines()[-_LOG_LINES:])
    failure = Failure(
        failure_class, text, exit_code=terminated.exit_code, signal=number, log_tail=tail, **whose
    )
    if termination is None and _NOT_OURS.search(f"{terminated.message} {text}"):
        # Python's exit code 1 would be an error of the user's code.
        return dataclasses.replace(
            failure, failure_class=FailureClass.CONFIG, code="kubernetes.image", hint=IMAGE_HINT
        )
    return failure


def _failed_before(pod: V1Pod) -> Any:
    """The status of the init container that kept ours from starting, if one has failed."""
    rows = (pod.status.init_container_statuses if pod.status else None) or ()
    ended = (row for row in rows if row.state and row.state.terminated)
    return next((row for row in ended if row.state.terminated.exit_code), None)


def _was_killed(terminated: Any) -> bool:
    numbers = (int(signals.SIGKILL), int(signals.SIGTERM))
    return terminated.signal in numbers or terminated.exit_code - 128 in numbers


def _fields(failure: Failure) -> dict[str, Any]:
    return {name: getattr(failure, name) for name in failure.__dataclass_fields__}


def _joined(reason: str, text: str | None) -> str:
    return f"{reason}: {text}" if text else reason


def _message(pod: V1Pod, state: Any, reason: str) -> str | None:
    """The words beside a reason, from where the reason stands."""
    waiting = getattr(state, "waiting", None)
    if waiting and waiting.reason == reason:
        return waiting.message
    said = (c.message for c in pod.status.conditions or [] if c.reason == reason and c.message)
    return next(said, pod.status.message)


def _replica(pod: V1Pod) -> dict[str, Any]:
    known = pod.metadata.labels or {}
    index = known.get(labels.LABEL_INDEX)
    if index is None:  # a pod of an Indexed Job
        index = (pod.metadata.annotations or {}).get(COMPLETION_INDEX)
    return {"role": known.get(labels.LABEL_ROLE, ""), "index": int(index) if index is not None else None}


def _reason(pod: V1Pod, state: Any) -> str | None:
    """Kubernetes' reason, where it is one that says enough."""
    terminated, waiting = getattr(state, "terminated", None), getattr(state, "waiting", None)
    disrupted = [c.reason for c in pod.status.conditions or [] if c.type == "DisruptionTarget"]
    unscheduled = [
        c.reason for c in pod.status.conditions or [] if c.type == "PodScheduled" and c.status == "False"
    ]
    candidates = [
        terminated.reason if terminated else None,
        pod.status.reason,
        *disrupted,
        waiting.reason if waiting else None,
        *unscheduled,
    ]
    return next((reason for reason in candidates if reason in KUBERNETES_REASONS), None)


# What is in the way passes; a pod that doesn't say what a quota counts ("failed quota") is never let in.
_FULL = ("exceeded quota:", "status unknown for quota:")


def failure_of_api_error(error: ApiException) -> Failure:
    """Why the Kubernetes API refused: a bad manifest and missing rights are CONFIG, a full quota is QUOTA."""
    text = _api_message(error)
    if error.status == 403 and any(words in text for words in _FULL):
        return Failure(FailureClass.QUOTA, f"Kubernetes refused the pod: {text}", code="kubernetes.quota")
    if error.status in (400, 401, 403, 422):
        return Failure(
            FailureClass.CONFIG,
            f"Kubernetes refused the request ({error.status}): {text}",
            code="kubernetes.refused",
            hint="check the connection trainyard_kubernetes, its rights, and the pod's settings",
        )
    if error.status == 404:
        return Failure(
            FailureClass.PREEMPTED,
            f"the pod is gone: {text}",
            code="kubernetes.gone",
            hint=GONE_HINT,
        )
    return Failure(
        FailureClass.INFRA, f"the Kubernetes API answered {error.status}: {text}", code="kubernetes.api"
    )


def _api_message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason or error.body or error)
