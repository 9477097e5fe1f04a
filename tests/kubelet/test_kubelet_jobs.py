"""Indexed Jobs on the process kubelet: real pods, restarted, given up and removed as a cluster's controller does."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from trainyard.kubelet import FakeCluster
from trainyard.kubelet.job_manifest import ranges


@pytest.fixture(scope="module")
def running() -> Any:
    with FakeCluster(backoff=(0.05, 0.2)) as cluster:
        yield cluster


@pytest.fixture
def batch(running: FakeCluster) -> client.BatchV1Api:
    return client.BatchV1Api(running.core_v1().api_client)


def job(name: str, source: str, *, completions: int = 3, **spec: Any) -> dict[str, Any]:
    """An Indexed Job whose pods run a Python source with the index in `index`."""
    source = f"import os, sys, time; index = int(os.environ['JOB_COMPLETION_INDEX'])\n{source}"
    container = {"name": "base", "image": "none", "command": [sys.executable, "-c", source]}
    return {
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": completions,
            "parallelism": completions,
            "template": {
                "metadata": {"labels": {"of": name}},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 1,
                    "containers": [container],
                },
            },
            **spec,
        },
    }


def wait(batch: client.BatchV1Api, name: str, done: Any) -> client.V1Job:
    deadline = time.monotonic() + 60
    while True:
        found = batch.read_namespaced_job(name, "default")
        if done(found):
            return found
        assert time.monotonic() < deadline, found.status
        time.sleep(0.05)


def ended(found: client.V1Job) -> str:
    """The type of the condition that ends a Job, or ""."""
    rows = [c.type for c in found.status.conditions or () if c.status == "True"]
    return next((kind for kind in rows if kind in ("Complete", "Failed")), "")


def pods(running: FakeCluster, name: str) -> list[client.V1Pod]:
    return running.core_v1().list_namespaced_pod("default", label_selector=f"job-name={name}").items


def test_every_index_runs_once_under_its_own_host_name(running: Any, batch: Any, tmp_path: Path) -> None:
    source = f"open(os.path.join({str(tmp_path)!r}, os.environ['HOSTNAME']), 'w').write(str(index))"
    batch.create_namespaced_job("default", job("hosts", source))
    found = wait(batch, "hosts", ended)
    assert (ended(found), found.status.succeeded, found.status.completed_indexes) == ("Complete", 3, "0-2")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {f"hosts-{i}": str(i) for i in range(3)}
    first = pods(running, "hosts")[0]
    assert first.metadata.labels["of"] == "hosts"
    assert first.metadata.owner_references[0].uid == found.metadata.uid
    index = first.metadata.annotations["batch.kubernetes.io/job-completion-index"]
    assert first.metadata.name.startswith(f"hosts-{index}-")


def test_a_failed_index_is_tried_again_until_its_limit(running: Any, batch: Any, tmp_path: Path) -> None:
    once = f"p = os.path.join({str(tmp_path)!r}, str(index)); seen = os.path.exists(p); open(p, 'w')"
    source = f"{once}\nsys.exit(0 if index == 0 or (index == 1 and seen) else 7)"
    batch.create_namespaced_job("default", job("again", source, backoffLimitPerIndex=2))
    found = wait(batch, "again", ended)
    assert (ended(found), found.status.completed_indexes, found.status.failed_indexes) == (
        "Failed",
        "0,1",
        "2",
    )
    tries = [
        p.metadata.annotations["batch.kubernetes.io/job-completion-index"] for p in pods(running, "again")
    ]
    assert sorted(tries) == ["0", "1", "1", "2", "2", "2"]


def test_the_failure_policy_decides_by_exit_code(running: Any, batch: Any, tmp_path: Path) -> None:
    once = f"p = os.path.join({str(tmp_path)!r}, str(index)); seen = os.path.exists(p); open(p, 'w')"
    rules = [
        {"action": "FailIndex", "onExitCodes": {"containerName": "base", "operator": "In", "values": [81]}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [88]}},
    ]
    source = f"{once}\nsys.exit(81 if index == 0 else 0 if seen else 88)"
    wanted = job("policy", source, backoffLimitPerIndex=0, podFailurePolicy={"rules": rules})
    batch.create_namespaced_job("default", wanted)
    found = wait(batch, "policy", ended)
    assert (found.status.completed_indexes, found.status.failed_indexes) == ("1,2", "0")
    assert found.status.conditions[-1].reason == "FailedIndexes"

    rules[0] = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [83]}}
    source = "sys.exit(83) if index == 0 else time.sleep(600)"
    batch.create_namespaced_job("default", job("all", source, podFailurePolicy={"rules": rules}))
    found = wait(batch, "all", ended)
    assert (ended(found), found.status.conditions[-1].reason) == ("Failed", "PodFailurePolicy")
    wait(batch, "all", lambda _: [p.status.phase for p in pods(running, "all")] == ["Failed"])


def test_a_deadline_a_suspension_and_a_time_to_live(running: Any, batch: Any) -> None:
    batch.create_namespaced_job("default", job("late", "time.sleep(600)", activeDeadlineSeconds=1))
    found = wait(batch, "late", ended)
    assert found.status.conditions[-1].reason == "DeadlineExceeded"

    batch.create_namespaced_job("default", job("waits", "pass", suspend=True, ttlSecondsAfterFinished=0))
    wait(batch, "waits", lambda j: (j.status.conditions or [None])[0] is not None)
    assert pods(running, "waits") == []
    batch.patch_namespaced_job("waits", "default", {"spec": {"suspend": False}})
    deadline = time.monotonic() + 60
    while batch.list_namespaced_job("default", field_selector="metadata.name=waits").items:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pods(running, "waits") == []


def test_deleting_a_job_deletes_its_pods_if_told_to(running: Any, batch: Any) -> None:
    for name, left in (("kept", 3), ("gone", 0)):
        batch.create_namespaced_job("default", job(name, "time.sleep(600)"))
        wait(batch, name, lambda j: j.status.ready == 3)
        how = {"propagation_policy": "Background"} if name == "gone" else {}
        batch.delete_namespaced_job(name, "default", **how)
        deadline = time.monotonic() + 60
        while len(pods(running, name)) != left:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for pod in pods(running, name):
            running.core_v1().delete_namespaced_pod(pod.metadata.name, "default", grace_period_seconds=0)


def test_a_kubelet_that_comes_again_goes_on_with_its_jobs(tmp_path: Path) -> None:
    source = f"p = {str(tmp_path / 'seen')!r}; sys.exit(0) if os.path.exists(p) else (open(p, 'w'), time.sleep(600))"
    root = tmp_path / "root"
    with FakeCluster(root, backoff=(0.05, 0.2)) as first:
        api = client.BatchV1Api(first.core_v1().api_client)
        api.create_namespaced_job("default", job("on", source, completions=1))
        deadline = time.monotonic() + 60
        while not (tmp_path / "seen").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with FakeCluster(root, backoff=(0.05, 0.2)) as second:
        found = wait(client.BatchV1Api(second.core_v1().api_client), "on", ended)
        assert (ended(found), found.status.failed) == ("Complete", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completionMode": "NonIndexed"}, 'has "Indexed" only'),
        ({"completions": None}, "spec.completions: Required value"),
        ({"parallelism": -1}, "must be at least 0"),
        ({"template": None}, "spec.template: Required value"),
        ({"podFailurePolicy": {"rules": [{"action": "FailIndex"}]}}, "requires backoffLimitPerIndex"),
        ({"podFailurePolicy": {"rules": [{"action": "Guess"}]}}, "Unsupported value"),
    ],
)
def test_a_bad_job_is_refused(batch: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiException) as caught:
        batch.create_namespaced_job("default", job("bad", "pass", **change))
    assert caught.value.status == 422
    assert words in caught.value.body.replace('\\"', '"')
    assert ranges([3, 1, 0, 4]) == "0,1,3,4"
