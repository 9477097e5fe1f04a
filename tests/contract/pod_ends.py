"""How pods wait, are deleted and evicted, and what stays readable: the contract's second part."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import ApiException

from tests.contract.place import terminated


def _refused(call, status: int, *words: str) -> dict[str, Any]:
    with pytest.raises(ApiException) as caught:
        call()
    body = json.loads(caught.value.body)
    assert (caught.value.status, body["kind"], body["code"]) == (status, "Status", status)
    assert [word for word in words if word not in body["message"]] == [], body["message"]
    return body


def _eviction(place, name: str, **options: Any) -> None:
    """Evict a pod by the version of that API that the server has."""
    rows = place.api.get_api_resources().resources
    row = next(row for row in rows if row.name == "pods/eviction")
    body = {
        "apiVersion": f"{row.group}/{row.version}",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": place.namespace},
        **options,
    }
    # Not by the model's own method: that wants the newest version's object back, and servers give a Status.
    place.api.create_namespaced_pod_eviction(name, place.namespace, body, _preload_content=False)


def test_a_pod_that_no_node_has_is_deleted_at_once(place):
    name = place.pod("true", container={"resources": {"requests": {"memory": "1000Ti"}}})
    place.until(lambda: place.read(name).status.conditions, "a word of the scheduler")
    place.delete(name, grace=3600)
    place.wait_gone(name)


def test_a_missing_config_map_is_named_and_waited_for(place):
    env = [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "contract-late", "key": "a"}}}]
    name = place.pod('echo "$A"', container={"env": env})
    state = place.waiting(name, "CreateContainerConfigError")
    assert state.message == 'configmap "contract-late" not found'
    assert place.read(name).status.phase == "Pending"
    _refused(lambda: place.log(name), 400, 'container "base" in pod', "is waiting to start")
    body = {"metadata": {"name": "contract-late"}, "data": {"b": "2"}}
    place.api.create_namespaced_config_map(place.namespace, body)
    try:

        def key_is_missing() -> bool:
            message = place.waiting(name, "CreateContainerConfigError").message
            return message == f"couldn't find key a in ConfigMap {place.namespace}/contract-late"

        place.until(key_is_missing, "the missing key")
        place.api.patch_namespaced_config_map("contract-late", place.namespace, {"data": {"a": "1"}})
        place.wait(name, "Succeeded")
        assert place.log(name) == "1\n"
    finally:
        place.api.delete_namespaced_config_map("contract-late", place.namespace)


def test_a_pod_that_waits_for_its_secret_can_be_deleted(place):
    name = place.pod("true", container={"envFrom": [{"secretRef": {"name": "contract-never"}}]})
    state = place.waiting(name, "CreateContainerConfigError")
    assert state.message == 'secret "contract-never" not found'
    place.delete(name)
    place.wait_gone(name)


def test_a_deletion_says_when_it_will_be_over_and_may_be_hastened(place):
    name = place.pod("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    place.wait(name, "Running")
    stream = watch.Watch().stream(place.api.read_namespaced_pod_log, name, place.namespace, follow=True)
    assert next(stream) == "ready"
    before = place.read(name)
    assert before.metadata.deletion_timestamp is None
    place.delete(name, grace=600)
    pod = place.read(name)
    meta = pod.metadata
    assert meta.deletion_grace_period_seconds == 600
    left = (meta.deletion_timestamp - dt.datetime.now(dt.timezone.utc)).total_seconds()
    assert 500 < left <= 601
    assert (pod.status.phase, meta.uid) == ("Running", before.metadata.uid)
    place.delete(name, grace=1)
    place.wait_gone(name)


def test_by_force_the_name_is_free_at_once(place):
    name = place.pod("trap '' TERM; while :; do sleep 0.1; done")
    first = place.wait(name, "Running")
    place.delete(name, grace=0)
    _refused(lambda: place.read(name), 404, f'pods "{name}" not found')
    again = place.create(name, "echo again")
    assert again.metadata.uid != first.metadata.uid
    place.wait(name, "Succeeded")
    assert place.log(name) == "again\n"


def test_a_deletion_may_name_the_pod_that_it_means(place):
    name = place.pod("sleep 600")
    body = {"preconditions": {"uid": "11111111-1111-1111-1111-111111111111"}}
    said = _refused(
        lambda: place.api.delete_namespaced_pod(name, place.namespace, body=body),
        409,
        f'Operation cannot be fulfilled on Pod "{name}": the UID in the precondition',
        "The object might have been deleted and then recreated",
    )
    assert said["reason"] == "Conflict"
    assert place.read(name).metadata.deletion_timestamp is None


def test_an_eviction_is_a_deletion_in_good_order(place):
    name = place.pod("trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    place.wait(name, "Running")
    stream = watch.Watch().stream(place.api.read_namespaced_pod_log, name, place.namespace, follow=True)
    assert next(stream) == "ready"
    _eviction(place, name)
    assert "asked" in list(stream)
    place.wait_gone(name)
    _refused(lambda: _eviction(place, name), 404, f'pods "{name}" not found')


def test_the_log_of_the_run_before_stays_while_the_next_one_runs(place):
    name = place.pod(
        "[ -e /state/x ] && { echo second; sleep 600; }; touch /state/x; echo first; exit 3",
        container={"volumeMounts": [{"name": "v", "mountPath": "/state"}]},
        restartPolicy="OnFailure",
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    place.until(lambda: (place.read(name).status.container_statuses or [None])[0], "its container")
    place.until(lambda: place.read(name).status.container_statuses[0].restart_count == 1, "a restart")
    place.until(lambda: place.log(name) == "second\n", "its log")
    assert place.log(name, previous=True) == "first\n"


def test_the_log_stays_after_the_end(place):
    name = place.pod("echo one; echo two")
    place.wait(name, "Succeeded")
    assert place.log(name) == "one\ntwo\n"
    assert place.log(name, container="base", tail_lines=0) == ""
    assert place.log(name, limit_bytes=5) == "one\nt"
    _refused(lambda: place.log(name, container="other"), 400, f"container other is not valid for pod {name}")


def test_there_is_no_log_of_a_run_that_was_not(place):
    name = place.pod("true")
    place.wait(name, "Succeeded")
    _refused(
        lambda: place.log(name, previous=True),
        400,
        f'previous terminated container "base" in pod "{name}" not found',
    )


def test_the_deadline_ends_the_pod_and_says_so(place):
    name = place.pod(
        "trap 'exit 7' TERM; while :; do sleep 0.1; done",
        activeDeadlineSeconds=2,
        terminationGracePeriodSeconds=5,
    )
    done = place.wait(name, "Failed")
    assert done.status.reason == "DeadlineExceeded"
    assert done.status.message == "Pod was active on the node longer than the specified deadline"
    events = place.until(
        lambda: [e for e in place.events(name) if e.reason == "DeadlineExceeded"], "the deadline's event"
    )
    assert events[0].message == done.status.message


def test_two_containers_end_each_for_itself(place):
    side = {
        "name": "side",
        "image": place.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "sleep 1; exit 4"],
    }
    base = {"name": "base", "image": place.image, "imagePullPolicy": "IfNotPresent"}
    manifest = {
        "metadata": {"name": "contract-two"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{**base, "command": ["sh", "-c", "echo base"]}, side],
        },
    }
    place.api.create_namespaced_pod(place.namespace, manifest)
    place.names.append("contract-two")
    done = place.wait("contract-two", "Failed")
    ends = {row.name: row.state.terminated.exit_code for row in done.status.container_statuses}
    assert ends == {"base": 0, "side": 4}
    said = _refused(lambda: place.log("contract-two"), 400, "a container name must be specified", "base side")
    assert said["reason"] == "BadRequest"
    assert place.log("contract-two", container="base") == "base\n"


def test_the_log_is_the_message_of_who_left_none(place):
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    failed = place.pod("echo one; echo two; exit 1", container=policy)
    well = place.pod("echo one", container=policy)
    assert terminated(place.wait(failed, "Failed")).message == "one\ntwo\n"
    assert terminated(place.wait(well, "Succeeded")).message is None
