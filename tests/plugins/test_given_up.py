"""Pods that will never end or never start: seen by their status, said once, and not waited for."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from pathlib import Path
from typing import Any, cast

import pytest
from airflow.sdk.exceptions import TaskDeferred
from kubernetes.client import (
    ApiClient,
    V1ContainerState,
    V1ContainerStateRunning,
    V1ContainerStateWaiting,
    V1ContainerStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodSpec,
    V1PodStatus,
)
from trainyard.cluster import delete_gang
from trainyard.failing import StepFailed
from trainyard.given_up import Lookout, NeverStarts, PodLost
from trainyard.triggers.pod import PodTrigger
from trainyard.triggers.pod_watch import Seen, outline

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)


class Clock:
    """Shows what it is set to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _pod(phase: str = "Running", *, waits: tuple[str, str] | None = None, **meta: Any) -> V1Pod:
    state = V1ContainerState(running=V1ContainerStateRunning(started_at=NOW))
    if waits:
        state = V1ContainerState(waiting=V1ContainerStateWaiting(reason=waits[0], message=waits[1]))
    row = V1ContainerStatus(name="base", image="x", image_id="x", ready=False, restart_count=0, state=state)
    return V1Pod(
        metadata=V1ObjectMeta(name="p", namespace="n", **meta),
        spec=V1PodSpec(containers=[], node_name="node-7"),
        status=V1PodStatus(phase=phase, container_statuses=[row]),
    )


def _silent(pod: V1Pod) -> V1Pod:
    pod.status.conditions = [
        V1PodCondition(type="Ready", status="False"),
        V1PodCondition(type="ContainersReady", status="True"),
    ]
    return pod


DELETED = {"deletion_timestamp": NOW, "deletion_grace_period_seconds": 30}


@pytest.mark.parametrize(
    "pod",
    [
        _pod(),
        _silent(_pod()),  # its deletion comes once the control plane has given it up
        _pod(**DELETED),
        _silent(_pod("Failed", **DELETED)),
        _pod("Pending", waits=("ContainerCreating", "")),
        _pod("Pending", waits=("CreateContainerConfigError", "failed to sync secret cache: timed out")),
    ],
)
def test_what_may_go_on_is_waited_for(pod: V1Pod) -> None:
    watch = Lookout(Clock())
    assert watch.look(pod) is pod
    assert watch.look(pod) is pod
    assert watch.error is None


def test_a_deleted_pod_of_a_silent_node_is_lost() -> None:
    watch = Lookout(Clock())
    with pytest.raises(PodLost, match="pod p was lost with its node node-7") as caught:
        watch.look(_silent(_pod(**DELETED)))
    assert watch.error is caught.value


def test_a_deletion_that_does_not_come_to_its_end_is_a_lost_pod() -> None:
    """By the time that passed here: the stamp is of another machine's clock."""
    clock = Clock()
    watch = Lookout(clock)
    watch.look(_pod(**DELETED))
    clock.now += 59
    watch.look(_pod(**DELETED))
    clock.now += 2
    with pytest.raises(PodLost, match="node node-7 has not ended it 61 s after its deletion"):
        watch.look(_pod(**DELETED))


@pytest.mark.parametrize(
    "message",
    ['secret "keys" not found', "couldn't find key a in ConfigMap n/c", "container has runAsNonRoot and ..."],
)
def test_what_will_not_come_by_itself(message: str) -> None:
    with pytest.raises(NeverStarts) as caught:
        Lookout().look(_pod("Pending", waits=("CreateContainerConfigError", message)))
    assert str(caught.value) == f"pod p can't start: CreateContainerConfigError: {message}"


class Sights:
    """The watch of a triggerer, with sights of one pod."""

    in_touch = True

    def __init__(self, *pods: V1Pod) -> None:
        self.pods = [outline(ApiClient().sanitize_for_serialization(pod)) for pod in pods]

    @property
    def latest(self) -> Seen:
        """The sight that `next` gives."""
        return Seen(self.pods[0])

    async def next(self) -> Seen:
        """The next sight; the last one stays."""
        return Seen(self.pods.pop(0) if len(self.pods) > 1 else self.pods[0])


def _event(*pods: V1Pod) -> dict[str, Any]:
    """What the trigger says of a pod with these sights."""
    trigger = PodTrigger(name="p", namespace="n", began=time.time(), get_logs=False)
    sights = cast("Any", Sights(*pods))
    return asyncio.run(trigger.wait(sights, sights))


async def _first(trigger: PodTrigger) -> dict[str, Any]:
    async for event in trigger.run():
        return dict(event.payload)
    raise AssertionError("no event")


def test_the_trigger_says_that_a_running_pod_is_lost() -> None:
    event = _event(_pod(), _pod(), _pod(), _silent(_pod()), _silent(_pod(**DELETED)))
    assert (event["status"], event["what"]) == ("given_up", "PodLost")
    assert event["message"] == "pod p was lost with its node node-7, which does not answer"


def test_the_trigger_says_that_a_pod_can_not_start() -> None:
    event = _event(
        _pod("Pending"), _pod("Pending", waits=("CreateContainerConfigError", 'secret "k" not found'))
    )
    assert (event["status"], event["what"]) == ("given_up", "NeverStarts")


def test_a_task_comes_back_from_a_lost_pod_without_waiting_for_its_end(
    step: Any, context_of: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    operator = step(source)
    context = context_of(operator)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context)
    assert isinstance(deferred.value.trigger, PodTrigger)
    name = context["ti"].xcom["pod_name"]
    cluster.wait_phase(name, "Running", namespace="trainyard")
    pod = cluster.pod(name, "trainyard")
    event = {"status": "given_up", "what": "PodLost", "message": "pod p was lost", "pod": outline(pod)}
    again = step(source)
    with pytest.raises(StepFailed, match="pod p was lost") as caught:
        again.trigger_reentry(context_of(again), event)
    failure = caught.value.failure
    assert (failure.failure_class.value, failure.code) == ("PREEMPTED", "kubernetes.node_lost")
    assert cluster.core_v1().list_namespaced_pod("trainyard").items == []


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_missing_secret_is_no_matter_of_waiting(
    step: Any, context_of: Any, cluster: Any, deferrable: bool
) -> None:
    overlay = {
        "spec": {"containers": [{"name": "base", "envFrom": [{"secretRef": {"name": "not-there"}}]}]},
    }
    operator = step("return {}", pod=overlay, deferrable=deferrable)
    context = context_of(operator)

    def run() -> None:
        try:
            operator.execute(context)
        except TaskDeferred as e:
            event = asyncio.run(_first(e.trigger))
            operator.trigger_reentry(context, event)

    with pytest.raises(StepFailed, match='secret "not-there" not found') as caught:
        run()
    failure = caught.value.failure
    assert (failure.failure_class.value, failure.code) == ("CONFIG", "kubernetes.missing")
    assert "create the ConfigMap, Secret or key" in str(caught.value)
    cluster.wait_gone(context["ti"].xcom["pod_name"], namespace="trainyard")


def test_a_kubeconfig_in_airflows_own_environment_is_none_of_our_business(
    step: Any, context_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection names the cluster: two words of it would be refused, in the triggerer."""
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text("apiVersion: v1\nkind: Config\nclusters: []\n")
    monkeypatch.setenv("KUBECONFIG", str(elsewhere))
    operator = step('return {"a": 1}', deferrable=True)
    context = context_of(operator)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context)
    event = asyncio.run(_first(deferred.value.trigger))
    assert event["status"] == "success", event
    assert operator.trigger_reentry(context, event) == {"a": 1}


def test_a_gang_is_gone_when_its_cleanup_ends(cluster: Any) -> None:
    core = cluster.core_v1()
    for name, script in (
        ("leaves", "trap 'sleep 1; exit' TERM; while :; do sleep 0.1; done"),
        ("stays", "trap '' TERM; while :; do sleep 0.1; done"),
    ):
        manifest = {
            "metadata": {"name": name, "labels": {"trainyard.io/gang": "gang"}},
            "spec": {
                "terminationGracePeriodSeconds": 600,
                "containers": [{"name": "base", "image": "none", "command": ["sh", "-c", script]}],
            },
        }
        core.create_namespaced_pod("gangs", manifest)
        cluster.wait_phase(name, "Running", namespace="gangs")
    clock = Clock()

    def sleep(seconds: float) -> None:
        time.sleep(0.1)
        names = [pod.metadata.name for pod in core.list_namespaced_pod("gangs").items]
        if names == ["stays"]:
            clock.now += 700  # as if its node had been given all this time

    assert sorted(delete_gang(core, "gang", "gangs", clock=clock, sleep=sleep)) == ["leaves", "stays"]
    assert core.list_namespaced_pod("gangs").items == []
