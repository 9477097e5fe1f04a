"""What becomes of pods that fail or are taken away on a cluster, by the table of failures; all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from trainyard import Resources, RestartPolicy
from trainyard.operators.pod import PodOperator

from tests.kubernetes.in_process import Story, run_all
from tests.kubernetes.pod_watch import PodWatch
from tests.kubernetes.real_cluster import Cluster, Tenant
from trainers.job.failures import EXIT_CODES, RETRY_POLICIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# A device that does not exist, so that no other pod of the cluster is in the way or is preempted.
CHAIR = "example.com/trainyard-chair"
LOW, HIGH = "trainyard-test-low", "trainyard-test-high"
TINY = Resources(cpu=0.02, memory="64Mi")
# What is charged is never tried again here: a second try was a free one.
FREE_ONLY = RestartPolicy(
    {cls: 0 for cls, policy in RETRY_POLICIES.items() if policy.retry and policy.charged}
)
ONCE = RestartPolicy({cls: 0 for cls, policy in RETRY_POLICIES.items() if policy.retry})
HOG = "held = []\nwhile len(held) < {megabytes}: held.append(b'x' * (1 << 20))\nprint('held it all')"


@pytest.fixture(scope="module")
def device(cluster: Cluster) -> Iterator[None]:
    """One chair on the first node."""
    name = sorted(node.metadata.name for node in cluster.api.list_node().items)[0]
    path = "/status/capacity/" + CHAIR.replace("/", "~1")
    cluster.api.patch_node_status(name, [{"op": "add", "path": path, "value": "1"}])
    yield
    cluster.api.patch_node_status(name, [{"op": "remove", "path": path}])


@pytest.fixture(scope="module")
def priorities(cluster: Cluster) -> Iterator[None]:
    """Two priority classes."""
    api = client.SchedulingV1Api(cluster.api.api_client)
    for name, value in ((LOW, -10), (HIGH, 10)):
        try:
            api.create_priority_class({"metadata": {"name": name}, "value": value})
        except ApiException as e:
            if e.status != 409:
                raise
    yield
    for name in (LOW, HIGH):
        api.delete_priority_class(name)


def _overlay(container: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A part of a Pod manifest, with something for our container."""
    return {"spec": {"containers": [{"name": "base", **container}], **spec}}


def _tasks(go: Path, image: str) -> dict[str, dict[str, Any]]:
    """The arguments of each task's operator, by its name."""

    def shell(command: str, **options: Any) -> dict[str, Any]:
        return {"cmds": ["sh", "-c", command], "pod_resources": TINY, "restart": ONCE, **options}

    def until_told(name: str, **options: Any) -> dict[str, Any]:
        command = f"trap 'exit 143' TERM; until [ -e {go / name} ]; do sleep 0.2; done"
        return shell(command, restart=FREE_ONLY, **options)

    def hog(megabytes: int) -> dict[str, Any]:
        return {"cmds": ["python", "-c", HOG.format(megabytes=megabytes)], "pod_resources": TINY}

    def chairs(count: int) -> Resources:
        return Resources(cpu=0.02, memory="64Mi", gpu=count, gpu_resource=CHAIR)

    key = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "not-there", "key": "a"}}}
    mount = {"volumeMounts": [{"name": "settings", "mountPath": "/settings"}]}
    volume = {"name": "settings", "configMap": {"name": "not-there"}}
    init = {"name": "fetch", "image": image, "command": ["sh", "-c", "echo no such bucket >&2; exit 1"]}
    low = _overlay({}, priorityClassName=LOW, terminationGracePeriodSeconds=2)
    return {
        "oom": hog(500),
        "oom_once": hog(70),
        "evicted": until_told("evicted"),
        "preempted": until_told("preempted", pod_resources=chairs(1), pod=low),
        "no_image": shell("true", image="trainyard-no-such-image:1"),
        "no_secret": shell("true", pod=_overlay({"envFrom": [{"secretRef": {"name": "not-there"}}]})),
        "no_config_map": shell("true", pod=_overlay({"env": [key]})),
        "no_volume": shell("true", pod=_overlay(mount, volumes=[volume]), startup_timeout_seconds=30),
        "no_init": shell("true", pod=_overlay({}, initContainers=[init])),
        "no_command": shell("", cmds=["no-such-program"]),
        "no_node": shell("true", pod_resources=chairs(99), schedule_timeout_seconds=15),
        "no_quota": shell("true", pod_resources=Resources(cpu=0.02, memory="100Gi")),
        **{f"exit_{cls.value.lower()}": shell(f"exit {code}") for cls, code in EXIT_CODES.items()},
    }


def _maker(name: str, options: dict[str, Any]) -> Callable[[], PodOperator]:
    def make() -> PodOperator:
        with DAG("pod_failures"):
            return PodOperator(task_id=name, labels={"test": name}, **options)

    return make


class Meddler:
    """Evicts one pod and preempts another, once each, and lets those that come after them end."""

    def __init__(self, tenant: Tenant, go: Path) -> None:
        self.tenant, self.go = tenant, go
        self.taken: dict[str, str] = {}

    async def __call__(self, stories: dict[str, Story]) -> None:
        """Beside the tasks, until both are done."""
        while not all(
            stories[name].succeeded or stories[name].failures[1:] for name in ("evicted", "preempted")
        ):
            await asyncio.to_thread(self._look)
            await asyncio.sleep(0.5)

    def _look(self) -> None:
        for pod in self.tenant.pods("test in (evicted,preempted)"):
            if pod.status.phase == "Running" and not pod.metadata.deletion_timestamp:
                self._meddle(pod.metadata.labels["test"], pod.metadata.name)

    def _meddle(self, task: str, name: str) -> None:
        if task not in self.taken:
            self.taken[task] = name
            {"evicted": self._evict, "preempted": self._preempt}[task](name)
        elif name != self.taken[task]:
            (self.go / task).touch()

    def _evict(self, name: str) -> None:
        rows = self.tenant.api.get_api_resources().resources
        row = next(row for row in rows if row.name == "pods/eviction")
        body = {
            "apiVersion": f"{row.group}/{row.version}",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": self.tenant.name},
        }
        self.tenant.api.create_namespaced_pod_eviction(name, self.tenant.name, body, _preload_content=False)

    def _preempt(self, name: str) -> None:
        amounts = {"cpu": "20m", "memory": "64Mi", CHAIR: "1"}
        limits = {key: value for key, value in amounts.items() if key != "cpu"}
        container = {
            "name": "base",
            "image": self.tenant.cluster.image,
            "command": ["sleep", "5"],
            "resources": {"requests": amounts, "limits": limits},
        }
        body = {
            "metadata": {"name": "more-important"},
            "spec": {"restartPolicy": "Never", "priorityClassName": HIGH, "containers": [container]},
        }
        self.tenant.api.create_namespaced_pod(self.tenant.name, body)


@pytest.fixture(scope="module")
def stories(
    airflow_env: None, namespace: Tenant, device: None, priorities: None
) -> tuple[dict[str, Story], dict[str, list[str]]]:
    """What became of each task, and the memory limits of its pods, oldest first."""
    go = namespace.folder / "go"
    go.mkdir(exist_ok=True)
    meddler = Meddler(namespace, go)
    tasks = {name: _maker(name, options) for name, options in _tasks(go, namespace.cluster.image).items()}
    with PodWatch(namespace) as seen:
        found = run_all(tasks, meddler)
    if "preempted" in meddler.taken:
        namespace.api.delete_namespaced_pod("more-important", namespace.name, grace_period_seconds=0)
    pods = sorted(seen.pods.values(), key=lambda pod: pod["metadata"]["creationTimestamp"])
    limits: dict[str, list[str]] = {}
    for pod in pods:
        said = pod["spec"]["containers"][0]["resources"].get("limits", {}).get("memory", "")
        limits.setdefault(pod["metadata"].get("labels", {}).get("test", ""), []).append(said)
    return found, limits


def test_out_of_memory_is_tried_once_more_with_half_as_much_again(stories: Any) -> None:
    found, limits = stories
    assert found["oom"].classes == ["OOM", "OOM"]
    assert not found["oom"].succeeded
    assert limits["oom"] == ["64Mi", "96Mi"]
    assert (found["oom_once"].classes, found["oom_once"].succeeded) == (["OOM"], True)
    assert limits["oom_once"] == ["64Mi", "96Mi"]


@pytest.mark.parametrize("task", ["evicted", "preempted"])
def test_what_is_taken_away_comes_back_free_of_charge(stories: Any, task: str) -> None:
    found = stories[0][task]
    assert (found.classes, found.succeeded) == (["PREEMPTED"], True), found.cards


@pytest.mark.parametrize(
    ("task", "failure_class", "words"),
    [
        ("no_image", "CONFIG", ["trainyard-no-such-image:1"]),
        ("no_secret", "CONFIG", ["CreateContainerConfigError", 'secret "not-there" not found']),
        ("no_config_map", "CONFIG", ["CreateContainerConfigError", 'configmap "not-there" not found']),
        ("no_volume", "CONFIG", ['configmap "not-there" not found']),
        ("no_init", "USER", ["init container fetch of pod", "exit code 1", "no such bucket"]),
        ("no_command", "CONFIG", ["no-such-program"]),
        ("no_node", "QUOTA", ["Unschedulable", "nodes are available", f"Insufficient {CHAIR}"]),
        ("no_quota", "QUOTA", ["exceeded quota: trainyard", "requested:", "requests.memory=100Gi"]),
        *(
            (f"exit_{cls.value.lower()}", cls.value, [f"exit code {code}"])
            for cls, code in EXIT_CODES.items()
        ),
    ],
)
def test_what_fails_for_good_says_why_at_its_first_try(
    stories: Any, task: str, failure_class: str, words: list[str]
) -> None:
    found = stories[0][task]
    print(*found.cards)
    assert (found.classes, found.succeeded) == ([failure_class], False)
    assert [word for word in words if word not in found.cards[0]] == [], found.cards[0]


def test_nothing_is_left(stories: Any, nothing_left: Callable[[], None]) -> None:
    nothing_left()
