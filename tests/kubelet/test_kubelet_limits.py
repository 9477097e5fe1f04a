"""Room and limits: memory that is measured, requests that must fit, quotas, GPUs, node selectors."""

from __future__ import annotations

import json
import os
import textwrap

import pytest
from kubernetes.client import ApiException
from trainyard.kubelet import FakeCluster, node
from trainyard.kubelet.kubelet import ProcessKubelet
from trainyard.kubelet.testing import pod_manifest

HOG = textwrap.dedent(
    """
    import os, time
    held = []
    def grow():
        for _ in range(30):
            held.append(bytearray(os.urandom(1024)) * 10240)
            time.sleep(0.02)
        time.sleep(30)
    if {fork}:
        os.fork()
    grow()
    """
)


def _limited(memory, **more):
    return {"resources": {"limits": {"memory": memory}, **more}}


@pytest.mark.parametrize("fork", [False, True])
def test_a_container_over_its_memory_limit_is_killed(cluster, name, ended, fork):
    """300 MiB in one process, or 300 MiB in each of two: the whole tree counts and the whole tree goes."""
    limit = "400Mi" if fork else "150Mi"
    pod = ended(["python", "-c", HOG.format(fork=fork)], container=_limited(limit))
    state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (pod["status"]["phase"], state["reason"], state["exitCode"]) == ("Failed", "OOMKilled", 137)
    message = dict(cluster.events(name))["OOMKilled"]
    assert message.startswith("Container base held ")
    assert message.endswith(f"with a memory limit of {limit[:-2]}.0 MiB")


def test_a_container_within_its_limit_is_left_alone(ended):
    script = "import time; held = bytearray(30 * 2**20); time.sleep(0.8)"
    assert ended(["python", "-c", script], container=_limited("200Mi"))["status"]["phase"] == "Succeeded"


def test_address_space_is_not_limited(ended):
    """TensorFlow reserves far more than it uses."""
    script = "import mmap, time; m = mmap.mmap(-1, 20 * 2**30); time.sleep(0.5)"
    assert ended(["python", "-c", script], container=_limited("200Mi"))["status"]["phase"] == "Succeeded"


def _scheduled(cluster, name):
    def said(pod):
        return any(row["type"] == "PodScheduled" for row in pod["status"].get("conditions", ()))

    pod = cluster.wait_until(name, said, "a word of the scheduler")
    return next(row for row in pod["status"]["conditions"] if row["type"] == "PodScheduled")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"container": _limited("1000Ti")}, "0/1 nodes are available: 1 Insufficient memory."),
        (
            {"container": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}},
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        ),
        (
            {"container": {"resources": {"requests": {"cpu": "10000", "memory": "1000Ti"}}}},
            "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory.",
        ),
        (
            {"nodeSelector": {"pool": "gpu"}},
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        ),
        (
            {"nodeName": "other"},
            '0/1 nodes are available: 1 node(s) didn\'t match the requested node name "other".',
        ),
        (
            {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "nope"}}]},
            '0/1 nodes are available: persistentvolumeclaim "nope" not found.',
        ),
    ],
)
def test_what_does_not_fit_waits_and_says_why(cluster, core, name, options, message):
    cluster.run(pod_manifest(name, ["true"], **options))
    condition = _scheduled(cluster, name)
    assert (condition["status"], condition["reason"], condition["message"]) == (
        "False",
        "Unschedulable",
        message,
    )
    assert cluster.pod(name)["status"]["phase"] == "Pending"
    assert ("FailedScheduling", message) in cluster.events(name)
    core.delete_namespaced_pod(name, "default")
    assert cluster.pod(name) is None


def test_a_node_selector_that_fits(ended):
    assert ended(["true"], nodeSelector={"pool": "test"})["status"]["phase"] == "Succeeded"


def test_a_pod_starts_as_soon_as_another_leaves_room(cluster, core, name):
    node = core.read_node("process-kubelet")
    most = int(int(node.status.allocatable["memory"].removesuffix("Ki")) * 0.8)
    container = {"resources": {"requests": {"memory": f"{most}Ki"}}}
    cluster.run(pod_manifest(f"{name}-a", ["sleep", "61.03"], container=container))
    cluster.wait_phase(f"{name}-a", "Running")
    cluster.run(pod_manifest(f"{name}-b", ["true"], container=container))
    assert _scheduled(cluster, f"{name}-b")["message"] == "0/1 nodes are available: 1 Insufficient memory."
    core.delete_namespaced_pod(f"{name}-a", "default")
    cluster.wait_phase(f"{name}-b", "Succeeded")


def test_a_gang_of_more_cores_than_there_are_runs_at_once(cluster, core, name, tmp_path):
    cores = int(core.read_node("process-kubelet").status.capacity["cpu"])
    container = {"resources": {"requests": {"cpu": str(cores)}}}
    for i in range(3):
        script = f"touch {tmp_path}/{i}; while [ $(ls {tmp_path} | wc -l) -lt 3 ]; do sleep 0.05; done"
        cluster.run(pod_manifest(f"{name}-{i}", ["sh", "-c", script], container=container))
    for i in range(3):
        cluster.wait_phase(f"{name}-{i}", "Succeeded")


def test_gpus_are_handed_out_one_by_one():
    with FakeCluster(gpus=2) as cluster:
        container = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        script = "echo gpu=$CUDA_VISIBLE_DEVICES; sleep 0.5"
        for name in ("a", "b"):
            cluster.run(pod_manifest(name, ["sh", "-c", script], container=container))
        cluster.run(pod_manifest("c", ["sh", "-c", "echo gpu=$CUDA_VISIBLE_DEVICES"]))
        for name in ("a", "b", "c"):
            cluster.wait_phase(name, "Succeeded")
        assert {cluster.log("a"), cluster.log("b")} == {"gpu=0\n", "gpu=1\n"}
        assert cluster.log("c") == "gpu=\n"
        assert cluster.core_v1().read_node("process-kubelet").status.capacity["nvidia.com/gpu"] == "2"


def test_no_more_pods_run_at_once_than_it_is_told(tmp_path):
    os.mkfifo(tmp_path / "word")
    with FakeCluster(max_pods=2) as cluster:
        for name in ("a", "b", "c"):
            cluster.run(pod_manifest(name, ["sh", "-c", f"read word < {tmp_path / 'word'}"]))
        cluster.wait_until("c", lambda pod: pod["status"].get("conditions"), "a word of the scheduler")
        assert _scheduled(cluster, "c")["message"] == "0/1 nodes are available: 1 Too many pods."
        assert cluster.core_v1().read_node("process-kubelet").status.capacity["pods"] == "2"
        word = os.open(tmp_path / "word", os.O_RDWR)  # to write to a pipe that nobody may read yet
        os.write(word, b"\n\n\n")
        for name in ("a", "b", "c"):
            cluster.wait_phase(name, "Succeeded")
        os.close(word)


def test_a_node_keeps_at_least_as_many_finished_pods_as_it_runs(monkeypatch):
    monkeypatch.setattr(node, "KEEP_FINISHED", 1)
    with FakeCluster(max_pods=3) as cluster:
        for name in ("a", "b", "c"):
            cluster.run(pod_manifest(name, ["true"]))
            cluster.wait_phase(name, "Succeeded")
        assert all(cluster.pod(name) for name in ("a", "b", "c"))
        cluster.run(pod_manifest("d", ["true"]))
        assert cluster.kubelet.store.wait(lambda: sum(map(bool, map(cluster.pod, "abcd"))) == 3, 30)


@pytest.mark.parametrize(
    ("hard", "resources", "message"),
    [
        ({"pods": "0"}, {}, "exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0"),
        ({"requests.memory": "1Gi"}, {"requests": {"memory": "2Gi"}}, "limited: requests.memory=1Gi"),
        ({"memory": "1Gi"}, {"requests": {"memory": "2Gi"}}, "limited: memory=1Gi"),
        ({"limits.cpu": "1"}, {"limits": {"cpu": "1500m"}}, "requested: limits.cpu=1500m"),
        ({"requests.nvidia.com/gpu": "0"}, {"limits": {"nvidia.com/gpu": "1"}}, "requests.nvidia.com/gpu=1"),
    ],
)
def test_a_pod_over_a_quota_is_forbidden(core, name, hard, resources, message):
    core.create_namespaced_resource_quota(name, {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_pod(name, pod_manifest("p", ["true"], container={"resources": resources}))
    body = json.loads(caught.value.body)
    assert (body["code"], body["reason"]) == (403, "Forbidden")
    assert body["message"].startswith('pods "p" is forbidden: exceeded quota: q')
    assert message in body["message"]


def test_a_quota_must_be_of_quantities(core, name):
    with pytest.raises(ApiException, match=r"spec.hard\[memory\]: quantity must be"):
        core.create_namespaced_resource_quota(
            name, {"metadata": {"name": "q"}, "spec": {"hard": {"memory": "2GB"}}}
        )


def test_a_quota_with_room_lets_pods_in(cluster, core, name):
    hard = {"pods": "1", "requests.memory": "1Gi", "configmaps": "0"}
    core.create_namespaced_resource_quota(name, {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    for word in ("a", "b"):  # one after the other: what is over does not count
        asks = {"resources": {"requests": {"memory": "600Mi"}}}
        core.create_namespaced_pod(name, pod_manifest(word, ["true"], container=asks))
        cluster.wait_phase(word, "Succeeded", namespace=name)


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 70000}, {"shutdown_grace": -1}, {"gpus": -1}])
def test_bad_options_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="must"):
        ProcessKubelet(tmp_path, **options)


def test_a_bad_back_off_is_refused(tmp_path):
    with pytest.raises(ValueError, match="backoff must be"):
        ProcessKubelet(tmp_path, backoff=(5, 1)).start()
