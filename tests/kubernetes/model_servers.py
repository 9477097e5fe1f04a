"""Model servers on the cluster: deploy/kubernetes/serving, as far as the server knows it, and pods that use them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.real_cluster import REPO, Tenant, wait_for

SERVING = REPO / "deploy" / "kubernetes" / "serving"
TOOLS = Path(__file__).parent / "serving_tools"
STORAGE = "/var/lib/trainyard/storage"
CALLER = {"trainyard.dev/model-client": "true"}
OLDER = {"autoscaling/v2": "autoscaling/v2beta2", "policy/v1": "policy/v1beta1"}
"""The same kinds on servers before 1.23 and 1.21, with the same fields but for those of UNKNOWN."""
UNKNOWN = {"policy/v1beta1": ("unhealthyPodEvictionPolicy",)}


def render(folder: Path) -> list[dict[str, Any]]:
    """The documents of a kustomization, by the first kubectl here that is new enough for it."""
    refused = "there is none"
    for place in os.environ["PATH"].split(os.pathsep):
        kubectl = shutil.which("kubectl", path=place)
        if kubectl is None:
            continue
        done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
        if done.returncode == 0:
            return list(yaml.safe_load_all(done.stdout))
        refused = done.stderr.strip()
    pytest.skip(f"no kubectl here renders {folder.name}: {refused}")


def for_server(documents: list[dict[str, Any]], served: set[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """What a server with these API versions takes, and what it knows nothing of."""
    taken, unknown = [], []
    for document in documents:
        version = document["apiVersion"]
        if version not in served:
            version = OLDER.get(version, version)
        if version not in served:
            unknown.append(f"{document['apiVersion']} {document['kind']}")
            continue
        for field in UNKNOWN.get(version, ()):
            document.get("spec", {}).pop(field, None)
        taken.append({**document, "apiVersion": version})
    return taken, unknown


class ModelServers:
    """The Deployment `model-server` in a tenant's namespace, and pods that release to it and call it."""

    def __init__(self, tenant: Tenant, overlay: str) -> None:
        self.tenant = tenant
        self.image = os.environ.get("TRAINYARD_TEST_SERVING_IMAGE") or "trainyard-serving:0.1.0"
        served = set(tenant.cluster.kubectl("api-versions").split())
        self.documents, self.unknown = for_server(render(SERVING / overlay), served)
        for document in self.documents:
            if document["kind"] == "Deployment":
                (container,) = document["spec"]["template"]["spec"]["containers"]
                container["image"] = self.image
                # Room for a third replica on small machines; what is tested is not how fast it is.
                container["resources"] = {
                    "requests": {"cpu": "100m", "memory": "1Gi"},
                    "limits": {"memory": "2Gi"},
                }
                document["spec"]["template"]["spec"]["securityContext"]["fsGroup"] = tenant.group

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """kubectl in the tenant's namespace."""
        return self.tenant.cluster.kubectl("--namespace", self.tenant.name, *arguments, stdin=stdin)

    def apply(self) -> None:
        """Make all of it, and a pod for releases; the config file first, without which no server starts."""
        config = self.tenant.folder / "serving" / "models.config"
        config.parent.mkdir(exist_ok=True)
        config.parent.chmod(0o2775)
        config.write_text("model_config_list {}\n")
        config.chmod(0o664)
        self._tools()
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(self.documents))
        self.start_pod("releases", ["sleep", "infinity"])
        wait_for("the pod for releases runs", lambda: self.phase("releases") == "Running")

    def remove(self) -> None:
        """Delete it; returns when all is gone."""
        for pod in ("releases", "caller"):
            self.kubectl("delete", "pod", pod, "--ignore-not-found", "--grace-period=1")
        self.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(self.documents))
        wait_for("the servers are gone", lambda: not self.tenant.pods())

    def _tools(self) -> None:
        folder = self.tenant.folder / "tools"
        shutil.copytree(TOOLS, folder, dirs_exist_ok=True)
        calls = folder / "calls"
        calls.mkdir(exist_ok=True)
        calls.chmod(0o2777)

    def start_pod(self, name: str, command: list[str]) -> None:
        """A pod of the serving image that may call the servers, with the storage root; restricted as all are."""
        environment = {
            "TRAINYARD_STORAGE": STORAGE,
            "TRAINYARD_MODEL_SERVER": f"dns:///model-server-replicas.{self.tenant.name}.svc:8500",
            "TRAINYARD_MODEL_CONFIG": f"{STORAGE}/serving/models.config",
        }
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": CALLER},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 10001,
                    "runAsGroup": self.tenant.group,
                    "fsGroup": self.tenant.group,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "base",
                        "image": self.image,
                        "command": command,
                        "env": [{"name": key, "value": value} for key, value in environment.items()],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "resources": {
                            "requests": {"cpu": "50m", "memory": "256Mi"},
                            "limits": {"memory": "1Gi"},
                        },
                        "volumeMounts": [
                            {"name": "storage", "mountPath": STORAGE},
                            {"name": "tmp", "mountPath": "/tmp"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "storage", "persistentVolumeClaim": {"claimName": self.tenant.claim}},
                    {"name": "tmp", "emptyDir": {}},
                ],
            },
        }
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def phase(self, pod: str) -> str:
        """A pod's phase."""
        return str(self.tenant.api.read_namespaced_pod(pod, self.tenant.name).status.phase)

    def step(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One step of a release, by the pod for releases; AssertionError with what it said."""
        command = ["python", f"{STORAGE}/tools/release.py", name, json.dumps(arguments)]
        return dict(json.loads(self.kubectl("exec", "releases", "--", *command)))

    def replicas(self) -> list[Any]:
        """The servers' pods that are not on their way out."""
        pods = self.tenant.pods("app.kubernetes.io/name=model-server")
        return [pod for pod in pods if pod.metadata.deletion_timestamp is None]

    def ready(self) -> list[str]:
        """Names of those that are Ready."""
        return [pod.metadata.name for pod in self.replicas() if _condition(pod, "Ready")]

    def refused_probes(self) -> dict[str, str]:
        """Pod -> what its readiness probe was last refused with."""
        events = self.tenant.api.list_namespaced_event(self.tenant.name, field_selector="reason=Unhealthy")
        return {
            event.involved_object.name: event.message
            for event in events.items
            if "Readiness" in event.message and "statuscode" in event.message
        }

    # ---- callers

    def start_caller(self, targets: list[str]) -> None:
        """A pod that asks each target ten times a second."""
        calls = f"{STORAGE}/tools/calls"
        self.start_pod("caller", ["python", f"{STORAGE}/tools/caller.py", calls, *targets])

    def calls(self) -> dict[str, Any]:
        """What the caller has so far, by target; {} before it has begun."""
        path = self.tenant.folder / "tools" / "calls" / "calls.json"
        return dict(json.loads(path.read_text())["callers"]) if path.exists() else {}

    def wait_for_answers(self, more: int, of: str = "") -> None:
        """Until every caller has so many answers more; with `of`, so many of the version that answers so."""

        def count() -> dict[str, int]:
            return {
                target: sum(n for answer, n in found["answered"].items() if not of or answer == of)
                for target, found in self.calls().items()
            }

        before = count()

        def enough() -> bool:
            now = count()
            return bool(now) and all(n >= before.get(target, 0) + more for target, n in now.items())

        wait_for(f"{more} answers more", enough)

    def stop_caller(self) -> dict[str, Any]:
        """End it; what it has."""
        (self.tenant.folder / "tools" / "calls" / "stop").touch()
        wait_for("the caller has ended", lambda: self.phase("caller") == "Succeeded")
        return self.calls()


def _condition(pod: Any, name: str) -> bool:
    return any(c.type == name and c.status == "True" for c in pod.status.conditions or ())
