"""What is left on a cluster when Airflow is gone for good: nothing, with the rights of Airflow's own account."""

from __future__ import annotations

import pytest
from kubernetes import client, config
from trainyard import lease
from trainyard.cluster import create_service, delete_gang

from tests.kubernetes.real_cluster import Cluster, Tenant, wait_for
from trainers.job import labels
from trainers.job.plan import Cluster as Place
from trainers.job.plan import Plan, make_plan
from trainers.job.policies import Budgets
from trainers.job.spec import Strategy, TrainingJob, standard_roles


def _plan(tenant: Tenant, gang: str) -> Plan:
    job = TrainingJob(
        name="leased",
        trainer="nobody.trains",
        roles=standard_roles(Strategy()),
        budgets=Budgets(schedule=1, start=1, total=6, evaluate=1),
        output=str(tenant.folder / gang),
    )
    (tenant.folder / gang).mkdir()
    return make_plan(job, Place.kubernetes(tenant.name), gang=gang)


def _start(cluster: Cluster, tenant: Tenant, plan: Plan) -> client.CoreV1Api:
    """The lease and the Service as Airflow makes them, and a pod of the gang that would run for ever."""
    api = client.CoreV1Api(config.new_client_from_config(str(tenant.kubeconfig)))
    owner = lease.make_lease(api, plan)
    assert owner == lease.owner_in(plan.job.output), "the second time it is the same"
    assert lease.make_lease(api, plan) == owner
    service = plan.service()
    service["metadata"]["ownerReferences"] = [owner]
    create_service(api, service)
    small = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "32Mi"}}
    secure = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {
        "name": "base",
        "image": cluster.image,
        "command": ["sleep", "3600"],
        "resources": small,
        "securityContext": secure,
    }
    meta = {
        "name": f"{plan.gang}-chief-0",
        "labels": {labels.LABEL_GANG: plan.gang, labels.LABEL_MANAGED_BY: labels.MANAGED_BY},
        "ownerReferences": [owner],
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    api.create_namespaced_pod(tenant.name, {"metadata": meta, "spec": spec})
    return api


def _left(tenant: Tenant, plan: Plan) -> list[str]:
    jobs = client.BatchV1Api(tenant.api.api_client).list_namespaced_job(tenant.name).items
    found = [job.metadata.name for job in jobs if job.metadata.name == plan.gang]
    found += [s.metadata.name for s in tenant.api.list_namespaced_service(tenant.name).items]
    return found + [pod.metadata.name for pod in tenant.pods(f"{labels.LABEL_GANG}={plan.gang}")]


def test_a_gang_that_nobody_ends_is_ended_by_its_lease(
    cluster: Cluster, namespace: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "MARGIN", 1.0)
    monkeypatch.setattr(lease, "TTL", 10)
    plan = _plan(namespace, "left-alone")
    _start(cluster, namespace, plan)
    assert len(_left(namespace, plan)) == 3
    wait_for("lease, Service and pod are gone", lambda: not _left(namespace, plan))


def test_a_cleanup_leaves_no_lease(cluster: Cluster, namespace: Tenant) -> None:
    plan = _plan(namespace, "cleaned")
    api = _start(cluster, namespace, plan)
    assert delete_gang(api, plan.gang, namespace.name)
    wait_for("all is gone", lambda: not _left(namespace, plan))
