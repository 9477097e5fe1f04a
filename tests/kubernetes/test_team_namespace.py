"""deploy/kubernetes applied for real: what its account may do, its quota and limits, its storage, its overlay."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.sdk import DAG
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from trainyard.operators.admit import AdmitOperator
from trainyard.operators.gang import CleanupOperator, PlanOperator, ServiceOperator
from trainyard.operators.step import StepOperator
from trainyard.trigger_form import DEFAULTS

from tests.kubernetes.model_servers import render
from tests.kubernetes.real_cluster import REPO, Cluster, Tenant, wait_for
from tests.plugins.conftest import make_context
from tests.plugins.test_gang_operators import TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MANIFESTS = REPO / "deploy" / "kubernetes"
BEYOND = (
    ("secrets", "get"),
    ("secrets", "list"),
    ("pods/exec", "create"),
    ("pods/attach", "create"),
    ("pods/portforward", "create"),
    ("pods/eviction", "create"),
    ("pods", "update"),
    ("pods", "deletecollection"),
    ("serviceaccounts/token", "create"),
    ("configmaps", "delete"),
    ("configmaps", "list"),
    ("persistentvolumeclaims", "create"),
    ("resourcequotas", "update"),
    ("limitranges", "delete"),
    ("services", "update"),
)
STEP = '''"""A step of a test."""
import os, sys
from trainers.job.termination import run_step
def main(spec):
    print("working", flush=True)
    return {"uid": os.getuid(), "said": spec["say"]}
if __name__ == "__main__":
    sys.exit(run_step(main))
'''


@pytest.fixture(scope="module")
def airflow_account(namespace: Tenant) -> Iterator[client.ApiClient]:
    """A client that is the account trainyard-airflow, by its token."""
    with config.new_client_from_config(str(namespace.kubeconfig)) as api:
        yield api


@pytest.fixture
def pipelines(namespace: Tenant, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of Airflow's tasks, with that account's token."""
    extra = {"kube_config_path": str(namespace.kubeconfig), "namespace": namespace.name}
    monkeypatch.setenv(
        "AIRFLOW_CONN_TRAINYARD_KUBERNETES", json.dumps({"conn_type": "kubernetes", "extra": extra})
    )
    for name, value in {
        "TRAINYARD_STORAGE": str(namespace.folder),
        "TRAINYARD_NAMESPACE": namespace.name,
        "TRAINYARD_IMAGE": cluster.image,
        "TRAINYARD_STORAGE_CLAIM": namespace.claim,
        "TRAINYARD_SERVICE_ACCOUNT": namespace.service_account,
        "TRAINYARD_FS_GROUP": str(namespace.group),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("TRAINYARD_DEFERRABLE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def _pod(
    namespace: Tenant, name: str, source: str, *, user: int = 10001, **resources: dict[str, str]
) -> dict[str, Any]:
    """A pod as pipelines' are: restricted, with the storage root at its path."""
    return {
        "metadata": {"name": name, "labels": {"team-test": "pod"}},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": namespace.service_account,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "fsGroup": namespace.group,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "base",
                    "image": namespace.cluster.image,
                    "command": ["python", "-c", source],
                    "resources": resources,
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "storage", "mountPath": "/storage"}],
                }
            ],
            "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": namespace.claim}}],
        },
    }


@pytest.fixture
def run_pod(namespace: Tenant) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Creates pods, and deletes them after the test."""
    made: list[str] = []

    def run(pod: dict[str, Any]) -> None:
        namespace.api.create_namespaced_pod(namespace.name, pod)
        made.append(pod["metadata"]["name"])

    yield run
    for name in made:
        namespace.api.delete_namespaced_pod(name, namespace.name, grace_period_seconds=0)
    wait_for("its pods are gone", lambda: not namespace.pods("team-test=pod"))


def _may(api: client.ApiClient, namespace: str, resource: str, verb: str, group: str = "") -> bool:
    name, _, sub = resource.partition("/")
    attributes = client.V1ResourceAttributes(
        namespace=namespace, group=group, resource=name, subresource=sub, verb=verb
    )
    review = client.V1SelfSubjectAccessReview(
        spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
    )
    answer = client.AuthorizationV1Api(api).create_self_subject_access_review(review)
    return bool(answer.status.allowed)


def test_airflow_s_account_may_do_what_the_role_says_and_nothing_else(
    namespace: Tenant, airflow_account: client.ApiClient
) -> None:
    documents = yaml.safe_load_all((MANIFESTS / "base" / "role.yaml").read_text())
    role = next(document for document in documents if document["kind"] == "Role")
    granted = [
        (resource, verb, group)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
    ]
    assert not {(resource, verb) for resource, verb, _ in granted} & set(BEYOND)
    for right in granted:
        assert _may(airflow_account, namespace.name, *right), right
        assert not _may(airflow_account, "default", *right), "in its own namespace only"
    for resource, verb in BEYOND:
        assert not _may(airflow_account, namespace.name, resource, verb), (resource, verb)
    with pytest.raises(ApiException) as refused:
        client.CoreV1Api(airflow_account).list_namespaced_secret(namespace.name)
    assert refused.value.status == 403


def test_the_account_of_pods_may_nothing(namespace: Tenant) -> None:
    for resource, verb in (("pods", "get"), ("configmaps", "get"), ("secrets", "get"), ("services", "list")):
        who = f"system:serviceaccount:{namespace.name}:{namespace.service_account}"
        attributes = client.V1ResourceAttributes(namespace=namespace.name, resource=resource, verb=verb)
        review = client.V1SubjectAccessReview(
            spec=client.V1SubjectAccessReviewSpec(user=who, resource_attributes=attributes)
        )
        api = client.AuthorizationV1Api(namespace.api.api_client)
        assert not api.create_subject_access_review(review).status.allowed, (resource, verb)


def test_its_token_is_enough_for_a_step_and_a_gang_s_tasks(
    namespace: Tenant, pipelines: None, nothing_left: Callable[[], None]
) -> None:
    folder = namespace.folder / "team-steps"  # the namespace is shared by all tests: a name of its own
    folder.mkdir()
    (folder / "a_step.py").write_text(STEP)
    step = StepOperator(
        task_id="step", module="a_step", spec={"say": "hello"}, env_vars={"PYTHONPATH": str(folder)}
    )
    answer = step.execute(make_context(step))
    assert answer["said"] == "hello"
    assert answer["uid"] > 0
    with DAG("pipeline", max_active_tasks=8):
        plan = PlanOperator(task_id="plan", group="train", template=TEMPLATE, records="storage://records/m")
        admit = AdmitOperator(task_id="admit", group="train")
        service = ServiceOperator(task_id="service", group="train")
        cleanup = CleanupOperator(task_id="cleanup", group="train")
    context = make_context(plan, params={**DEFAULTS, "workers": 1, "ps": 1})
    plan.execute(context)
    assert admit.poke(make_context(admit)).is_done
    ledger = namespace.api.read_namespaced_config_map("trainyard-admission", namespace.name)
    assert len(ledger.data) == 1, "its room is reserved"
    service.execute(make_context(service))
    (made,) = namespace.api.list_namespaced_service(namespace.name).items
    assert made.spec.cluster_ip == "None"
    cleanup.execute(make_context(cleanup))
    nothing_left()


def test_the_quota_refuses_what_is_too_much_and_limits_fill_in_what_is_not_said(
    namespace: Tenant, run_pod: Callable[[dict[str, Any]], None]
) -> None:
    run_pod(_pod(namespace, "says-nothing", "print('done')"))
    (base,) = namespace.api.read_namespaced_pod("says-nothing", namespace.name).spec.containers
    assert base.resources.requests == {"cpu": "100m", "memory": "128Mi"}
    assert base.resources.limits == {"memory": "512Mi"}
    for resources, words in (
        (
            {"requests": {"cpu": "400", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
            "exceeded quota: trainyard",
        ),
        (
            {"requests": {"nvidia.com/gpu": "64"}, "limits": {"nvidia.com/gpu": "64"}},
            "exceeded quota: trainyard",
        ),
        ({"limits": {"memory": "129Gi"}}, "maximum memory usage per Container is 128Gi"),
    ):
        with pytest.raises(ApiException) as refused:
            run_pod(_pod(namespace, "too-much", "", **resources))
        assert refused.value.status == 403
        assert words in refused.value.body


WRITES = """
import os, pathlib, time
me, other = {me!r}, {other!r}
folder = pathlib.Path("/storage/shared")
(folder / me).write_text(str(os.getuid()))
while not (folder / other).exists():
    time.sleep(0.2)
(folder / (me + "-of-" + other)).write_text((folder / other).read_text())
"""


def test_two_pods_write_the_same_volume_at_once_without_root(
    namespace: Tenant, run_pod: Callable[[dict[str, Any]], None]
) -> None:
    shared = namespace.folder / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    for me, other, user in (("one", "two", 10001), ("two", "one", 10002)):
        run_pod(_pod(namespace, me, WRITES.format(me=me, other=other), user=user))
    for name in ("one", "two"):

        def ended(name: str = name) -> str:
            phase = namespace.api.read_namespaced_pod(name, namespace.name).status.phase
            return phase if phase in ("Succeeded", "Failed") else ""

        assert wait_for(f"{name} has ended", ended) == "Succeeded"
    assert (shared / "one-of-two").read_text() == "10002"
    assert (shared / "two-of-one").read_text() == "10001"
    assert {path.stat().st_gid for path in shared.iterdir()} == {namespace.group}


def test_a_copy_of_the_overlay_makes_a_team_s_namespace(cluster: Cluster, tmp_path: Path) -> None:
    name = f"team-{secrets.token_hex(3)}"
    shutil.copytree(MANIFESTS, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "team-example"
    text = (overlay / "kustomization.yaml").read_text()
    (overlay / "kustomization.yaml").write_text(text.replace("team-example", name))
    documents = render(overlay)
    documents.sort(key=lambda document: document["kind"] != "Namespace")
    try:
        cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
        label = cluster.api.read_namespace(name).metadata.labels["pod-security.kubernetes.io/enforce"]
        assert label == "restricted"
        hard = cluster.api.read_namespaced_resource_quota("trainyard", name).spec.hard
        assert (hard["pods"], hard["services"]) == ("40", "50"), "the overlay's number, and the base's"
        assert cluster.api.read_namespaced_persistent_volume_claim("trainyard-storage", name)
        (subject,) = next(d for d in documents if d["kind"] == "RoleBinding")["subjects"]
        who = f"system:serviceaccount:{name}:{subject['name']}"
        said = cluster.kubectl("auth", "can-i", "create", "pods", "--namespace", name, "--as", who)
        assert said.strip() == "yes"
        # Once more changes nothing.
        again = cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
        assert {line.split()[-1] for line in again.splitlines()} == {"unchanged"}
    finally:
        cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=true")
