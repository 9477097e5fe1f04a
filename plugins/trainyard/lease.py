"""What takes a gang away when nobody else does: a Job without pods that owns the gang's Service and pods.

Kubernetes ends it by its deadline, removes it some minutes later (`ttlSecondsAfterFinished`), and what it owns with it.
So nothing of a gang outlives an Airflow that is gone for good, ended pods and the Service included. It costs nothing
while it is there: `parallelism: 0` makes no pod. The gang's own cleanup deletes it like the rest.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.files import read_json, write_json
from trainyard.patience import patiently

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

    from trainers.job.plan import Plan

__all__ = ["OWNER_FILE", "Owner", "lease_manifest", "make_lease", "owner_in"]

log = logging.getLogger(__name__)

MARGIN = 3600.0
"""Seconds beyond all budgets of a job: by then its own tasks have cleaned up, or never will."""
TTL = 600
_TIMEOUT = 30
OWNER_FILE = "owner.json"
"""Where a job's folder says who owns its gang."""

Owner = dict[str, Any]
"""An ownerReference."""


def lease_manifest(plan: Plan) -> dict[str, Any]:
    """The Job; its template is never used, and says so much only because one has to be there."""
    budgets = plan.job.budgets
    meta = plan.service()["metadata"]
    seconds = budgets.schedule + budgets.start + budgets.total + budgets.evaluate + MARGIN
    container = {
        "name": "base",
        "image": "none",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "parallelism": 0,
            "completions": 1,
            "activeDeadlineSeconds": math.ceil(seconds),
            "ttlSecondsAfterFinished": TTL,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                }
            },
        },
    }


def make_lease(api: CoreV1Api, plan: Plan) -> Owner | None:
    """Create the gang's lease, and note it in the job's folder; None where that is not allowed, which is no harm."""
    from kubernetes.client import BatchV1Api
    from kubernetes.client.exceptions import ApiException

    batch = BatchV1Api(api.api_client)
    manifest = lease_manifest(plan)
    name, namespace = plan.gang, plan.namespace
    try:
        try:
            made = patiently(
                lambda: batch.create_namespaced_job(namespace, manifest, _request_timeout=_TIMEOUT)
            )
            _note_start(batch, made)
        except ApiException as e:
            if e.status != 409:
                raise
            made = patiently(lambda: batch.read_namespaced_job(name, namespace, _request_timeout=_TIMEOUT))
    except ApiException as e:
        if e.status not in (403, 404):
            raise
        log.warning(
            "gang %s has no lease (%s): what a lost Airflow leaves of it is for the reaper", name, e.reason
        )
        return None
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid}
    write_json(Path(plan.job.output) / OWNER_FILE, owner)
    return owner


def _note_start(batch: Any, made: Any) -> None:
    """Say when the Job began: before 1.23 its controller forgets that of one without pods, and its deadline with it."""
    from kubernetes.client.exceptions import ApiException

    meta = made.metadata
    body = {"status": {"startTime": meta.creation_timestamp.isoformat()}}
    try:
        patiently(
            lambda: batch.patch_namespaced_job_status(
                meta.name, meta.namespace, body, _request_timeout=_TIMEOUT
            )
        )
    except ApiException as e:
        if e.status not in (403, 404, 409, 422):  # not allowed, or said already
            raise
        log.info("the start of lease %s is left to the cluster: %s", meta.name, e.reason)


def owner_in(folder: str) -> Owner | None:
    """The lease that was noted in a job's folder."""
    owner = read_json(Path(folder) / OWNER_FILE)
    return dict(owner) if owner else None
