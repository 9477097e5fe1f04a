"""What pods' statuses mean, row by row."""

from __future__ import annotations

import datetime as dt
import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import (
    CoreV1Event,
    V1ContainerState,
    V1ContainerStateTerminated,
    V1ContainerStateWaiting,
    V1ContainerStatus,
    V1ObjectMeta,
    V1ObjectReference,
    V1Pod,
    V1PodCondition,
    V1PodStatus,
)
from kubernetes.client.exceptions import ApiException
from trainyard.pods import (
    IMAGE_HINT,
    events_of_pod,
    failure_of_api_error,
    failure_of_pod,
    has_ended,
    result_of_pod,
    says_why,
)

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


def _deleted(pod: V1Pod) -> V1Pod:
    pod.metadata.deletion_timestamp = dt.datetime.now(dt.timezone.utc)
    return pod


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
        (_pod(reason="NodeLost"), "PREEMPTED", "NodeLost"),
        (_pod(state=_ended(255, reason="Unknown")), "PREEMPTED", "Unknown"),
        (_deleted(_pod(state=_ended(137))), "PREEMPTED", "SIGKILL"),
        (_deleted(_pod(state=_ended(1))), "USER", "exit code 1"),
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


def test_an_init_container_that_failed_is_named_with_its_last_lines() -> None:
    def init(name: str, state: V1ContainerState) -> V1ContainerStatus:
        return V1ContainerStatus(
            name=name, image="x", image_id="x", ready=False, restart_count=0, state=state
        )

    rows = [init("first", _ended(0)), init("fetch", _ended(1, reason="Error", message="no such bucket"))]
    failure = failure_of_pod(
        _pod(state=_waits("PodInitializing"), init_container_statuses=rows),
        "base",
    )
    assert failure.failure_class.value == "USER"
    assert failure.reason == "init container fetch of pod p ended with exit code 1"
    assert (failure.exit_code, failure.log_tail) == (1, ("no such bucket",))
    both = _pod(state=_ended(3), init_container_statuses=rows)
    assert failure_of_pod(both, "base").reason == "pod p ended with exit code 3", "ours did start"


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
        (403, "status unknown for quota: compute, resources: pods", "QUOTA"),
        (403, "failed quota: compute: must specify requests.memory", "CONFIG"),
        (403, 'pods "my-quota" is forbidden: maximum memory usage per Container is 128Gi', "CONFIG"),
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


def _event(
    reason: str, second: int, *, kind: str = "Warning", count: int | None = 1, uid: str | None = "u"
) -> Any:
    when = dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.timezone.utc)
    about = V1ObjectReference(name="p", uid=uid)
    return CoreV1Event(
        involved_object=about,
        metadata=V1ObjectMeta(),
        reason=reason,
        message="a\n b",
        type=kind,
        count=count,
        last_timestamp=when,
    )


def test_events_are_the_newest_warnings_of_this_very_pod() -> None:
    rows = [
        _event("FailedMount", 9, count=3),
        _event("Pulled", 8, kind="Normal"),
        _event("Preempted", 7, kind="Normal"),
        _event("Failed", 6, uid="of the pod before"),
        *(_event(f"Old{second}", second, count=None) for second in range(5)),
    ]
    api = SimpleNamespace(list_namespaced_event=lambda *_, **__: SimpleNamespace(items=rows))
    pod = V1Pod(metadata=V1ObjectMeta(name="p", namespace="ml", uid="u"))
    assert events_of_pod(api, pod) == (
        "Old2: a b",
        "Old3: a b",
        "Old4: a b",
        "Preempted: a b",
        "FailedMount: a b (3 times)",
    )


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (1, "Error", "/usr/bin/python: Error while finding module specification for 'trainers.runtime.launcher' "
                     "(ModuleNotFoundError: No module named 'trainers')\n"),
        (1, "Error", "/usr/bin/python: No module named trainers.export\n"),
        (128, "StartError", 'failed to create containerd task: exec: "python": executable file not found in $PATH'),
    ],
)  # fmt: skip
def test_an_image_that_cannot_run_the_launcher_is_told_what_it_lacks(
    code: int, reason: str, message: str
) -> None:
    failure = failure_of_pod(_pod(state=_ended(code, reason=reason, message=message)), "base")
    assert (str(failure.failure_class), failure.code) == ("CONFIG", "kubernetes.image")
    assert failure.hint == IMAGE_HINT


def test_a_module_of_the_users_own_that_is_not_there_is_the_users() -> None:
    state = _ended(1, reason="Error", message="ModuleNotFoundError: No module named 'my_trainers'")
    assert str(failure_of_pod(_pod(state=state), "base").failure_class) == "USER"
