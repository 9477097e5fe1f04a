"""Talking to the place where pods run: a Kubernetes cluster or the process kubelet, by the same connection."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainers.job import labels
from trainyard.settings import CONNECTION

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

__all__ = ["core_api", "create_service", "delete_gang", "is_process_kubelet"]

log = logging.getLogger(__name__)
_TIMEOUT = 30  # seconds a request


def core_api(connection: str = CONNECTION) -> CoreV1Api:
    """The client of an Airflow connection."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    return KubernetesHook(conn_id=connection).core_v1_client


def is_process_kubelet(api: CoreV1Api) -> bool:
    """Whether pods run as processes of this machine: names don't resolve then, ports are shared."""
    from kubernetes.client import VersionApi

    version = VersionApi(api.api_client).get_code(_request_timeout=_TIMEOUT)
    return "process-kubelet" in version.git_version


def create_service(api: CoreV1Api, manifest: dict[str, Any]) -> None:
    """Create a Service; one that is there already is left alone."""
    from kubernetes.client.exceptions import ApiException

    meta = manifest["metadata"]
    try:
        api.create_namespaced_service(meta["namespace"], manifest, _request_timeout=_TIMEOUT)
    except ApiException as e:
        if e.status != 409:
            raise
        log.info("service %s is there already", meta["name"])


def delete_gang(api: CoreV1Api, gang: str, namespace: str) -> list[str]:
    """Delete all pods of a gang, by their owner label, and its Service; the names of the deleted."""
    from kubernetes.client.exceptions import ApiException

    pods = api.list_namespaced_pod(
        namespace, label_selector=f"{labels.LABEL_GANG}={gang}", _request_timeout=_TIMEOUT
    ).items
    deleted = []
    for delete, name in [
        *((api.delete_namespaced_pod, pod.metadata.name) for pod in pods),
        (api.delete_namespaced_service, gang),
    ]:
        try:
            delete(name, namespace, _request_timeout=_TIMEOUT)
        except ApiException as e:
            if e.status != 404:  # somebody was faster
                raise
        else:
            deleted.append(name)
    return deleted
