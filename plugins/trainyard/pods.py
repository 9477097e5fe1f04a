"""What a finished pod says: its result, or why it failed. Plain functions over the Kubernetes client's objects."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainers.job import labels
from trainers.job.failures import KUBERNETES_REASONS, Failure, FailureClass, classify, signal_name
from trainers.job.termination import parse

if TYPE_CHECKING:
    from kubernetes.client import V1Pod
    from kubernetes.client.exceptions import ApiException

__all__ = ["GONE_HINT", "failure_of_api_error", "failure_of_pod", "has_ended", "result_of_pod", "says_why"]

GONE_HINT = "it is started again; if nobody deleted it, look at the node's events"
_LOG_LINES = 20


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


def result_of_pod(pod: V1Pod | None, container: str) -> dict[str, Any] | None:
    """The result in the termination message, or None when there is none."""
    state = _state(pod, container) if pod is not None else None
    termination = parse(state.terminated.message) if state and state.terminated else None
    return dict(termination.result) if termination and termination.result is not None else None


def failure_of_pod(pod: V1Pod, container: str) -> Failure:
    """Why a pod that did not succeed failed.

    The process's own word comes first (its termination message), then Kubernetes' reason, then the exit code.
    A pod that has not ended was taken away, which is nobody's fault here: PREEMPTED.
    """
    whose = _replica(pod)
    name = pod.metadata.name
    state = _state(pod, container)
    terminated = state.terminated if state else None
    reason = _reason(pod, state)
    termination = parse(terminated.message) if terminated else None
    if termination and termination.failure and reason is None:
        return termination.failure
    if terminated is None:
        if reason is not None:
            text = f"pod {name}: {_joined(reason, _message(pod, state, reason))}"
            return Failure(classify(reason=reason), text, **whose)
        return Failure(
            FailureClass.PREEMPTED,
            f"pod {name} was deleted before it ended",
            hint=GONE_HINT,
            **whose,
        )
    number = terminated.signal or None
    failure_class = classify(exit_code=terminated.exit_code, signal=number, reason=reason)
    said = termination.failure if termination else None
    if said is not None:  # killed from outside, and it had time for a last word
        return Failure(
            **{**_fields(said), "failure_class": failure_class, "reason": f"{reason}: {said.reason}"}
        )
    if reason is not None:
        text = f"pod {name}: {_joined(reason, _message(pod, state, reason))}"
    elif number or terminated.exit_code > 128:
        text = f"pod {name} was ended by {signal_name(number or terminated.exit_code - 128)}"
    else:
        text = f"pod {name} ended with exit code {terminated.exit_code}"
    tail = () if termination else tuple((terminated.message or "").splitlines()[-_LOG_LINES:])
    return Failure(failure_class, text, exit_code=terminated.exit_code, signal=number, log_tail=tail, **whose)


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


def failure_of_api_error(error: ApiException) -> Failure:
    """Why the Kubernetes API refused: a bad manifest and missing rights are CONFIG, a full quota is QUOTA."""
    text = _api_message(error)
    if error.status == 403 and "quota" in text.lower():
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
