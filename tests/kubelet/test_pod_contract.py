"""What a pod's life is on any cluster: the contract that pipelines build on.

Runs against the process kubelet, or with TRAINYARD_CONTRACT_KUBECONFIG against a cluster; there it uses the image
TRAINYARD_CONTRACT_IMAGE (default python:3.11-slim-bookworm) and the namespace TRAINYARD_CONTRACT_NAMESPACE
(default "default"). Only the official client is used, and no test asks for what a cluster need not give.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client, config, watch
from kubernetes.client import ApiException

KUBECONFIG = os.environ.get("TRAINYARD_CONTRACT_KUBECONFIG")
IMAGE = os.environ.get("TRAINYARD_CONTRACT_IMAGE", "python:3.11-slim-bookworm")
NAMESPACE = os.environ.get("TRAINYARD_CONTRACT_NAMESPACE", "default")
PATIENCE = 120.0 if KUBECONFIG else 20.0


@pytest.fixture(scope="module")
def api(request) -> Iterator[client.CoreV1Api]:
    if not KUBECONFIG:
        yield request.getfixturevalue("cluster").core_v1()
        return
    made = config.new_client_from_config(KUBECONFIG)
    yield client.CoreV1Api(made)
    made.close()


@pytest.fixture
def pod(api) -> Iterator[Callable[..., str]]:
    """Creates pods and removes them; gives their names."""
    names = []

    def create(script: str, *, container: dict[str, Any] | None = None, labels=None, **spec: Any) -> str:
        name = f"contract-{uuid.uuid4().hex[:8]}"
        base = {
            "name": "base",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
            **(container or {}),
        }
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {"restartPolicy": "Never", "containers": [base], **spec},
        }
        api.create_namespaced_pod(NAMESPACE, manifest)
        names.append(name)
        return name

    yield create
    for name in names:
        try:
            api.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
        except ApiException as e:
            if e.status != 404:
                raise


def _wait(api, name: str, *phases: str) -> client.V1Pod:
    deadline = time.monotonic() + PATIENCE
    while True:
        pod = api.read_namespaced_pod(name, NAMESPACE)
        if pod.status.phase in phases:
            return pod
        assert time.monotonic() < deadline, pod.status
        time.sleep(0.1)


def _wait_gone(api, name: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        if not api.list_namespaced_pod(NAMESPACE, field_selector=f"metadata.name={name}").items:
            return
        assert time.monotonic() < deadline, f"{name} is still there"
        time.sleep(0.1)


def _log(api, name: str, **options: Any) -> str:
    return api.read_namespaced_pod_log(name, NAMESPACE, _preload_content=False, **options).data.decode()


def _terminated(pod) -> client.V1ContainerStateTerminated:
    return pod.status.container_statuses[0].state.terminated


@pytest.mark.parametrize(
    ("script", "phase", "code", "reason"),
    [
        ("exit 0", "Succeeded", 0, "Completed"),
        ("exit 81", "Failed", 81, "Error"),
        ("kill -KILL $$$$; sleep 5", "Failed", 137, "Error"),
    ],
)
def test_exit_codes_and_reasons(api, pod, script, phase, code, reason):
    # A process 1 in a pid namespace is immune to its own SIGKILL, so a child shell dies and says so.
    if "KILL" in script and KUBECONFIG:
        script = "sh -c 'kill -KILL $$$$'; exit $?"
    done = _wait(api, pod(script), "Succeeded", "Failed")
    assert done.status.phase == phase
    assert (_terminated(done).exit_code, _terminated(done).reason) == (code, reason)
    assert _terminated(done).started_at <= _terminated(done).finished_at
    assert done.spec.node_name
    assert done.status.start_time


def test_a_termination_message_outlives_the_process(api, pod):
    message = json.dumps({"ok": True, "result": {"accuracy": 0.97}})
    done = _wait(api, pod(f"printf '%s' '{message}' > /dev/termination-log"), "Succeeded")
    assert json.loads(_terminated(done).message) == {"ok": True, "result": {"accuracy": 0.97}}


def test_a_log_is_followed_to_its_end_with_stamps(api, pod):
    name = pod("for i in 1 2 3; do echo $i; sleep 0.3; done")
    _wait(api, name, "Running", "Succeeded")
    lines = list(
        watch.Watch().stream(api.read_namespaced_pod_log, name, NAMESPACE, follow=True, timestamps=True)
    )
    assert [line.split(" ")[1] for line in lines] == ["1", "2", "3"]
    assert lines == sorted(lines)
    assert _log(api, name, tail_lines=1) == "3\n"


def test_a_command_that_is_not_there(api, pod):
    done = _wait(api, pod("", container={"command": ["no-such-program-x"]}), "Failed")
    assert _terminated(done).exit_code == 128
    assert _terminated(done).reason in ("StartError", "ContainerCannotRun")
    assert "no-such-program-x" in _terminated(done).message


def test_env_is_expanded_and_references_resolve(api, pod):
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)-$$(A)-$(NOPE)"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
    ]
    name = pod('echo "$B $NAME $ROLE"', container={"env": env}, labels={"role": "chief"})
    _wait(api, name, "Succeeded")
    assert _log(api, name) == f"1-$(A)-$(NOPE) {name} chief\n"


def test_sigterm_comes_first_and_the_grace_period_is_kept(api, pod):
    name = pod("trap 'echo asked; sleep 1; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    _wait(api, name, "Running")
    stream = watch.Watch().stream(api.read_namespaced_pod_log, name, NAMESPACE, follow=True)
    assert next(stream) == "ready"
    asked = time.monotonic()
    api.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=30)
    assert "asked" in list(stream)
    _wait_gone(api, name)
    assert time.monotonic() - asked < 25


def test_a_process_that_will_not_leave_is_killed(api, pod):
    name = pod("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    _wait(api, name, "Running")
    asked = time.monotonic()
    api.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=1)
    assert api.read_namespaced_pod(name, NAMESPACE).metadata.deletion_timestamp
    _wait_gone(api, name)
    assert time.monotonic() - asked < 30


def test_over_the_memory_limit_is_oom_killed(api, pod):
    hog = "import os, time; held = [os.urandom(1024) * 102400 for _ in range(8)]; time.sleep(30)"
    name = pod(
        "", container={"command": ["python3", "-c", hog], "resources": {"limits": {"memory": "200Mi"}}}
    )
    done = _wait(api, name, "Failed")
    assert (_terminated(done).exit_code, _terminated(done).reason) == (137, "OOMKilled")


def test_the_active_deadline(api, pod):
    done = _wait(api, pod("sleep 60", activeDeadlineSeconds=2, terminationGracePeriodSeconds=1), "Failed")
    assert done.status.reason == "DeadlineExceeded"


def test_on_failure_restarts_in_place(api, pod):
    volume = {"volumes": [{"name": "v", "emptyDir": {}}]}
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/state"}]}
    name = pod(
        "[ -e /state/x ] || { touch /state/x; exit 3; }", container=mount, restartPolicy="OnFailure", **volume
    )
    done = _wait(api, name, "Succeeded")
    row = done.status.container_statuses[0]
    assert row.restart_count == 1
    assert row.last_state.terminated.exit_code == 3


def test_init_containers_come_first(api, pod):
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/state"}]}
    init = {"name": "init", "image": IMAGE, "command": ["sh", "-c", "echo from-init > /state/x"], **mount}
    name = pod(
        "cat /state/x", container=mount, initContainers=[init], volumes=[{"name": "v", "emptyDir": {}}]
    )
    _wait(api, name, "Succeeded")
    assert _log(api, name) == "from-init\n"


def test_what_does_not_fit_is_unschedulable_and_says_why(api, pod):
    name = pod("true", container={"resources": {"requests": {"memory": "1000Ti"}}})
    deadline = time.monotonic() + PATIENCE
    while True:
        found = api.read_namespaced_pod(name, NAMESPACE)
        rows = [row for row in found.status.conditions or [] if row.type == "PodScheduled"]
        if rows:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (found.status.phase, rows[0].status, rows[0].reason) == ("Pending", "False", "Unschedulable")
    assert "Insufficient memory" in rows[0].message
    events = api.list_namespaced_event(NAMESPACE, field_selector=f"involvedObject.name={name}")
    assert "FailedScheduling" in [event.reason for event in events.items]


def test_a_watch_sees_the_whole_life(api, pod):
    version = api.list_namespaced_pod(NAMESPACE).metadata.resource_version
    label = uuid.uuid4().hex
    name = pod("sleep 0.5", labels={"contract": label})
    seen: list[tuple[str, str]] = []
    for event in watch.Watch().stream(
        api.list_namespaced_pod,
        NAMESPACE,
        label_selector=f"contract={label}",
        resource_version=version,
        timeout_seconds=int(PATIENCE),
    ):
        seen.append((event["type"], event["object"].status.phase))
        if event["type"] == "DELETED":
            break
        if seen.count(("MODIFIED", "Succeeded")) == 1:
            api.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
    assert seen[0] == ("ADDED", "Pending")
    assert ("MODIFIED", "Running") in seen
    assert seen[-1] == ("DELETED", "Succeeded")


def test_refusals_are_status_objects(api, pod):
    name = pod("true")
    manifest = {"metadata": {"name": name}, "spec": {"containers": [{"name": "base", "image": IMAGE}]}}
    bad = {"metadata": {"name": "x"}, "spec": {"containers": []}}
    for call, code, reason in (
        (lambda: api.create_namespaced_pod(NAMESPACE, manifest), 409, "AlreadyExists"),
        (lambda: api.create_namespaced_pod(NAMESPACE, bad), 422, "Invalid"),
        (lambda: api.read_namespaced_pod("not-there", NAMESPACE), 404, "NotFound"),
        (lambda: api.list_namespaced_pod(NAMESPACE, label_selector="a in b"), 400, "BadRequest"),
    ):
        with pytest.raises(ApiException) as caught:
            call()
        body = json.loads(caught.value.body)
        assert (caught.value.status, body["kind"], body["reason"]) == (code, "Status", reason)


def test_selectors(api, pod):
    label = uuid.uuid4().hex
    names = {role: pod("true", labels={"contract": label, "role": role}) for role in ("ps", "chief")}

    def found(selector: str) -> set[str]:
        rows = api.list_namespaced_pod(NAMESPACE, label_selector=f"contract={label},{selector}")
        return {row.metadata.name for row in rows.items}

    assert found("role=ps") == {names["ps"]}
    assert found("role!=ps") == {names["chief"]}
    assert found("role in (ps,chief)") == set(names.values())
    assert found("!other") == set(names.values())
    assert found("other") == set()
    patched = api.patch_namespaced_pod(names["ps"], NAMESPACE, {"metadata": {"labels": {"other": "x"}}})
    assert patched.metadata.labels["role"] == "ps"
    assert found("other") == {names["ps"]}
