"""What pods' statuses mean, row by row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.client import (
    V1ContainerState,
    V1ContainerStateTerminated,
    V1ContainerStateWaiting,
    V1ContainerStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodStatus,
)
from kubernetes.client.exceptions import ApiException
from trainyard.pods import failure_of_api_error, failure_of_pod, has_ended, result_of_pod, says_why

USER = json.dumps({"ok": False, "failure": {"class": "USER", "reason": "loss is NaN", "exit_code": 81}})


def _pod(phase: str = "Failed", *, state: Any = None, **status: Any) -> V1Pod:
    rows = None
    if state is not None:
        rows = [
            V1ContainerStatus(name="base", image="x", image_id="x", ready=False, restart_count=0, state=state)
        ]
    labels = {"trainyard.io/role": "worker", "trainyard.io/index": "1"}
    return V1Pod(
        metadata=V1ObjectMeta(name="p", labels=labels),
        status=V1PodStatus(phase=phase, container_statuses=rows, **status),
    )


def _ended(code: int, **fields: Any) -> V1ContainerState:
    return V1ContainerState(terminated=V1ContainerStateTerminated(exit_code=code, **fields))


def _waits(reason: str, message: str = "") -> V1ContainerState:
    return V1ContainerState(waiting=V1ContainerStateWaiting(reason=reason, message=message))


def _condition(kind: str, status: str, reason: str, message: str = "") -> list[V1PodCondition]:
    return [V1PodCondition(type=kind, status=status, reason=reason, message=message)]


@pytest.mark.parametrize(
    ("pod", "failure_class", "words"),
    [
        (_pod(state=_ended(81, message=USER)), "USER", "loss is NaN"),
        (_pod(state=_ended(1, message="Traceback\nKeyError: 'x'")), "USER", "exit code 1"),
        (_pod(state=_ended(137, signal=9)), "INFRA", "SIGKILL"),
        (_pod(state=_ended(139)), "INFRA", "SIGSEGV"),
        (_pod(state=_ended(137, reason="OOMKilled")), "OOM", "OOMKilled"),
        (_pod(state=_ended(143), reason="Evicted", message="low on memory"), "PREEMPTED", "low on memory"),
        (_pod(state=_ended(81, message=USER), reason="Evicted"), "PREEMPTED", "Evicted: loss is NaN"),
        (_pod(state=_ended(143), reason="DeadlineExceeded"), "STALLED", "DeadlineExceeded"),
        (_pod(reason="NodeLost"), "INFRA", "NodeLost"),
        (
            _pod(
                state=_ended(143), conditions=_condition("DisruptionTarget", "True", "EvictionByEvictionAPI")
            ),
            "PREEMPTED",
            "EvictionByEvictionAPI",
        ),
        (_pod("Pending", state=_waits("ImagePullBackOff", "no such image")), "CONFIG", "no such image"),
        (
            _pod("Pending", conditions=_condition("PodScheduled", "False", "Unschedulable", "0/3 nodes")),
            "QUOTA",
            "0/3 nodes",
        ),
        (_pod("Running", state=V1ContainerState()), "PREEMPTED", "was deleted before it ended"),
    ],
)
def test_a_status_means_a_failure(pod: V1Pod, failure_class: str, words: str) -> None:
    failure = failure_of_pod(pod, "base")
    assert failure.failure_class.value == failure_class
    assert words in failure.reason
    if failure.code == "" and "loss" not in failure.reason:
        assert failure.replica == "worker-1"


def test_the_log_tail_stands_in_for_a_missing_word() -> None:
    failure = failure_of_pod(_pod(state=_ended(1, message="line\n" * 30 + "KeyError: 'x'")), "base")
    assert failure.log_tail[-1] == "KeyError: 'x'"
    assert len(failure.log_tail) == 20


def test_results_and_ends() -> None:
    good = _pod("Succeeded", state=_ended(0, message='{"ok": true, "result": {"a": 1}}'))
    assert result_of_pod(good, "base") == {"a": 1}
    assert result_of_pod(_pod("Succeeded", state=_ended(0)), "base") is None
    assert result_of_pod(None, "base") is None
    assert [has_ended(p) for p in (good, _pod("Running"), None)] == [True, False, False]
    assert says_why(_pod("Pending", state=_waits("ErrImagePull")), "base")
    assert not says_why(_pod("Pending", state=_waits("ContainerCreating")), "base")


@pytest.mark.parametrize(
    ("status", "message", "failure_class"),
    [
        (403, "exceeded quota: compute", "QUOTA"),
        (403, "forbidden", "CONFIG"),
        (422, "spec.hostname: Invalid value", "CONFIG"),
        (404, 'pods "x" not found', "PREEMPTED"),
        (500, "etcd is sad", "INFRA"),
    ],
)
def test_what_the_api_refuses(status: int, message: str, failure_class: str) -> None:
    error = ApiException(status=status, reason="no")
    error.body = json.dumps({"message": message})
    failure = failure_of_api_error(error)
    assert failure.failure_class.value == failure_class
    assert message in failure.reason
    error.body = "not json"
    assert "not json" in failure_of_api_error(error).reason or "no" in failure_of_api_error(error).reason
