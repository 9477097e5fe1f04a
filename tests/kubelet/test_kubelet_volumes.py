"""Volumes as folders."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kubernetes.client import ApiException
from trainyard.kubelet.testing import pod_manifest

CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}


def _mounted(volume, path="/data", **mount):
    """Options of pod_manifest for one volume."""
    return {
        "volumes": [{"name": "v", **volume}],
        "container": {"volumeMounts": [{"name": "v", "mountPath": path, **mount}]},
    }


def _wait_gone(path):
    """A pod's volumes go right after its end is known."""
    deadline = time.monotonic() + 5
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not path.exists()


def test_an_empty_dir_is_shared_by_containers_and_goes_with_the_pod(cluster, name):
    options = _mounted({"emptyDir": {}})
    mount = options["container"]["volumeMounts"]
    init = {
        "name": "i",
        "image": "n",
        "command": ["sh", "-c", "echo a > /data/x; echo /data"],
        "volumeMounts": mount,
    }
    cluster.run(pod_manifest(name, ["cat", "/data/x"], initContainers=[init], **options))
    cluster.wait_phase(name, "Succeeded")
    assert cluster.log(name) == "a\n"
    folder = Path(cluster.log(name, container="i").strip())
    assert folder.name == "v"
    _wait_gone(folder)


def test_a_claim_keeps_its_folder_from_pod_to_pod_until_it_is_deleted(cluster, core, name):
    claim = core.create_namespaced_persistent_volume_claim(
        "default", {"metadata": {"name": name}, "spec": CLAIM}
    )
    assert claim.status.phase == "Bound"
    options = _mounted({"persistentVolumeClaim": {"claimName": name}})
    for word, command in (("w", "echo kept > /data/f"), ("r", "cat /data/f")):
        cluster.run(pod_manifest(f"{name}-{word}", ["sh", "-c", command], **options))
        cluster.wait_phase(f"{name}-{word}", "Succeeded")
    assert cluster.log(f"{name}-r") == "kept\n"
    folder = cluster.kubelet.root / "claims" / "default" / name
    assert (folder / "f").exists()
    core.delete_namespaced_persistent_volume_claim(name, "default")
    assert not folder.exists()


def test_a_pod_waits_for_its_claim(cluster, core, name):
    cluster.run(pod_manifest(name, ["true"], **_mounted({"persistentVolumeClaim": {"claimName": name}})))
    assert cluster.pod(name)["status"]["phase"] == "Pending"
    core.create_namespaced_persistent_volume_claim("default", {"metadata": {"name": name}, "spec": CLAIM})
    cluster.wait_phase(name, "Succeeded")


def test_a_claim_of_a_host_path_volume_is_that_folder(cluster, core, name, tmp_path):
    volume = {"metadata": {"name": name}, "spec": {"hostPath": {"path": str(tmp_path / "store")}}}
    core.create_persistent_volume(volume)
    core.create_namespaced_persistent_volume_claim(
        "default", {"metadata": {"name": name}, "spec": {**CLAIM, "volumeName": name}}
    )
    options = _mounted({"persistentVolumeClaim": {"claimName": name}}, subPath="in/side")
    cluster.run(pod_manifest(name, ["touch", "/data/f"], **options))
    cluster.wait_phase(name, "Succeeded")
    assert (tmp_path / "store" / "in" / "side" / "f").exists()
    core.delete_namespaced_persistent_volume_claim(name, "default")
    assert (tmp_path / "store").exists()
    core.delete_persistent_volume(name)


def test_a_host_path_may_be_mounted_where_it_is_or_elsewhere(cluster, name, tmp_path):
    volume = {"hostPath": {"path": str(tmp_path)}}
    cluster.run(pod_manifest(f"{name}-a", ["touch", f"{tmp_path}/a"], **_mounted(volume, str(tmp_path))))
    options = _mounted(volume, "/elsewhere")
    options["container"] |= {"workingDir": "/elsewhere", "env": [{"name": "F", "value": "/elsewhere/c"}]}
    cluster.run(pod_manifest(f"{name}-b", ["sh", "-c", "touch b $F"], **options))
    for word in "ab":
        cluster.wait_phase(f"{name}-{word}", "Succeeded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("kind", "made"),
    [("DirectoryOrCreate", True), ("FileOrCreate", True), ("Directory", False), ("File", False)],
)
def test_a_host_path_is_what_its_type_says(cluster, core, name, tmp_path, kind, made):
    path = tmp_path / "x"
    cluster.run(pod_manifest(name, ["true"], **_mounted({"hostPath": {"path": str(path), "type": kind}})))
    if made:
        cluster.wait_phase(name, "Succeeded")
        assert path.is_dir() == (kind == "DirectoryOrCreate")
        return
    cluster.wait_until(name, lambda pod: "FailedMount" in dict(cluster.events(name)), "FailedMount")
    assert cluster.pod(name)["status"]["phase"] == "Pending"
    waiting = cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting == {"reason": "ContainerCreating"}
    with pytest.raises(ApiException, match="waiting to start: ContainerCreating"):
        cluster.log(name)
    (path.mkdir if kind == "Directory" else path.touch)()
    cluster.wait_phase(name, "Succeeded")


def test_config_maps_and_secrets_are_files(cluster, core, name):
    core.create_namespaced_config_map(
        "default", {"metadata": {"name": name}, "data": {"a.txt": "A"}, "binaryData": {"b": "Qg=="}}
    )
    core.create_namespaced_secret(
        "default", {"metadata": {"name": name}, "stringData": {"key": "S", "other": "O"}}
    )
    manifest = pod_manifest(
        name,
        ["sh", "-c", "cat /c/a.txt /c/b /s/in/key; echo; stat -c %a /c/a.txt /s/in/key; ls /s /n"],
        container={"volumeMounts": [{"name": word, "mountPath": f"/{word}"} for word in "csn"]},
        volumes=[
            {"name": "c", "configMap": {"name": name, "defaultMode": 0o640}},
            {"name": "s", "secret": {"secretName": name, "items": [{"key": "key", "path": "in/key"}]}},
            {"name": "n", "secret": {"secretName": "not-there", "optional": True}},
        ],
    )
    cluster.run(manifest)
    pod = cluster.wait_phase(name, "Succeeded")
    lines = cluster.log(name).splitlines()
    assert lines[:3] == ["ABS", "640", "600"]
    assert [line for line in lines[3:] if line and not line.endswith(":")] == ["in"]
    _wait_gone(cluster.kubelet.root / "pods" / pod["metadata"]["uid"] / "volumes")


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"configMap": {"name": "not-there"}}, 'configmap "not-there" not found'),
        (
            {"secret": {"secretName": "bad", "items": [{"key": "x", "path": "x"}]}},
            'secret "bad" has no key "x"',
        ),
        ({"secret": {"secretName": "bad", "items": [{"key": "a", "path": "../a"}]}}, "leaves its volume"),
        ({"secret": {"secretName": "worse"}}, 'the value of key "a" is not base64'),
    ],
)
def test_a_volume_that_cannot_be_had_is_named(cluster, core, name, volume, message):
    for secret, value in (("bad", "YQ=="), ("worse", "%")):
        core.create_namespaced_secret(name, {"metadata": {"name": secret}, "data": {"a": value}})
    cluster.run(pod_manifest(name, ["true"], **_mounted(volume)), namespace=name)

    def said(pod):
        return message in dict(cluster.events(name, name)).get("FailedMount", "")

    cluster.wait_until(name, said, message, namespace=name)
    core.delete_namespaced_pod(name, name)
    cluster.wait_gone(name, namespace=name, timeout=5)


def test_a_sub_path_must_stay_inside(core, name):
    with pytest.raises(ApiException, match="must not contain"):
        core.create_namespaced_pod("default", pod_manifest(name, ["true"], **_mounted({}, subPath="../x")))
    with pytest.raises(ApiException, match="mountPath: Required value"):
        core.create_namespaced_pod("default", pod_manifest(name, ["true"], **_mounted({}, "")))
