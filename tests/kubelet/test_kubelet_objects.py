"""Objects: create, read, list, select, patch, replace, delete, watch; refusals in the words of a cluster."""

from __future__ import annotations

import json
import threading
import time

import pytest
from kubernetes import client, watch
from kubernetes.client import ApiException
from trainyard.kubelet.resources import RESOURCES
from trainyard.kubelet.store import HISTORY
from trainyard.kubelet.testing import pod_manifest


def _status(caught):
    body = json.loads(caught.value.body)
    assert body["kind"] == "Status"
    assert body["code"] == caught.value.status
    return body


def _map(name, **meta):
    return {"metadata": {"name": name, **meta}, "data": {"a": "1"}}


def test_generate_name_and_already_exists(core, name):
    made = core.create_namespaced_config_map("default", {"metadata": {"generateName": f"{name}-"}})
    assert made.metadata.name.startswith(f"{name}-")
    assert len(made.metadata.name) == len(name) + 6
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_config_map("default", {"metadata": {"name": made.metadata.name}})
    body = _status(caught)
    assert (body["code"], body["reason"]) == (409, "AlreadyExists")
    assert body["details"] == {"name": made.metadata.name, "kind": "configmaps"}


def test_a_dry_run_leaves_nothing(cluster, core, name):
    made = core.create_namespaced_pod("default", pod_manifest(name, ["true"]), dry_run="All")
    assert made.metadata.uid
    assert cluster.pod(name) is None
    core.create_namespaced_config_map("default", _map(name))
    core.patch_namespaced_config_map(name, "default", {"data": {"a": "2"}}, dry_run="All")
    core.delete_namespaced_config_map(name, "default", dry_run="All")
    assert core.read_namespaced_config_map(name, "default").data == {"a": "1"}


def _pod(pod, /, **changes):
    manifest = pod_manifest(pod, ["true"])
    manifest["spec"]["containers"][0].update(changes)
    return manifest


def _with_spec(name, **changes):
    return pod_manifest(name, ["true"], **changes)


@pytest.mark.parametrize(
    ("manifest", "code", "message"),
    [
        ({"metadata": {"name": "x"}}, 422, "spec: Required value"),
        (
            {"metadata": {}, "spec": {}},
            422,
            "metadata.name: Required value: name or generateName is required",
        ),
        (_pod("Upper_Case"), 422, "lowercase RFC 1123 subdomain"),
        (_with_spec("x", containers=[]), 422, "spec.containers: Required value"),
        (_pod("x", image=None), 422, "spec.containers[0].image: Required value"),
        (_pod("x", name="A"), 422, "lowercase RFC 1123 label"),
        (_with_spec("x", restartPolicy="Sometimes"), 422, 'supported values: "Always", "OnFailure", "Never"'),
        (_with_spec("x", activeDeadlineSeconds=0), 422, "spec.activeDeadlineSeconds: Invalid value: 0"),
        (_with_spec("x", hostname="no_good"), 422, "spec.hostname"),
        (_with_spec("x", volumes=[{"name": "v", "nfs": {}}]), 422, "the process kubelet has volumes of type"),
        (_with_spec("x", volumes=[{"name": "v"}, {"name": "v"}]), 422, 'Duplicate value: "v"'),
        (_with_spec("x", volumes=[{"emptyDir": {}}]), 422, "spec.volumes[0].name: Required value"),
        (
            _with_spec("x", volumes=[{"name": "v", "emptyDir": {}, "hostPath": {}}]),
            422,
            "may not specify more than 1 volume type",
        ),
        (
            _pod("x", volumeMounts=[{"name": "v", "mountPath": "/d"}]),
            422,
            'volumeMounts[0].name: Not found: "v"',
        ),
        (
            _pod("x", env=[{"name": "A", "value": 1}]),
            400,
            "cannot unmarshal number into Go struct field EnvVar",
        ),
        (_pod("x", env=[{"value": "1"}]), 422, "env[0].name: Required value"),
        (_pod("x", env=[{"name": "A=B", "value": "1"}]), 422, 'hold no "="'),
        (
            _pod("x", env=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {}}}]),
            422,
            "may not be specified",
        ),
        (_pod("x", command="true"), 400, "command must be a list of strings"),
        (_pod("x", env={"A": "1"}), 400, "env must be a list of objects"),
        (_pod("x", resources={"limits": {"memory": "2GB"}}), 400, "quantity must be a number with a unit"),
        (_pod("x", resources={"limits": {"memory": "-1"}}), 422, "must be greater than or equal to 0"),
        (
            _pod("x", resources={"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}),
            422,
            "must be less than or equal to cpu limit",
        ),
        (_with_spec("x", initContainers=[{"name": "base", "image": "i"}]), 422, "Duplicate value"),
        (
            _with_spec("x", initContainers=[{"name": "s", "image": "i", "restartPolicy": "Always"}]),
            422,
            "sidecar containers are not supported",
        ),
        ({"kind": "Service", "metadata": {"name": "x"}}, 400, "the kind of the manifest must be Pod"),
        ({"metadata": {"name": "x", "namespace": "other"}}, 400, "does not match the namespace"),
        ({"metadata": {"name": "x", "labels": {"a": 1}}}, 400, "cannot unmarshal number"),
        ({"metadata": {"name": "x", "labels": {"a": "b c"}}}, 422, "a valid label must be"),
        ({"metadata": {"name": "x", "labels": {"a b": "c"}}}, 422, 'a key must be "name" or "prefix/name"'),
        ({"metadata": {"name": "x", "labels": []}}, 400, "metadata.labels must be an object"),
        ({"metadata": []}, 400, "metadata must be an object"),
        ([], 400, "must be a JSON object"),
    ],
)
def test_a_bad_pod_is_refused_with_the_reason(core, manifest, code, message):
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_pod("default", manifest)
    body = _status(caught)
    assert body["code"] == code
    assert message in body["message"]


def test_all_faults_of_a_pod_are_named_at_once(core):
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_pod("default", _pod("x", image="", env=[{"name": ""}]))
    assert [cause["field"] for cause in _status(caught)["details"]["causes"]] == [
        "spec.containers[0].image",
        "spec.containers[0].env[0].name",
    ]


def test_lists_select_by_labels_and_fields_in_a_namespace_or_all(cluster, core, name):
    for space in ("one", "two"):
        for role in ("ps", "chief"):
            manifest = pod_manifest(f"{name}-{role}", ["true"], labels={"gang": name, "role": role})
            core.create_namespaced_pod(space, manifest)
            cluster.wait_phase(f"{name}-{role}", "Succeeded", namespace=space)
    everywhere = core.list_pod_for_all_namespaces(label_selector=f"gang={name}")
    assert len(everywhere.items) == 4
    assert everywhere.items[0].metadata.name == f"{name}-chief"

    def names(**query):
        return [pod.metadata.name for pod in core.list_namespaced_pod("one", **query).items]

    assert names(label_selector=f"gang={name},role in (ps)") == [f"{name}-ps"]
    assert names(label_selector=f"gang={name}", field_selector="status.phase=Failed") == []
    assert names(field_selector=f"metadata.name={name}-ps") == [f"{name}-ps"]
    with pytest.raises(ApiException) as caught:
        names(label_selector="a in b")
    assert caught.value.status == 400
    events = core.list_namespaced_event(
        "one", field_selector=f"involvedObject.name={name}-ps,reason=Started"
    ).items
    assert [event.message for event in events] == ["Started container base"]
    assert events[0].involved_object.field_path == "spec.containers{base}"
    assert events[0].source.component == "kubelet"


def test_lists_come_in_pages(core, name):
    for i in range(5):
        core.create_namespaced_config_map("default", _map(f"{name}-{i}", labels={"set": name}))
    seen, token = [], None
    while True:
        page = core.list_namespaced_config_map(
            "default", label_selector=f"set={name}", limit=2, _continue=token
        )
        seen.append([row.metadata.name for row in page.items])
        token = page.metadata._continue
        if not token:
            break
    assert seen == [[f"{name}-0", f"{name}-1"], [f"{name}-2", f"{name}-3"], [f"{name}-4"]]
    for bad in ("!", "bm90IGpzb24=", "MQ=="):
        with pytest.raises(ApiException, match="continue key is not valid"):
            core.list_namespaced_config_map("default", _continue=bad)


def test_labels_are_patched_and_the_rest_of_a_pod_is_not(core, name, ended):
    ended(["true"])
    patched = core.patch_namespaced_pod(
        name, "default", {"metadata": {"labels": {"already_checked": "True"}}}
    )
    assert patched.metadata.labels == {"already_checked": "True"}
    patch = [{"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}}]
    assert core.patch_namespaced_pod(name, "default", patch).metadata.annotations == {"a": "b"}
    for body, code in (
        ({"spec": {"restartPolicy": "Always"}}, 422),
        ({"metadata": {"name": "other"}}, 422),
        ({"metadata": {"labels": {"a": "b c"}}}, 422),
        ({"metadata": {"resourceVersion": "1"}}, 409),
    ):
        with pytest.raises(ApiException) as caught:
            core.patch_namespaced_pod(name, "default", body)
        assert _status(caught)["code"] == code
    assert (
        core.patch_namespaced_pod(name, "default", {"status": {"phase": "Pending"}}).status.phase
        == "Succeeded"
    )
    shown = core.patch_namespaced_pod_status(name, "default", {"status": {"reason": "Tested"}})
    assert shown.status.reason == "Tested"


def test_an_object_is_replaced_only_in_the_version_that_was_read(core, name):
    first = core.create_namespaced_config_map("default", _map(name))
    first.data = {"a": "2"}
    second = core.replace_namespaced_config_map(name, "default", first)
    assert second.data == {"a": "2"}
    assert second.metadata.uid == first.metadata.uid
    assert second.metadata.resource_version != first.metadata.resource_version
    with pytest.raises(ApiException, match="the object has been modified") as caught:
        core.replace_namespaced_config_map(name, "default", first)
    assert caught.value.status == 409


def test_delete_collection_ends_what_is_selected(cluster, core, name):
    for i in range(3):
        cluster.run(pod_manifest(f"{name}-{i}", ["sleep", "61.01"], labels={"set": name, "n": str(i)}))
        cluster.wait_phase(f"{name}-{i}", "Running")
    core.delete_collection_namespaced_pod(
        "default", label_selector=f"set={name},n!=2", grace_period_seconds=5
    )
    cluster.wait_gone(f"{name}-0", timeout=5)
    cluster.wait_gone(f"{name}-1", timeout=5)
    assert cluster.pod(f"{name}-2")["status"]["phase"] == "Running"
    core.delete_namespaced_pod(f"{name}-2", "default", grace_period_seconds=0)


def test_a_delete_may_name_the_object_that_it_means(core, name, ended):
    pod = ended(["true"])
    other = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="other"))
    with pytest.raises(ApiException) as caught:
        core.delete_namespaced_pod(name, "default", body=other)
    assert caught.value.status == 409
    same = client.V1DeleteOptions(
        preconditions=client.V1Preconditions(uid=pod["metadata"]["uid"]), propagation_policy="Foreground"
    )
    assert core.delete_namespaced_pod(name, "default", body=same).metadata.name == name
    with pytest.raises(ApiException) as caught:
        core.delete_namespaced_pod(name, "default")
    assert _status(caught)["message"] == f'pods "{name}" not found'
    with pytest.raises(ApiException, match="gracePeriodSeconds must be 0 or more"):
        core.delete_namespaced_pod("any", "default", body={"gracePeriodSeconds": -1})


def test_passive_kinds_are_kept(core, name):
    service = {
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"a": "b"}},
    }
    assert core.create_namespaced_service("default", service).spec.publish_not_ready_addresses is True
    assert core.delete_namespaced_service(name, "default").metadata is not None
    with pytest.raises(ApiException, match=r"spec.ports: Required value"):
        core.create_namespaced_service(
            "default", {"metadata": {"name": name}, "spec": {"selector": {"a": "b"}}}
        )
    secret = core.create_namespaced_secret("default", {"metadata": {"name": name}, "stringData": {"a": "b"}})
    assert (secret.data, secret.type) == ({"a": "Yg=="}, "Opaque")
    with pytest.raises(ApiException, match=r"spec.accessModes: Required value"):
        core.create_namespaced_persistent_volume_claim("default", {"metadata": {"name": name}, "spec": {}})
    assert core.read_node("process-kubelet").status.allocatable["pods"] == "110"
    assert core.list_node().items[0].status.conditions[0].type == "Ready"


def test_a_namespace_comes_with_its_first_object_and_goes_with_all_of_them(cluster, core, name):
    core.create_namespaced_config_map(name, _map("a"))
    core.create_namespaced_pod(name, pod_manifest("b", ["sleep", "61.02"], terminationGracePeriodSeconds=1))
    assert core.read_namespace(name).status.phase == "Active"
    core.delete_namespace(name)
    assert core.list_namespaced_config_map(name).items == []
    cluster.wait_gone("b", namespace=name, timeout=5)
    with pytest.raises(ApiException) as caught:
        core.read_namespace(name)
    assert caught.value.status == 404


def test_a_watch_tells_the_life_of_a_pod(cluster, core, name):
    seen, ready = [], threading.Event()
    version = core.list_namespaced_pod("default").metadata.resource_version

    def look():
        stream = watch.Watch().stream(
            core.list_namespaced_pod,
            "default",
            label_selector=f"watched={name}",
            resource_version=version,
            timeout_seconds=30,
        )
        ready.set()
        for event in stream:
            pod = event["object"]
            seen.append((event["type"], pod.status.phase, int(pod.metadata.resource_version)))
            if event["type"] == "DELETED":
                return

    thread = threading.Thread(target=look)
    thread.start()
    ready.wait()
    cluster.run(pod_manifest(name, ["sh", "-c", "sleep 0.2"], labels={"watched": name}))
    cluster.wait_phase(name, "Succeeded")
    core.delete_namespaced_pod(name, "default")
    thread.join(20)
    assert not thread.is_alive()
    assert seen[0][:2] == ("ADDED", "Pending")
    assert seen[-1][:2] == ("DELETED", "Succeeded")
    assert {row[0] for row in seen[1:-1]} == {"MODIFIED"}
    phases = [row[1] for row in seen]
    assert phases == sorted(phases, key=["Pending", "Running", "Succeeded"].index)
    assert [row[2] for row in seen] == sorted({row[2] for row in seen})


def test_a_watch_without_a_version_begins_with_what_there_is(core, name):
    core.create_namespaced_config_map("default", _map(name))
    stream = watch.Watch().stream(
        core.list_namespaced_config_map, "default", field_selector=f"metadata.name={name}", timeout_seconds=1
    )
    began = time.monotonic()
    assert [(event["type"], event["object"].data) for event in stream] == [("ADDED", {"a": "1"})]
    assert 0.8 < time.monotonic() - began < 5


def test_a_watch_sees_an_object_come_into_its_selection_and_leave_it(core, name):
    core.create_namespaced_config_map("default", _map(name))
    version = core.list_namespaced_config_map("default").metadata.resource_version
    for labels in ({"on": name}, {"on": name, "x": "y"}, {"on": None}):
        core.patch_namespaced_config_map(name, "default", {"metadata": {"labels": labels}})
    stream = watch.Watch().stream(
        core.list_config_map_for_all_namespaces,
        label_selector=f"on={name}",
        resource_version=version,
        timeout_seconds=1,
    )
    assert [event["type"] for event in stream] == ["ADDED", "MODIFIED", "DELETED"]


def test_a_watch_from_too_long_ago_must_list_again(cluster, core, name):
    version = core.create_namespaced_config_map("default", _map(name)).metadata.resource_version
    for i in range(HISTORY + 1):
        change = {"data": {"i": str(i)}}
        cluster.kubelet.store.update(
            RESOURCES["configmaps"], "default", name, lambda obj, c=change: {**obj, **c}
        )
    with pytest.raises(ApiException) as caught:
        for _ in watch.Watch().stream(
            core.list_namespaced_pod, "default", resource_version=version, timeout_seconds=1
        ):
            pass
    assert caught.value.status == 410


def test_the_same_event_again_raises_its_count(cluster, core, name):
    env = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "never-there", "key": "a"}}}]
    cluster.run(pod_manifest(name, ["true"], container={"env": env}))

    def counts():
        rows = core.list_namespaced_event(
            "default", field_selector=f"involvedObject.name={name},reason=Failed"
        )
        return [row.count for row in rows.items]

    deadline = time.monotonic() + 10
    while counts() in ([], [1]) and time.monotonic() < deadline:
        time.sleep(0.1)
    (count,) = counts()
    assert count >= 2
    core.delete_namespaced_pod(name, "default")
