"""A node that is lost for good: its pods are given up, leave no address behind, and start elsewhere, free of charge."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from trainyard import Resources, RestartPolicy
from trainyard.cluster import delete_gang
from trainyard.operators.gang import JobTemplate
from trainyard.operators.pod import PodOperator

from tests.kubernetes.in_process import Gang, Story, in_one_loop, run_all
from tests.kubernetes.real_cluster import HANG, Cluster, Nodes, Tenant, wait_for
from trainers.job import labels
from trainers.job.failures import RETRY_POLICIES
from trainers.job.policies import Success
from trainers.job.record import JobRecord, JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GANG = "lost-gang"
# What is charged is never tried again here: a second try was a free one.
FREE_ONLY = RestartPolicy(
    {cls: 0 for cls, policy in RETRY_POLICIES.items() if policy.retry and policy.charged}
)
SOON = [
    {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    for what in ("unreachable", "not-ready")
]


def _spare(cluster: Cluster, nodes: Nodes) -> str:
    """A node that may be lost."""
    ready = sorted(
        node.metadata.name
        for node in cluster.api.list_node().items
        if nodes.is_ready(node.metadata.name) and not node.spec.unschedulable
    )
    if len(ready) < 2:
        pytest.skip(f"a node can only be lost where there are two, not {ready}")
    return os.environ.get("TRAINYARD_TEST_LOST_NODE") or ready[-1]


@contextlib.contextmanager
def _mended(cluster: Cluster, nodes: Nodes, how: str) -> Iterator[str]:
    """A node that may be broken; mended at the end."""
    name = _spare(cluster, nodes)
    try:
        yield name
    finally:
        nodes(how, name)
        wait_for(f"{name} is back", lambda: nodes.is_ready(name))


@pytest.fixture
def lost_node(cluster: Cluster, nodes: Nodes) -> Iterator[str]:
    """The node that is taken off."""
    with _mended(cluster, nodes, "on") as name:
        yield name


@pytest.fixture
def cut_node(cluster: Cluster, nodes: Nodes) -> Iterator[str]:
    """The node that is cut off, with its pods running on."""
    with _mended(cluster, nodes, "heal") as name:
        yield name


def _rather_on(node: str) -> dict[str, Any]:
    """Of a pod's spec: it would rather be on that node, and is soon given up with it."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    preferred = [{"weight": 100, "preference": term}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return {"affinity": affinity, "tolerations": SOON}


def _task(tenant: Tenant, name: str, node: str) -> Callable[[], PodOperator]:
    """A task whose pod would rather be on that node, and runs until a file is there."""
    go = tenant.folder / "go" / name

    def make() -> PodOperator:
        with DAG("node_loss"):
            return PodOperator(
                task_id=name,
                cmds=["sh", "-c", f"until [ -e {go} ]; do sleep 0.2; done"],
                labels={labels.LABEL_GANG: GANG},
                hostname=name,
                subdomain=GANG,
                pod_resources=Resources(0.02, "64Mi"),
                restart=FREE_ONLY,
                pod={"spec": {**_rather_on(node), "terminationGracePeriodSeconds": 600}},
            )

    return make


def test_a_replica_outlives_its_node(
    airflow_env: None, namespace: Tenant, nodes: Nodes, lost_node: str
) -> None:
    (namespace.folder / "go").mkdir(exist_ok=True)
    seen: dict[str, Any] = {}

    def pods() -> list[Any]:
        return namespace.pods(f"{labels.LABEL_GANG}={GANG}")

    async def strike(stories: dict[str, Story]) -> None:
        async def until(what: str, holds: Callable[[], Any]) -> Any:
            for _ in range(int(HANG)):
                if found := await asyncio.to_thread(holds):
                    return found
                await asyncio.sleep(1)
            raise AssertionError(f"{what}: not within {HANG:g} s")

        first = await until("it runs", lambda: [pod for pod in pods() if pod.status.phase == "Running"])
        seen["first"] = first[0]
        assert first[0].spec.node_name == lost_node
        await asyncio.to_thread(nodes, "off", lost_node)
        again = await until(
            "it runs elsewhere",
            lambda: [p for p in pods() if p.status.phase == "Running" and p.spec.node_name != lost_node],
        )
        seen["again"], seen["beside"] = again[0], [pod.metadata.name for pod in pods()]
        (namespace.folder / "go" / "worker-1").touch()

    stories = run_all({"worker-1": _task(namespace, "worker-1", lost_node)}, strike)
    story = stories["worker-1"]
    print(*story.cards, sep="\n")
    assert story.succeeded, story
    assert story.classes == ["PREEMPTED"]
    assert story.failures[0].code == "kubernetes.node_lost"
    assert f"was lost with its node {lost_node}" in story.failures[0].reason
    first, again = seen["first"], seen["again"]
    assert (first.spec.hostname, first.spec.subdomain) == (again.spec.hostname, again.spec.subdomain)
    assert first.metadata.name != again.metadata.name
    assert seen["beside"] == [again.metadata.name], "what stays of the lost pod would keep its address"
    assert pods() == []


def test_a_launcher_that_is_cut_off_leaves_its_replica_to_the_next_one(
    airflow_env: None, namespace: Tenant, nodes: Nodes, cut_node: str, nothing_left: Callable[[], None]
) -> None:
    """Its pod runs on, on a node that nobody reaches, and sees the storage still: it ends its command itself."""
    go = namespace.folder / "go" / "cut"
    go.parent.mkdir(exist_ok=True)
    template = JobTemplate(
        "cut",
        command=["sh", "-c", f"until [ -e {go} ]; do sleep 0.2; done"],
        fixed={"workers": 1},
        success=Success("all_workers"),
        resources={"default": Resources(0.02, "128Mi")},
        pods={"worker": {"spec": _rather_on(cut_node)}},
        restart=FREE_ONLY,
    )
    gang = Gang("gang-cut", template, {})

    def there(*, on_it: bool) -> bool:
        pods = namespace.pods(f"{labels.LABEL_PIPELINE}=gang-cut,{labels.LABEL_ROLE}=worker")
        running = (pod for pod in pods if pod.status.phase == "Running")
        return any((pod.spec.node_name == cut_node) is on_it for pod in running)

    def attempts(number: int) -> bool:
        return bool(gang.job) and len(JobRecord.open(gang.job).attempts("worker", 0)) >= number

    def has_left() -> bool:
        log = Path(gang.job, "logs", "worker-0.log").read_text()
        return "another pod has taken this one's place" in log

    def strike() -> None:
        wait_for("its command runs", lambda: attempts(1) and there(on_it=True))
        nodes("cut", cut_node)
        wait_for("it runs elsewhere", lambda: there(on_it=False))
        wait_for("the old launcher has left", has_left)
        wait_for("the command runs again", lambda: attempts(2))
        go.touch()

    async def all_of_it() -> None:
        await asyncio.gather(gang.run(), asyncio.to_thread(strike))

    in_one_loop(all_of_it)
    classes = sorted(story.classes for story in gang.stories)
    assert classes == [[], ["PREEMPTED"]], [story.cards for story in gang.stories]
    assert JobRecord.open(gang.job).state is JobState.SUCCEEDED
    nothing_left()


def test_a_cleanup_does_not_wait_for_a_lost_node(namespace: Tenant, nodes: Nodes, lost_node: str) -> None:
    manifest = {
        "metadata": {"name": "left-behind", "labels": {labels.LABEL_GANG: GANG}},
        "spec": {
            "nodeName": lost_node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 3600,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "base",
                    "image": namespace.cluster.image,
                    "command": ["sleep", "3600"],
                    "resources": {"requests": {"cpu": "20m"}, "limits": {"memory": "64Mi"}},
                }
            ],
        },
    }
    namespace.api.create_namespaced_pod(namespace.name, manifest)

    def phase() -> str:
        return str(namespace.api.read_namespaced_pod("left-behind", namespace.name).status.phase)

    wait_for("it runs", lambda: phase() == "Running")
    nodes("off", lost_node)
    wait_for("its node is known to be lost", lambda: not nodes.is_ready(lost_node))
    assert phase() == "Running", "nobody is left who could say anything else"
    assert delete_gang(namespace.api, GANG, namespace.name) == ["left-behind"]
    assert namespace.pods(f"{labels.LABEL_GANG}={GANG}") == []
