"""The exact pods of a gang and of a step on a cluster: golden files, and the rules that each must keep.

After a wanted change: `UPDATE_GOLDEN=1 python -m pytest tests/plugins/test_pod_manifests.py`, and read the diff.
"""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from kubernetes.client import ApiClient
from trainyard.operators.gang import JobTemplate
from trainyard.operators.replica import ReplicaOperator, replica_kwargs
from trainyard.operators.step import StepOperator
from trainyard.trigger_form import DEFAULTS

from tests.plugins.pod_security import violations
from trainers.job.placement import Placement
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import JobRecord
from trainers.job.resources import Resources

GOLDEN = Path(__file__).parent / "golden"
FORM = {**DEFAULTS, "workers": 2, "ps": 1}
SECRET = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "secret"}}}
PODS: dict[str, Any] = {
    "default": {
        "metadata": {"annotations": {"team": "vision"}},
        "spec": {
            "serviceAccountName": "reader",
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
            "containers": [
                {
                    "name": "base",
                    "env": [SECRET],
                    "envFrom": [{"configMapRef": {"name": "settings"}}],
                    "volumeMounts": [{"name": "cache", "mountPath": "/cache", "readOnly": True}],
                }
            ],
        },
    },
    "worker": {
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "spot", "operator": "In", "values": ["yes"]}]}
                        ]
                    }
                }
            }
        }
    },
}


def _example(name: str) -> JobTemplate:
    """What an example of the docs says of its job."""
    path = Path(__file__).resolve().parents[2] / "docs" / "examples" / f"{name}.py"
    template = runpy.run_path(str(path))[name]().get_task("train.plan").template
    assert isinstance(template, JobTemplate)
    return template


TEMPLATES = {
    "plain": JobTemplate("digits", "trainers.models.digits"),
    "everything": JobTemplate(
        "digits",
        "trainers.models.digits",
        resources={
            "default": Resources(0.5, "1Gi"),
            "worker": Resources(
                4,
                "16Gi",
                gpu=2,
                gpu_type="A100",
                node_selector={"pool": "gpu"},
                tolerations=({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},),
            ),
        },
        pods=PODS,
        placement=Placement(queue="team-a", priority_class="batch", nodes="spread"),
        image="registry.example/digits:2",
    ),
    # The docs' examples of other frameworks.
    "ddp": _example("ddp_weekly"),
    "xgboost": _example("xgboost_weekly"),
}


@pytest.fixture
def on_a_cluster(pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of an Airflow whose pods run on a cluster."""
    monkeypatch.setenv("TRAINYARD_STORAGE_CLAIM", "trainyard-storage")
    monkeypatch.setenv("TRAINYARD_NAMESPACE", "ml")
    monkeypatch.setenv("TRAINYARD_FS_GROUP", "10001")
    return pipelines


def _manifest(operator: Any, context: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The operator's pod as a manifest, without what differs from run to run."""
    pod = ApiClient().sanitize_for_serialization(operator.build_pod_request_obj(context, dry_run=True))
    pod["metadata"]["name"] = re.sub(r"-[a-z0-9]{8}$", "-SUFFIX", pod["metadata"]["name"])
    for label in ("airflow_version", "airflow_kpo_in_cluster"):
        pod["metadata"]["labels"].pop(label, None)
    return json.loads(json.dumps(pod, sort_keys=True).replace(str(root), "/storage"))


def _gang(template: JobTemplate, root: Path, context_of: Any) -> dict[str, dict[str, Any]]:
    job = template.job(FORM, manifest=f"{root}/records/m.json", output=f"{root}/jobs/p/r")
    plan = make_plan(job, Cluster.kubernetes("ml"), gang="digits-retrain-1a2b3c4d", image="trainer:1")
    JobRecord.create(plan)
    pods = {}
    for replica in plan.replicas:
        with DAG("pipeline"):
            operator = ReplicaOperator(task_id="replica", **replica_kwargs(plan, replica))
        operator.pod_overlay = replica.pod
        pods[replica.replica] = _manifest(operator, context_of(operator, map_index=0), root)
    return pods


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_gangs_pods_are_as_written_down(name: str, on_a_cluster: Path, context_of: Any) -> None:
    pods = _gang(TEMPLATES[name], on_a_cluster, context_of)
    path = GOLDEN / f"gang-{name}.json"
    text = json.dumps(pods, indent=1, sort_keys=True) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", ["ddp", "xgboost"])
def test_a_frameworks_plan_is_as_written_down(name: str, tmp_path: Path) -> None:
    job = TEMPLATES[name].job(FORM, manifest="/storage/records/m.json", output="/storage/jobs/p/r")
    plan = make_plan(job, Cluster.kubernetes("ml"), gang=f"{name}-1a2b3c4d", image="trainer:1")
    text = json.dumps(plan.to_dict(), indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"plan-{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert [r.env.get("RANK") for r in plan.replicas] == ["1", "2", "0"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_gangs_pods_keep_the_restricted_level_and_more(
    name: str, on_a_cluster: Path, context_of: Any
) -> None:
    for pod in _gang(TEMPLATES[name], on_a_cluster, context_of).values():
        assert violations(pod) == []
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
        (scratch,) = [v for v in spec["volumes"] if v["name"] == mounts["/tmp"]]
        assert scratch["emptyDir"] == {}
        assert "TF_CONFIG" not in json.dumps(pod), "the launcher makes it"


def test_a_step_keeps_them_too(on_a_cluster: Path, context_of: Any) -> None:
    with DAG("pipeline"):
        step = StepOperator(
            task_id="export",
            module="trainers.export",
            spec={"job": "storage://jobs/p/r"},
            pod=PODS["default"],
        )
    pod = _manifest(step, context_of(step), on_a_cluster)
    assert violations(pod) == []
    assert pod["spec"]["serviceAccountName"] == "reader"
    assert pod["spec"]["securityContext"]["fsGroup"] == 10001
    assert SECRET in pod["spec"]["containers"][0]["env"]
    assert {v["name"] for v in pod["spec"]["volumes"]} == {"cache", "trainyard-storage", "trainyard-scratch"}


def test_an_author_may_say_otherwise_and_adds_containers(on_a_cluster: Path, context_of: Any) -> None:
    overlay = {
        "spec": {
            "securityContext": {"runAsUser": 1000},
            "containers": [
                {"name": "proxy", "image": "proxy:1"},
                {"name": "base", "securityContext": {"readOnlyRootFilesystem": False}},
            ],
        }
    }
    with DAG("pipeline"):
        step = StepOperator(task_id="s", module="m", spec={}, pod=overlay)
    spec = _manifest(step, context_of(step), on_a_cluster)["spec"]
    assert [row["name"] for row in spec["containers"]] == ["base", "proxy"]
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"] | {"runAsUser": 1000, "runAsNonRoot": True} == spec["securityContext"]
    assert spec["containers"][1] == {"image": "proxy:1", "name": "proxy"}


def test_a_pod_template_file_is_an_overlay(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text("apiVersion: v1\nkind: Pod\nspec: {schedulerName: volcano}\n")
    template = JobTemplate("digits", "trainers.models.digits", pods={"default": str(path)})
    job = template.job(FORM, manifest="/m", output="/j")
    assert [dict(role.pod) for role in job.roles] == [{"spec": {"schedulerName": "volcano"}}] * 3


# Each rule of the level, broken once: a check that can't fail would prove nothing.
_GOOD = {
    "spec": {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "a", "emptyDir": {}}],
        "containers": [
            {
                "name": "base",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }
}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("hostNetwork",), True, "hostNetwork"),
        (("hostPID",), True, "hostPID"),
        (("volumes",), [{"name": "a", "hostPath": {"path": "/"}}], "is a hostPath"),
        (("securityContext", "sysctls"), [{"name": "kernel.msgmax", "value": "1"}], "sysctls"),
        (("securityContext", "runAsNonRoot"), None, "may run as root"),
        (("securityContext", "runAsUser"), 0, "runs as user 0"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "no seccomp profile"),
        (("containers", 0, "securityContext", "privileged"), True, "is privileged"),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), None, "may escalate"),
        (("containers", 0, "securityContext", "capabilities"), {"drop": ["NET_RAW"]}, "does not drop all"),
        (
            ("containers", 0, "securityContext", "capabilities"),
            {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
            "adds",
        ),
        (("containers", 0, "securityContext", "procMount"), "Unmasked", "mounts proc"),
        (("containers", 0, "ports"), [{"containerPort": 1, "hostPort": 1}], "a port of its host"),
    ],
)
def test_each_rule_of_the_level_is_looked_at(path: tuple[Any, ...], value: Any, words: str) -> None:
    assert violations(_GOOD) == []
    pod = copy.deepcopy(_GOOD)
    *way, last = path
    part: Any = pod["spec"]
    for name in way:
        part = part[name]
    part[last] = value
    assert any(words in line for line in violations(pod))
