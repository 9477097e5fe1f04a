"""The manifests of a team's namespace: whole, consistent, and in agreement with what pods ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainers.job import labels
from trainers.job.plan import PORT

ROOT = Path(__file__).parents[2] / "deploy/kubernetes"
FOLDERS = [ROOT / "base", *sorted((ROOT / "overlays").iterdir())]


def _documents(folder: Path) -> list[dict[str, Any]]:
    return [
        document
        for path in sorted(folder.glob("*.yaml"))
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text())
    ]


def _of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in _documents(ROOT / "base") if d["kind"] == kind}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_kustomization_names_every_file_and_no_other(folder: Path) -> None:
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    local = {name for name in said["resources"] if name.endswith(".yaml")}
    patched = {patch["path"] for patch in said.get("patches", ()) if "path" in patch}
    assert local | patched == files
    for name in set(said["resources"]) - local:
        assert (folder / name / "kustomization.yaml").is_file()


def test_an_overlay_patches_what_is_there() -> None:
    base = {(d["kind"], d["metadata"]["name"]) for d in _documents(ROOT / "base")}
    for folder in FOLDERS[1:]:
        said = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert {(d["kind"], d["metadata"]["name"]) for d in _documents(folder)} <= base
        targets = {(p["target"]["kind"], p["target"]["name"]) for p in said["patches"] if "target" in p}
        assert targets <= base
        assert said["namespace"] != "trainyard", "a team has a namespace of its own"


def test_the_namespace_refuses_what_is_not_restricted() -> None:
    (namespace,) = _of_kind("Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_quota_counts_what_pods_ask_for_and_the_rest_has_defaults() -> None:
    hard = _of_kind("ResourceQuota")["trainyard"]["spec"]["hard"]
    assert {"requests.cpu", "requests.memory", "requests.nvidia.com/gpu", "pods"} <= set(hard)
    # A quota on a resource makes a cluster refuse pods that don't say it.
    (limits,) = _of_kind("LimitRange")["trainyard"]["spec"]["limits"]
    assert {"cpu", "memory"} <= set(limits["defaultRequest"])
    assert "memory" in limits["default"]
    assert "cpu" not in limits["default"], "a CPU limit would slow a whole gang"


def test_replicas_reach_each_other_and_nobody_else_reaches_them() -> None:
    policies = _of_kind("NetworkPolicy")
    assert policies["deny-all"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    gangs = policies["gangs"]["spec"]
    ours = {"matchLabels": {labels.LABEL_MANAGED_BY: labels.MANAGED_BY}}
    assert gangs["podSelector"] == ours
    assert gangs["ingress"] == [
        {"from": [{"podSelector": ours}], "ports": [{"protocol": "TCP", "port": PORT}]}
    ]
    assert {"to": [{"podSelector": ours}], "ports": [{"protocol": "TCP", "port": PORT}]} in gangs["egress"]


def test_the_storage_can_be_mounted_by_many() -> None:
    claim = _of_kind("PersistentVolumeClaim")["trainyard-storage"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
