"""Events, quotas, versions, watches and Services: the contract's third part."""

from __future__ import annotations

import json
import uuid

import pytest
from kubernetes import watch
from kubernetes.client import ApiException


def test_events_tell_a_pods_life_to_people(place):
    name = place.pod("exit 0")
    uid = place.wait(name, "Succeeded").metadata.uid
    told = place.until(
        lambda: place.events(name) if {"Started"} <= {event.reason for event in place.events(name)} else None,
        "the events",
    )
    reasons = [event.reason for event in told]
    assert [r for r in ("Scheduled", "Pulled", "Created", "Started") if r not in reasons] == []
    for event in told:
        involved = event.involved_object
        assert (involved.kind, involved.name, involved.namespace, involved.uid) == (
            "Pod",
            name,
            place.namespace,
            uid,
        )
        assert event.type in ("Normal", "Warning")
        assert event.message
        assert event.metadata.name.startswith(f"{name}.")
        assert event.reporting_component or event.source.component
    by_reason = {event.reason: event for event in told}
    assert by_reason["Started"].message == "Started container base"
    assert by_reason["Started"].involved_object.field_path == "spec.containers{base}"
    assert by_reason["Started"].count == 1
    assert by_reason["Scheduled"].message.startswith(
        f"Successfully assigned {place.namespace}/{name} to {place.read(name).spec.node_name}"
    )


def test_what_goes_on_is_one_event_with_a_count(place):
    name = place.pod("true", container={"envFrom": [{"secretRef": {"name": "contract-never"}}]})

    def counted():
        # Times are whole seconds, and a busy node may first say that its cache of Secrets lags: another event.
        told = [e for e in place.events(name) if e.reason == "Failed" and "not found" in e.message]
        return [e for e in told if (e.count or 1) > 1 and e.last_timestamp > e.first_timestamp]

    event = place.until(counted, "the same event again")[0]
    assert event.type == "Warning"
    assert event.message == 'Error: secret "contract-never" not found'


@pytest.fixture
def quota(place):
    """Puts a quota on the namespace, and takes it away."""
    name = f"contract-{uuid.uuid4().hex[:8]}"

    def put(**hard: str) -> str:
        body = {"metadata": {"name": name}, "spec": {"hard": hard}}
        place.api.create_namespaced_resource_quota(place.namespace, body)
        asks = {
            "containers": [{"name": "base", "image": "x", "resources": {"requests": {"memory": "1000Ti"}}}]
        }
        body = {"metadata": {"name": "contract-probe"}, "spec": asks}

        def counts() -> bool:
            # A cluster counts first what there is, and whoever admits pods learns of the quota a moment later.
            try:
                place.api.create_namespaced_pod(place.namespace, body, dry_run="All")
            except ApiException as e:
                return "exceeded quota" in e.body
            return False

        place.until(counts, "the quota's first refusal")
        return name

    yield put
    place.clean_up()
    place.api.delete_namespaced_resource_quota(name, place.namespace)


def test_beyond_the_quota_a_pod_is_refused_in_these_words(place, quota):
    name = quota(**{"requests.memory": "100Mi"})
    asks = {"resources": {"requests": {"memory": "60Mi"}}}
    place.pod("sleep 600", container=asks)
    with pytest.raises(ApiException) as caught:
        place.pod("sleep 600", container=asks)
    body = json.loads(caught.value.body)
    assert (caught.value.status, body["reason"]) == (403, "Forbidden")
    said = f"exceeded quota: {name}, requested: requests.memory=60Mi"
    said += ", used: requests.memory=60Mi, limited: requests.memory=100Mi"
    assert body["message"].startswith('pods "contract-')
    assert body["message"].endswith(f'" is forbidden: {said}')


def test_what_a_quota_counts_must_be_said(place, quota):
    name = quota(**{"requests.memory": "1Gi", "pods": "5"})
    with pytest.raises(ApiException) as caught:
        place.pod("true")
    assert caught.value.status == 403
    assert f"failed quota: {name}: must specify requests.memory" in json.loads(caught.value.body)["message"]


def test_only_who_read_the_newest_version_may_replace(place):
    name = f"contract-{uuid.uuid4().hex[:8]}"
    place.api.create_namespaced_config_map(place.namespace, {"metadata": {"name": name}, "data": {"a": "1"}})
    try:
        mine = place.api.read_namespaced_config_map(name, place.namespace)
        theirs = place.api.read_namespaced_config_map(name, place.namespace)
        theirs.data = {"a": "2"}
        after = place.api.replace_namespaced_config_map(name, place.namespace, theirs)
        assert after.metadata.resource_version != mine.metadata.resource_version
        mine.data = {"a": "3"}
        with pytest.raises(ApiException) as caught:
            place.api.replace_namespaced_config_map(name, place.namespace, mine)
        body = json.loads(caught.value.body)
        assert (caught.value.status, body["reason"]) == (409, "Conflict")
        assert f'Operation cannot be fulfilled on configmaps "{name}"' in body["message"]
        assert place.api.read_namespaced_config_map(name, place.namespace).data == {"a": "2"}
        with pytest.raises(ApiException) as caught:
            place.api.create_namespaced_config_map(place.namespace, {"metadata": {"name": name}})
        assert json.loads(caught.value.body)["reason"] == "AlreadyExists"
    finally:
        place.api.delete_namespaced_config_map(name, place.namespace)


def test_a_watch_goes_on_from_the_version_it_is_given(place):
    label = uuid.uuid4().hex
    first = place.pod("true", labels={"contract": label})
    place.wait(first, "Succeeded")
    listed = place.api.list_namespaced_pod(place.namespace, label_selector=f"contract={label}")
    assert [pod.metadata.name for pod in listed.items] == [first]
    second = place.pod("true", labels={"contract": label})
    seen = []
    watching = watch.Watch()
    for event in watching.stream(
        place.api.list_namespaced_pod,
        place.namespace,
        label_selector=f"contract={label}",
        resource_version=listed.metadata.resource_version,
        timeout_seconds=int(place.patience),
    ):
        seen.append((event["type"], event["object"].metadata.name))
        if event["object"].status.phase == "Succeeded":
            watching.stop()
    assert seen[0] == ("ADDED", second), "what was there before is not told again"
    assert {name for _, name in seen} == {second}


def test_a_headless_service_keeps_what_makes_it_one(place):
    name = f"contract-{uuid.uuid4().hex[:8]}"
    body = {
        "metadata": {"name": name, "labels": {"contract": name}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"contract": name},
            "ports": [{"name": "grpc", "port": 2222}],
        },
    }
    place.api.create_namespaced_service(place.namespace, body)
    try:
        found = place.api.read_namespaced_service(name, place.namespace)
        assert (found.spec.cluster_ip, found.spec.publish_not_ready_addresses) == ("None", True)
        assert found.spec.selector == {"contract": name}
        with pytest.raises(ApiException) as caught:
            place.api.create_namespaced_service(place.namespace, body)
        assert (caught.value.status, json.loads(caught.value.body)["reason"]) == (409, "AlreadyExists")
    finally:
        place.api.delete_namespaced_service(name, place.namespace)
    with pytest.raises(ApiException) as caught:
        place.api.delete_namespaced_service(name, place.namespace)
    assert caught.value.status == 404
