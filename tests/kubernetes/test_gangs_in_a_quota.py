"""Two gangs that each want more than half of a quota: one after the other, and never a part of each."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainyard.operators.gang import JobTemplate

from tests.kubernetes.in_process import Gang, in_one_loop
from tests.kubernetes.real_cluster import Cluster, Tenant
from trainers.job import labels
from trainers.job.spec import Resources

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# A device that does not exist: nodes have ten of it, the namespace's quota is four, and a gang wants three.
SEAT = "example.com/trainyard-seat"
FORM = {"strategy": "parameter_server", "workers": 1, "ps": 1}
LAUNCHER = "/opt/trainyard/trainers/runtime/launcher.py"


@pytest.fixture
def seats(cluster: Cluster, namespace: Tenant) -> Iterator[None]:
    """Ten seats on the first node, four in the quota."""
    name = sorted(node.metadata.name for node in cluster.api.list_node().items)[0]
    path = "/status/capacity/" + SEAT.replace("/", "~1")
    cluster.api.patch_node_status(name, [{"op": "add", "path": path, "value": "10"}])
    quota = {"metadata": {"name": "seats"}, "spec": {"hard": {f"requests.{SEAT}": "4"}}}
    cluster.api.create_namespaced_resource_quota(namespace.name, quota)
    yield
    cluster.api.delete_namespaced_resource_quota("seats", namespace.name)
    cluster.api.patch_node_status(name, [{"op": "remove", "path": path}])


def _template(name: str) -> JobTemplate:
    """A gang of three, each with a seat, and with a launcher that needs no TensorFlow."""
    container = {
        "name": "base",
        "env": [{"name": "GANG_SIZE", "value": "3"}],
        "volumeMounts": [{"name": "trainyard-storage", "mountPath": LAUNCHER, "subPath": "code/seated.py"}],
    }
    return JobTemplate(
        name,
        "a_trainer",
        resources={"default": Resources(0.02, "128Mi", gpu=1, gpu_resource=SEAT)},
        pods={"default": {"spec": {"containers": [container]}}},
    )


def test_they_never_hold_a_part_each(
    airflow_env: None, namespace: Tenant, seats: None, nothing_left: Any
) -> None:
    code = namespace.folder / "code"
    code.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "code" / "seated.py", code)
    gangs = [Gang(name, _template(name), FORM) for name in ("gang-one", "gang-two")]
    together: set[tuple[str, ...]] = set()

    async def look() -> None:
        while not all(gang.verdict for gang in gangs):
            pods = await asyncio.to_thread(namespace.pods, f"{labels.LABEL_PIPELINE} in (gang-one,gang-two)")
            living = [pod for pod in pods if pod.status.phase in ("Pending", "Running")]
            together.add(tuple(sorted({pod.metadata.labels[labels.LABEL_PIPELINE] for pod in living})))
            await asyncio.sleep(0.5)

    async def all_of_them() -> None:
        watching = asyncio.ensure_future(look())
        try:
            await asyncio.gather(*(gang.run() for gang in gangs))
        finally:
            watching.cancel()

    in_one_loop(all_of_them)
    for gang in gangs:
        assert gang.verdict["step"] == 1
        assert [story.cards for story in gang.stories] == [[], [], []]
    assert {("gang-one",), ("gang-two",)} <= together
    assert ("gang-one", "gang-two") not in together
    assert sorted(bool(gang.waited) for gang in gangs) == [False, True]
    nothing_left()
