"""One process kubelet for most of these tests: pods of different tests do not meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes.client import CoreV1Api
from trainyard.kubelet import FakeCluster

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(backoff=(0.2, 1.0), node_labels={"pool": "test"}) as cluster:
        yield cluster


@pytest.fixture
def core(cluster: FakeCluster) -> CoreV1Api:
    return cluster.core_v1()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"pod-{next(_numbers)}"


@pytest.fixture
def ended(cluster: FakeCluster, name: str) -> Callable[..., dict[str, Any]]:
    """Run a pod to its end."""
    from trainyard.kubelet.testing import pod_manifest

    def run(command: list[str], **options: Any) -> dict[str, Any]:
        cluster.run(pod_manifest(name, command, **options))
        return cluster.wait_phase(name, "Succeeded", "Failed")

    return run
