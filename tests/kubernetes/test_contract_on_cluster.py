"""The contract of pod life, on the cluster that KUBECONFIG names; `tests/kubelet` runs it on the process kubelet."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from kubernetes import client
from kubernetes.client import ApiException

pytest.register_assert_rewrite(
    "tests.contract.place", "tests.contract.pod_life", "tests.contract.pod_ends", "tests.contract.objects"
)

from tests.contract.objects import *  # noqa: E402, F403
from tests.contract.place import Place  # noqa: E402
from tests.contract.pod_ends import *  # noqa: E402, F403
from tests.contract.pod_life import *  # noqa: E402, F403
from tests.kubernetes.real_cluster import HANG, Cluster  # noqa: E402

# A small image with a shell and Python, which the nodes have or can pull.
IMAGE = os.environ.get("TRAINYARD_TEST_SMALL_IMAGE") or "python:3.11-slim-bookworm"


@pytest.fixture(scope="module")
def own_namespace(cluster: Cluster) -> Iterator[tuple[client.CoreV1Api, str]]:
    """A namespace of this module's own, in which pods may be made."""
    api, name = cluster.api, f"contract-{uuid.uuid4().hex[:8]}"
    api.create_namespace({"metadata": {"name": name}})
    place = Place(api, name, patience=HANG, image=IMAGE)
    pod = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "base", "image": IMAGE}]}}

    def may_make_pods() -> bool:
        try:  # until its service account is there
            api.create_namespaced_pod(name, pod, dry_run="All")
        except ApiException as e:
            if "service account" not in e.body:
                raise
            return False
        return True

    try:
        place.until(may_make_pods, "the namespace's service account")
        yield api, name
    finally:
        api.delete_namespace(name)


@pytest.fixture
def place(own_namespace: tuple[client.CoreV1Api, str]) -> Iterator[Place]:
    """The cluster."""
    place = Place(*own_namespace, patience=HANG, image=IMAGE)
    yield place
    place.clean_up()


def test_an_image_that_can_not_be_had(place: Place) -> None:
    """Only here: the process kubelet pulls no images."""
    name = place.pod("true", container={"image": "trainyard-no-such-image:1"})
    state = place.waiting(name, "ErrImagePull", "ImagePullBackOff")
    assert "trainyard-no-such-image:1" in state.message
    assert place.read(name).status.phase == "Pending"
    never = place.pod("true", container={"image": "trainyard-no-such-image:1", "imagePullPolicy": "Never"})
    assert place.waiting(never, "ErrImageNeverPull")
    wrong = place.pod("true", container={"image": "Not//An:Image:Name"})
    assert place.waiting(wrong, "InvalidImageName")
    place.delete(name)
    place.wait_gone(name)


def test_a_headless_service_has_the_addresses_of_pods_that_are_not_ready(place: Place) -> None:
    """Only here: the process kubelet's pods find each other by loopback addresses."""
    service = {
        "metadata": {"name": "contract-gang"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"contract": "gang"},
            "ports": [{"name": "grpc", "port": 2222}],
        },
    }
    place.api.create_namespaced_service(place.namespace, service)
    never_ready = {"readinessProbe": {"exec": {"command": ["false"]}, "periodSeconds": 600}}
    name = place.pod(
        "sleep 600",
        container=never_ready,
        labels={"contract": "gang"},
        hostname="worker-1",
        subdomain="contract-gang",
    )
    pod = place.wait(name, "Running")
    resolve = (
        "import socket, time\n"
        "while True:\n"
        "    try: print(socket.gethostbyname('worker-1.contract-gang')); break\n"
        "    except OSError: time.sleep(0.5)\n"
    )
    asks = place.pod("", container={"command": ["python3", "-c", resolve]})
    place.wait(asks, "Succeeded")
    assert place.log(asks) == f"{pod.status.pod_ip}\n"

    def addresses() -> list[str]:
        found = place.api.read_namespaced_endpoints("contract-gang", place.namespace).subsets or []
        return [row.hostname for subset in found for row in subset.addresses or ()]

    assert place.until(addresses, "its address") == ["worker-1"]
    place.delete(name, grace=0)
    place.until(lambda: not addresses(), "its address goes with it")
