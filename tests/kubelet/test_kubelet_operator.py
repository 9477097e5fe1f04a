"""Airflow's own code against the process kubelet: KubernetesPodOperator, the async hook, the resource operators."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import pytest
from trainyard.kubelet.testing import pod_manifest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's and its dependencies' own deprecations, at import only
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook, KubernetesHook
    from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
    from airflow.providers.cncf.kubernetes.operators.resource import (
        KubernetesCreateResourceOperator,
        KubernetesDeleteResourceOperator,
    )
    from airflow.providers.cncf.kubernetes.utils.pod_manager import AsyncPodManager, PodManager
    from airflow.sdk.exceptions import AirflowException

CONNECTION = "kubelet_test"


@pytest.fixture
def connection(cluster, monkeypatch):
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNECTION.upper()}", cluster.airflow_connection)
    return CONNECTION


class _TaskInstance:
    """As much of a task instance as the operator asks for."""

    def __init__(self, task_id: str) -> None:
        self.dag_id, self.task_id, self.run_id = "a_dag", task_id, "manual__2026-01-01"
        self.try_number, self.map_index = 1, -1
        self.pushed: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any, **_: Any) -> None:
        self.pushed[key] = value


def _context(operator) -> dict[str, Any]:
    ti = _TaskInstance(operator.task_id)
    return {"ti": ti, "task_instance": ti, "run_id": ti.run_id, "task": operator, "dag": None, "params": {}}


def _operator(name, connection, script, **more):
    return KubernetesPodOperator(
        task_id=name,
        name=name,
        namespace="default",
        image="none",
        cmds=["sh", "-c"],
        arguments=[script],
        kubernetes_conn_id=connection,
        log_pod_spec_on_failure=False,
        startup_check_interval_seconds=1,
        **more,
    )


def test_a_pod_operator_runs_its_pod_follows_its_log_and_deletes_it(cluster, connection, name, capsys):
    operator = _operator(
        name, connection, "for i in 1 2 3; do echo line $i of $WORD; done", env_vars={"WORD": "x"}
    )
    context = _context(operator)
    operator.execute(context)
    pod = context["ti"].pushed["pod_name"]
    assert pod.startswith(name)
    assert cluster.pod(pod) is None
    assert "line 3 of x" in capsys.readouterr().out  # where Airflow logs outside of a task


def test_a_pod_operator_fails_with_its_pod_and_marks_it(cluster, connection, name):
    operator = _operator(name, connection, "exit 7", on_finish_action="keep_pod")
    context = _context(operator)
    with pytest.raises(AirflowException, match="returned a failure"):
        operator.execute(context)
    pod = cluster.pod(context["ti"].pushed["pod_name"])
    assert pod["status"]["phase"] == "Failed"
    assert pod["metadata"]["labels"]["already_checked"] == "True"
    assert operator.find_pod("default", context) is None  # a retry does not take it over


def test_the_pod_manager_and_the_async_hook_see_the_same_pod(cluster, connection, name):
    hook = KubernetesHook(conn_id=connection)
    assert hook.test_connection()[0]
    manager = PodManager(hook.core_v1_client)
    made = cluster.core_v1().create_namespaced_pod(
        "default", pod_manifest(name, ["sh", "-c", "echo a; sleep 0.5; echo b"])
    )
    asyncio.run(manager.await_pod_start(made, check_interval=0))
    status = manager.fetch_container_logs(made, "base", follow=True)
    assert status.last_log_time is not None
    assert manager.await_pod_completion(made, container_name="base").status.phase == "Succeeded"
    assert {event.reason for event in manager.read_pod_events(made).items} >= {"Scheduled", "Started"}

    async def look():
        async_hook = AsyncKubernetesHook(conn_id=connection, in_cluster=False)
        async_manager = AsyncPodManager(async_hook)
        pod = await async_manager.read_pod(made)
        lines = await async_hook.read_logs(name, "default", container_name="base")
        events = [event async for event in async_hook.watch_pod_events(name, "default", timeout_seconds=1)]
        reasons = [event.reason for event in (await async_hook.get_pod_events(name, "default")).items]
        await async_hook.delete_pod(name, "default", grace_period_seconds=0)
        return pod.status.phase, lines, events, reasons

    phase, lines, events, reasons = asyncio.run(look())
    assert phase == "Succeeded"
    assert [line.split(" ", 1)[1] for line in lines if line] == ["a", "b"]
    assert events == []  # a finished pod is not watched
    assert "Started" in reasons
    assert cluster.pod(name) is None


def test_the_async_hook_watches_the_events_of_a_pod_until_it_ends(cluster, connection, name):
    cluster.run(pod_manifest(name, ["sleep", "1"]))

    async def look():
        hook = AsyncKubernetesHook(conn_id=connection, in_cluster=False)
        return [event.reason async for event in hook.watch_pod_events(name, "default", timeout_seconds=1)]

    seen = asyncio.run(asyncio.wait_for(look(), 20))
    assert seen[:4] == ["Scheduled", "Pulled", "Created", "Started"]


def test_resource_operators_make_and_remove_a_headless_service(cluster, connection, core, name):
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"gang": name}},
    }
    options = {"yaml_conf": json.dumps(manifest), "namespace": "default", "kubernetes_conn_id": connection}
    KubernetesCreateResourceOperator(task_id="make", **options).execute({})
    assert core.read_namespaced_service(name, "default").spec.cluster_ip == "None"
    KubernetesDeleteResourceOperator(task_id="remove", **options).execute({})
    assert core.list_namespaced_service("default", field_selector=f"metadata.name={name}").items == []
