"""Talking to the place where pods run: a Kubernetes cluster or the process kubelet, by the same connection."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainers.job import labels
from trainyard.patience import patiently
from trainyard.pods import has_ended
from trainyard.settings import CONNECTION

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, V1Job, V1Pod, VersionInfo

__all__ = [
    "core_api",
    "create_service",
    "delete_gang",
    "delete_job",
    "is_process_kubelet",
    "list_jobs",
    "version_of",
]

log = logging.getLogger(__name__)
_TIMEOUT = 30  # seconds a request
_POLL = 1.0  # seconds


def core_api(connection: str = CONNECTION) -> CoreV1Api:
    """The client of an Airflow connection."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    return KubernetesHook(conn_id=connection).core_v1_client


def is_process_kubelet(api: CoreV1Api) -> bool:
    """Whether pods run as processes of this machine: names don't resolve then, ports are shared."""
    return "process-kubelet" in _version(api).git_version


def version_of(api: CoreV1Api) -> tuple[int, int]:
    """The version of Kubernetes that a cluster has: (1, 33)."""
    version = _version(api)
    # Clusters of cloud providers say "33+".
    major, minor = (int(re.sub(r"[^0-9].*", "", part) or 0) for part in (version.major, version.minor))
    return major, minor


def _version(api: CoreV1Api) -> VersionInfo:
    from kubernetes.client import VersionApi

    return VersionApi(api.api_client).get_code(_request_timeout=_TIMEOUT)


def list_jobs(api: CoreV1Api, namespace: str, selector: str) -> list[V1Job]:
    """The Jobs that a label selector chooses; none where the rights are those of before there were Jobs."""
    from kubernetes.client import BatchV1Api
    from kubernetes.client.exceptions import ApiException

    listing = BatchV1Api(api.api_client).list_namespaced_job
    try:
        return list(listing(namespace, label_selector=selector, _request_timeout=_TIMEOUT).items)
    except ApiException as e:
        if e.status != 403:
            raise
        return []


def delete_job(api: CoreV1Api, name: str, namespace: str) -> bool:
    """Delete a Job and its pods; False when it was gone already."""
    from kubernetes.client import BatchV1Api

    # Else the API keeps the pods of a batch/v1 Job.
    how = {"propagation_policy": "Background"}
    return _deleted(BatchV1Api(api.api_client).delete_namespaced_job, name, namespace, **how)


def create_service(api: CoreV1Api, manifest: dict[str, Any]) -> None:
    """Create a Service; one that is there already is left alone. An API that is away for a while is waited for."""
    from kubernetes.client.exceptions import ApiException

    meta = manifest["metadata"]
    try:
        patiently(
            lambda: api.create_namespaced_service(meta["namespace"], manifest, _request_timeout=_TIMEOUT)
        )
    except ApiException as e:
        if e.status != 409:
            raise
        log.info("service %s is there already", meta["name"])


def delete_gang(
    api: CoreV1Api,
    gang: str,
    namespace: str,
    *,
    wait: bool = True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Delete the Jobs and pods of a gang, by their owner label, and its Service, and `wait` until they are gone.

    Returns their names. A pod that was lost with its node is deleted by force, as nobody else would ever end it.
    """
    # Jobs first: they would replace their pods.
    ours = list_jobs(api, namespace, f"{labels.LABEL_GANG}={gang}")
    deleted = [job.metadata.name for job in ours if delete_job(api, job.metadata.name, namespace)]
    pods = _pods(api, gang, namespace)
    for delete, name in [
        *((api.delete_namespaced_pod, pod.metadata.name) for pod in pods),
        (api.delete_namespaced_service, gang),
    ]:
        if _deleted(delete, name, namespace):
            deleted.append(name)
    if pods and wait:
        _wait_until_gone(api, gang, namespace, clock, sleep)
    return deleted


def _wait_until_gone(
    api: CoreV1Api, gang: str, namespace: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    from trainyard.given_up import Lookout, PodGivenUp

    watches: dict[str, Lookout] = {}
    forced: set[str] = set()
    while True:
        # What has ended and is still there waits for its finalizers, which is not for us to wait for.
        pods = [p for p in _pods(api, gang, namespace) if not has_ended(p) and p.metadata.uid not in forced]
        if not pods:
            return
        for pod in pods:
            try:
                watches.setdefault(pod.metadata.uid, Lookout(clock)).look(pod)
            except PodGivenUp as e:
                log.warning("%s; it is deleted by force", e)
                _deleted(api.delete_namespaced_pod, pod.metadata.name, namespace, grace_period_seconds=0)
                forced.add(pod.metadata.uid)
        sleep(_POLL)


def _pods(api: CoreV1Api, gang: str, namespace: str) -> list[V1Pod]:
    selector = f"{labels.LABEL_GANG}={gang}"
    return list(
        patiently(
            lambda: (
                api.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=_TIMEOUT).items
            )
        )
    )


def _deleted(delete: Callable[..., Any], name: str, namespace: str, **options: Any) -> bool:
    """Delete; False when it was gone already."""
    from kubernetes.client.exceptions import ApiException

    try:
        patiently(lambda: delete(name, namespace, _request_timeout=_TIMEOUT, **options))
    except ApiException as e:
        if e.status != 404:  # somebody was faster
            raise
        return False
    return True
