"""The cluster that tests run on, and what they make there: a namespace, shared storage, an account for Airflow.

Nothing here knows what kind of cluster it is. The environment says what tests can't find out:

    KUBECONFIG                   the cluster of its current context; its user may make namespaces and volumes
    TRAINYARD_TEST_IMAGE         the trainer's image, which the nodes have or can pull (trainyard-trainer:0.1.0)
    TRAINYARD_TEST_SMALL_IMAGE   one with a shell and Python, for pods that do little (python:3.11-slim-bookworm)
    TRAINYARD_TEST_SERVING_IMAGE the embedded model server's image (trainyard-serving:0.1.0)
    TRAINYARD_TEST_SHARED        a folder that this machine and the nodes see at the same path (a temporary one)
    TRAINYARD_TEST_VOLUME        that folder as part of a PersistentVolume's spec, JSON, with $FOLDER for its path, or
                                 $NAME for its last part ({"hostPath": {"path": "$FOLDER"}})
    TRAINYARD_TEST_HOST          an address of this machine that pods reach (none: they don't reach MLflow)
    TRAINYARD_TEST_BUILD_COMMAND  builds an image and gives it to the nodes: called with -t NAME CONTEXT
    TRAINYARD_TEST_NODE_COMMAND  breaks and mends nodes: called with an action (off, on, cut, heal, freeze, thaw, stop,
                                 start, ...), the node's name and what the action wants besides
"""

from __future__ import annotations

import json
import os
import shlex
import string
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

REPO = Path(__file__).resolve().parents[2]
HANG = 300.0  # seconds: what takes longer hangs

QUOTA: Mapping[str, str] = {
    "pods": "20",
    "services": "10",
    "requests.cpu": "4",
    "requests.memory": "32Gi",
    "limits.memory": "32Gi",
    "requests.nvidia.com/gpu": "8",
}


def wait_for(what: str, found: Callable[[], Any], *, seconds: float = HANG, every: float = 0.5) -> Any:
    """What `found` gives, as soon as that is true; a cluster that is away meanwhile is asked again."""
    deadline = time.monotonic() + seconds
    away = ""
    while True:
        try:
            if value := found():
                return value
            away = ""
        except HTTPError as e:
            away = f" ({e})"
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s{away}"
        time.sleep(every)


@dataclass(frozen=True)
class Cluster:
    """A cluster, by a kubeconfig of one context; `version` is (1, 20) for v1.20.2."""

    kubeconfig: Path
    api: client.CoreV1Api
    version: tuple[int, int]
    image: str

    @classmethod
    def of_environment(cls, folder: Path) -> Cluster:
        """The cluster of KUBECONFIG; skips the test when there is none."""
        if not os.environ.get("KUBECONFIG"):
            pytest.skip(
                "KUBECONFIG names no cluster; docs/kubernetes.md tells how to have one on this machine"
            )
        # One file of one context, whatever KUBECONFIG lists.
        flat = subprocess.run(
            ["kubectl", "config", "view", "--minify", "--flatten", "--raw"], capture_output=True, text=True
        )
        assert flat.returncode == 0, f"kubectl reads no context from KUBECONFIG: {flat.stderr}"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(flat.stdout)
        connection = config.new_client_from_config(str(kubeconfig))
        code = client.VersionApi(connection).get_code()
        version = (int(code.major), int(code.minor.rstrip("+")))
        image = os.environ.get("TRAINYARD_TEST_IMAGE") or "trainyard-trainer:0.1.0"
        return cls(kubeconfig, client.CoreV1Api(connection), version, image)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints; AssertionError with its error."""
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"kubectl {shlex.join(arguments)}: {done.stderr}"
        return done.stdout


class Tenant:
    """A namespace as deploy/kubernetes makes it for a team, with a volume whose folder this machine sees.

    `folder` is the storage root, at the same path here and in pods; `claim` its PersistentVolumeClaim; `group` whom it
    belongs to; `kubeconfig` that of Airflow's own account, which has the rights of deploy/kubernetes and no others.
    """

    claim = "trainyard-storage"
    service_account = "trainyard-pods"

    def __init__(self, cluster: Cluster, name: str, shared: Path) -> None:
        self.cluster = cluster
        self.api = cluster.api
        self.name = name
        self.folder = shared / name
        # Pods are users of their own, in a group that this process can give its folders to.
        self.group = os.getgid() or 10001
        self.kubeconfig = shared / f"{name}.kubeconfig"

    def make(self) -> None:
        """Make it, storage first."""
        self.folder.mkdir(parents=True)
        os.chown(self.folder, -1, self.group)
        self.folder.chmod(0o2775)
        volume = string.Template(
            os.environ.get("TRAINYARD_TEST_VOLUME") or '{"hostPath": {"path": "$FOLDER"}}'
        )
        spec = json.loads(volume.substitute(FOLDER=self.folder, NAME=self.name))
        self.api.create_persistent_volume(_volume(self.name, self.claim, spec))
        found = yaml.safe_load_all(
            self.cluster.kubectl("kustomize", str(REPO / "deploy" / "kubernetes" / "base"))
        )
        documents = [self._own(document) for document in found]
        documents.append(_all_out(self.name))
        # The namespace first, and its claim with the volume of ours.
        documents.sort(key=lambda document: document["kind"] != "Namespace")
        self.cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
        wait_for(
            "the claim is bound",
            lambda: (
                self.api.read_namespaced_persistent_volume_claim(self.claim, self.name).status.phase
                == "Bound"
            ),
        )
        self._make_kubeconfig()

    def _own(self, document: dict[str, Any]) -> dict[str, Any]:
        kind, meta = document["kind"], document["metadata"]
        if kind == "Namespace":
            meta["name"] = self.name
            return document
        meta["namespace"] = self.name
        if kind == "RoleBinding":
            for subject in document["subjects"]:
                subject["namespace"] = self.name
        elif kind == "ResourceQuota":
            document["spec"]["hard"] = dict(QUOTA)
        elif kind == "PersistentVolumeClaim":
            document["spec"] |= {"storageClassName": "", "volumeName": self.name}
            document["spec"]["resources"]["requests"]["storage"] = "1Gi"
        return document

    def _make_kubeconfig(self) -> None:
        """A kubeconfig of the account trainyard-airflow, for as long as tests may take."""
        request = client.AuthenticationV1TokenRequest(
            spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=6 * 3600)
        )
        token = self.api.create_namespaced_service_account_token(
            "trainyard-airflow", self.name, request
        ).status.token
        known = yaml.safe_load(self.cluster.kubeconfig.read_text())
        known["users"] = [{"name": "airflow", "user": {"token": token}}]
        known["contexts"][0]["context"] |= {"user": "airflow", "namespace": self.name}
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(yaml.safe_dump(known))

    def set_quota(self, **hard: str) -> None:
        """Other numbers for the quota, by name with "." and "/" as in "requests.cpu"; the others stay."""
        body = {"spec": {"hard": hard}}
        self.api.patch_namespaced_resource_quota("trainyard", self.name, body)
        wait_for(
            "the quota has its new numbers",
            lambda: (
                hard.items()
                <= (self.api.read_namespaced_resource_quota("trainyard", self.name).status.hard or {}).items()
            ),
        )

    def pods(self, selector: str = "") -> list[Any]:
        """Its pods."""
        return self.api.list_namespaced_pod(self.name, label_selector=selector).items

    def left(self) -> list[str]:
        """What runs have left of their own: pods, Services, reservations, claims, configmaps."""
        ledger = "trainyard-admission"
        found = [f"pod {pod.metadata.name} ({pod.status.phase})" for pod in self.pods()]
        found += [
            f"service {service.metadata.name}"
            for service in self.api.list_namespaced_service(self.name).items
        ]
        found += [
            f"claim {claim.metadata.name}"
            for claim in self.api.list_namespaced_persistent_volume_claim(self.name).items
            if claim.metadata.name != self.claim
        ]
        for held in self.api.list_namespaced_config_map(self.name).items:
            if held.metadata.name == ledger:
                found += [f"reservation of {gang}" for gang in held.data or {}]
            elif held.metadata.name != "kube-root-ca.crt":
                found.append(f"configmap {held.metadata.name}")
        return found

    def remove(self) -> None:
        """Delete the namespace and all in it, and the volume; the folder goes with its parent."""
        for delete in (self.api.delete_namespace, self.api.delete_persistent_volume):
            wait_for("what tests have made is deleted", lambda delete=delete: self._deleted(delete))
        wait_for("the namespace is gone", self._is_gone)

    def _deleted(self, delete: Callable[[str], Any]) -> bool:
        try:
            delete(self.name)
        except ApiException as e:
            if e.status not in (404, 409):  # 409: it is on its way
                raise
        return True

    def _is_gone(self) -> bool:
        # What waits for a node that is gone is deleted by force: nobody will say that it has ended.
        for pod in self.pods():
            if pod.metadata.deletion_timestamp and pod.status.phase in ("Pending", "Running"):
                age = time.time() - pod.metadata.deletion_timestamp.timestamp()
                if age > (pod.metadata.deletion_grace_period_seconds or 30) + 30:
                    self.cluster.kubectl(
                        "delete", "pod", pod.metadata.name, "-n", self.name, "--grace-period=0", "--force"
                    )
        return self.name not in {row.metadata.name for row in self.api.list_namespace().items}


@dataclass(frozen=True)
class Nodes:
    """Breaks and mends nodes by the command of TRAINYARD_TEST_NODE_COMMAND."""

    command: tuple[str, ...]
    api: client.CoreV1Api

    def __call__(self, action: str, node: str, *more: str) -> str:
        """Do `action` to a node, "off" say; what the command printed."""
        done = subprocess.run([*self.command, action, node, *more], capture_output=True, text=True)
        assert done.returncode == 0, (
            f"{shlex.join([*self.command, action, node, *more])}: {done.stderr}{done.stdout}"
        )
        return done.stdout

    def is_ready(self, node: str) -> bool:
        """Whether the cluster says so."""
        conditions = self.api.read_node(node).status.conditions
        return any(c.type == "Ready" and c.status == "True" for c in conditions)


def _volume(name: str, claim: str, source: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": name, "name": claim},
            **source,
        },
    }


def _all_out(namespace: str) -> dict[str, Any]:
    """Where the cluster keeps network policies: the platform's MLflow has whatever port was free."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "tests", "namespace": namespace},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]},
    }
