"""What a pod's life is on any cluster: the contract that pipelines build on.

The tests of this folder run against the process kubelet (`tests/kubelet/test_pod_contract.py`) and against a cluster
(`tests/kubernetes/test_contract_on_cluster.py`), each with a `place` of its own. Only the official client is used, and
no test asks for what a cluster need not give.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import ApiException

from tests.contract.place import terminated


@pytest.mark.parametrize(
    ("script", "phase", "code", "reason"),
    [
        ("exit 0", "Succeeded", 0, "Completed"),
        ("exit 81", "Failed", 81, "Error"),
        # A process 1 in a pid namespace is immune to its own SIGKILL, so a child shell dies and says so.
        ("sh -c 'kill -KILL $$$$'; exit $?", "Failed", 137, "Error"),
    ],
)
def test_exit_codes_and_reasons(place, script, phase, code, reason):
    done = place.wait(place.pod(script), "Succeeded", "Failed")
    assert done.status.phase == phase
    assert (terminated(done).exit_code, terminated(done).reason) == (code, reason)
    assert terminated(done).started_at <= terminated(done).finished_at
    assert done.spec.node_name
    assert done.status.start_time


def test_a_termination_message_outlives_the_process(place):
    message = json.dumps({"ok": True, "result": {"accuracy": 0.97}})
    done = place.wait(place.pod(f"printf '%s' '{message}' > /dev/termination-log"), "Succeeded")
    assert json.loads(terminated(done).message) == {"ok": True, "result": {"accuracy": 0.97}}


def test_a_log_is_followed_to_its_end_with_stamps(place):
    name = place.pod("for i in 1 2 3; do echo $i; sleep 0.3; done")
    place.wait(name, "Running", "Succeeded")
    lines = list(
        watch.Watch().stream(
            place.api.read_namespaced_pod_log, name, place.namespace, follow=True, timestamps=True
        )
    )
    assert [line.split(" ")[1] for line in lines] == ["1", "2", "3"]
    assert lines == sorted(lines)
    assert place.log(name, tail_lines=1) == "3\n"


def test_a_command_that_is_not_there(place):
    done = place.wait(place.pod("", container={"command": ["no-such-program-x"]}), "Failed")
    assert terminated(done).exit_code == 128
    assert terminated(done).reason in ("StartError", "ContainerCannotRun")
    assert "no-such-program-x" in terminated(done).message


def test_env_is_expanded_and_references_resolve(place):
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)-$$(A)-$(NOPE)"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
    ]
    name = place.pod('echo "$B $NAME $ROLE"', container={"env": env}, labels={"role": "chief"})
    place.wait(name, "Succeeded")
    assert place.log(name) == f"1-$(A)-$(NOPE) {name} chief\n"


def test_sigterm_comes_first_and_the_grace_period_is_kept(place):
    name = place.pod("trap 'echo asked; sleep 1; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    place.wait(name, "Running")
    stream = watch.Watch().stream(place.api.read_namespaced_pod_log, name, place.namespace, follow=True)
    assert next(stream) == "ready"
    place.delete(name, grace=3600)
    assert "asked" in list(stream)
    place.wait_gone(name)  # long before the hour is over


def test_a_process_that_will_not_leave_is_killed(place):
    name = place.pod("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    place.wait(name, "Running")
    place.delete(name, grace=1)
    assert place.read(name).metadata.deletion_timestamp
    place.wait_gone(name)


def test_over_the_memory_limit_is_oom_killed(place):
    hog = "import os, time; held = [os.urandom(1024) * 102400 for _ in range(8)]; time.sleep(30)"
    name = place.pod(
        "", container={"command": ["python3", "-c", hog], "resources": {"limits": {"memory": "200Mi"}}}
    )
    done = place.wait(name, "Failed")
    assert (terminated(done).exit_code, terminated(done).reason) == (137, "OOMKilled")


def test_the_active_deadline(place):
    done = place.wait(
        place.pod("sleep 60", activeDeadlineSeconds=2, terminationGracePeriodSeconds=1), "Failed"
    )
    assert done.status.reason == "DeadlineExceeded"


def test_on_failure_restarts_in_place(place):
    volume = {"volumes": [{"name": "v", "emptyDir": {}}]}
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/state"}]}
    name = place.pod(
        "[ -e /state/x ] || { touch /state/x; exit 3; }", container=mount, restartPolicy="OnFailure", **volume
    )
    done = place.wait(name, "Succeeded")
    row = done.status.container_statuses[0]
    assert row.restart_count == 1
    assert row.last_state.terminated.exit_code == 3


def test_init_containers_come_first(place):
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/state"}]}
    init = {
        "name": "init",
        "image": place.image,
        "command": ["sh", "-c", "echo from-init > /state/x"],
        **mount,
    }
    name = place.pod(
        "cat /state/x", container=mount, initContainers=[init], volumes=[{"name": "v", "emptyDir": {}}]
    )
    place.wait(name, "Succeeded")
    assert place.log(name) == "from-init\n"


def test_what_does_not_fit_is_unschedulable_and_says_why(place):
    name = place.pod("true", container={"resources": {"requests": {"memory": "1000Ti"}}})

    def refused() -> list[Any]:
        return [row for row in place.read(name).status.conditions or [] if row.type == "PodScheduled"]

    rows = place.until(refused)
    found = place.read(name)
    assert (found.status.phase, rows[0].status, rows[0].reason) == ("Pending", "False", "Unschedulable")
    assert "Insufficient memory" in rows[0].message
    events = place.api.list_namespaced_event(place.namespace, field_selector=f"involvedObject.name={name}")
    assert "FailedScheduling" in [event.reason for event in events.items]


def test_a_watch_sees_the_whole_life(place):
    version = place.api.list_namespaced_pod(place.namespace).metadata.resource_version
    label = uuid.uuid4().hex
    name = place.pod("trap 'exit 0' TERM; while :; do sleep 0.1; done", labels={"contract": label})
    seen: list[tuple[str, str, bool]] = []
    for event in watch.Watch().stream(
        place.api.list_namespaced_pod,
        place.namespace,
        label_selector=f"contract={label}",
        resource_version=version,
        timeout_seconds=int(place.patience),
    ):
        pod = event["object"]
        seen.append((event["type"], pod.status.phase, pod.metadata.deletion_timestamp is not None))
        if event["type"] == "DELETED":
            break
        if seen.count(("MODIFIED", "Running", False)) == 1 and seen[-1] == ("MODIFIED", "Running", False):
            place.delete(name)
    assert seen[0] == ("ADDED", "Pending", False)
    assert ("MODIFIED", "Running", True) in seen
    assert (seen[-1][0], seen[-1][2]) == ("DELETED", True)


def test_refusals_are_status_objects(place):
    name = place.pod("true")
    manifest = {"metadata": {"name": name}, "spec": {"containers": [{"name": "base", "image": place.image}]}}
    bad = {"metadata": {"name": "x"}, "spec": {"containers": []}}
    for call, code, reason in (
        (lambda: place.api.create_namespaced_pod(place.namespace, manifest), 409, "AlreadyExists"),
        (lambda: place.api.create_namespaced_pod(place.namespace, bad), 422, "Invalid"),
        (lambda: place.api.read_namespaced_pod("not-there", place.namespace), 404, "NotFound"),
        (lambda: place.api.list_namespaced_pod(place.namespace, label_selector="a in b"), 400, "BadRequest"),
    ):
        with pytest.raises(ApiException) as caught:
            call()
        body = json.loads(caught.value.body)
        assert (caught.value.status, body["kind"], body["reason"]) == (code, "Status", reason)


def test_selectors(place):
    label = uuid.uuid4().hex
    names = {role: place.pod("true", labels={"contract": label, "role": role}) for role in ("ps", "chief")}

    def found(selector: str) -> set[str]:
        rows = place.api.list_namespaced_pod(place.namespace, label_selector=f"contract={label},{selector}")
        return {row.metadata.name for row in rows.items}

    assert found("role=ps") == {names["ps"]}
    assert found("role!=ps") == {names["chief"]}
    assert found("role in (ps,chief)") == set(names.values())
    assert found("!other") == set(names.values())
    assert found("other") == set()
    patched = place.api.patch_namespaced_pod(
        names["ps"], place.namespace, {"metadata": {"labels": {"other": "x"}}}
    )
    assert patched.metadata.labels["role"] == "ps"
    assert found("other") == {names["ps"]}
