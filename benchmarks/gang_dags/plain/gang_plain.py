"""The same pods as plain mapped KubernetesPodOperator tasks, as its documentation has it."""

from __future__ import annotations

from typing import Any

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from airflow.sdk import DAG, task
from gang_pause import CPU, LABEL, command, memory, mounts, setting
from kubernetes.client import V1ResourceRequirements

with DAG("gang_plain", schedule=None, params={"size": 4, "run": "", "fail_each": 0}):

    @task
    def rows(params: dict[str, Any]) -> list[dict[str, Any]]:
        """What differs from pod to pod."""
        return [
            {"name": f"plain-{i}", "labels": {LABEL: params["run"]}, "cmds": command(params["run"])}
            for i in range(params["size"])
        ]

    KubernetesPodOperator.partial(
        task_id="replica",
        kubernetes_conn_id="trainyard_kubernetes",
        namespace=setting("NAMESPACE"),
        image=setting("IMAGE"),
        container_resources=V1ResourceRequirements(
            requests={"cpu": CPU, "memory": memory()}, limits={"memory": memory()}
        ),
        full_pod_spec=PodGenerator.deserialize_model_dict(mounts()) if mounts() else None,
        deferrable=True,  # otherwise a gang needs as many slots as replicas
        startup_timeout_seconds=600,
    ).expand_kwargs(rows())
