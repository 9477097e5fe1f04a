"""FakeCluster: a cluster of one machine for tests, with real pods, logs, events and signals."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.kubelet.kubelet import ProcessKubelet
from trainyard.kubelet.resources import EVENTS, PODS

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, CoreV1Api

__all__ = ["FakeCluster", "pod_manifest"]


def pod_manifest(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    restart_policy: str = "Never",
    labels: Mapping[str, str] | None = None,
    container: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """The manifest of a pod with one container, "base"; `container` and `spec` add to or replace its fields."""
    base = {
        "name": "base",
        "image": "none",
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        **(container or {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {"restartPolicy": restart_policy, "containers": [base], **spec},
    }


class FakeCluster:
    """A process kubelet for the length of a `with` block, in a folder of its own that goes with it.

        with FakeCluster() as cluster:
            cluster.run(pod_manifest("hello", ["echo", "hello"]))
            assert cluster.wait_phase("hello", "Succeeded")
            assert cluster.log("hello") == "hello\\n"

    Takes the options of ProcessKubelet. `root` keeps the folder.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._temporary = None if root else Path(tempfile.mkdtemp(prefix="trainyard-kubelet-"))
        options.setdefault("shutdown_grace", 2.0)
        self.kubelet = ProcessKubelet(root or self._temporary or "", **options)
        self._client: ApiClient | None = None

    def __enter__(self) -> FakeCluster:
        self.kubelet.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._client is not None:
            self._client.close()
        self.kubelet.stop()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def url(self) -> str:
        """Where the API listens."""
        return self.kubelet.url

    @property
    def kubeconfig(self) -> str:
        """The path of the kubeconfig."""
        return str(self.kubelet.kubeconfig)

    @property
    def airflow_connection(self) -> str:
        """An Airflow connection to it, as JSON for an AIRFLOW_CONN_... variable."""
        extra = {"kube_config_path": self.kubeconfig, "namespace": self.kubelet.namespace}
        return json.dumps({"conn_type": "kubernetes", "extra": extra})

    def core_v1(self) -> CoreV1Api:
        """The official client."""
        from kubernetes import client, config

        if self._client is None:
            self._client = config.new_client_from_config(self.kubeconfig)
        return client.CoreV1Api(self._client)

    def run(self, manifest: dict[str, Any], namespace: str | None = None) -> dict[str, Any]:
        """Create a pod through the API; its object."""
        core = self.core_v1()
        made = core.create_namespaced_pod(namespace or self.kubelet.namespace, manifest)
        return core.api_client.sanitize_for_serialization(made)  # type: ignore[no-any-return]

    def pod(self, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """The pod as it is now, or None."""
        return self.kubelet.store.find(PODS, namespace or self.kubelet.namespace, name)

    def wait_phase(
        self, name: str, *phases: str, namespace: str | None = None, timeout: float = 30.0
    ) -> dict[str, Any]:
        """Wait until the pod is in one of the phases; its object. TimeoutError says where it stands."""
        return self.wait_until(
            name,
            lambda pod: pod["status"]["phase"] in phases,
            f"phase {' or '.join(phases)}",
            namespace=namespace,
            timeout=timeout,
        )

    def wait_gone(self, name: str, *, namespace: str | None = None, timeout: float = 30.0) -> None:
        """Wait until there is no pod of that name."""
        if not self.kubelet.store.wait(lambda: self.pod(name, namespace) is None, timeout):
            raise TimeoutError(f"pod {name} is still there after {timeout:g} s")

    def wait_until(
        self,
        name: str,
        done: Callable[[dict[str, Any]], bool],
        what: str,
        *,
        namespace: str | None = None,
        timeout: float = 30.0,
    ) -> dict[str, Any]:
        """Wait until there is such a pod and `done(pod)`; its object. `what` is for the TimeoutError."""
        found: list[dict[str, Any]] = []

        def reached() -> bool:
            pod = self.pod(name, namespace)
            if pod is not None and done(pod):
                found.append(pod)
            return bool(found)

        if not self.kubelet.store.wait(reached, timeout):
            pod = self.pod(name, namespace)
            status = json.dumps(pod["status"], indent=1) if pod else "there is no such pod"
            raise TimeoutError(f"pod {name} did not reach {what} within {timeout:g} s: {status}")
        return found[0]

    def log(self, name: str, namespace: str | None = None, **options: Any) -> str:
        """The log of a pod through the API, as text; options of `read_namespaced_pod_log`."""
        response = self.core_v1().read_namespaced_pod_log(
            name, namespace or self.kubelet.namespace, _preload_content=False, **options
        )
        return str(response.data.decode())

    def events(self, name: str, namespace: str | None = None) -> list[tuple[str, str]]:
        """(reason, message) of the pod's events, oldest first."""
        rows, _ = self.kubelet.store.list(EVENTS, namespace or self.kubelet.namespace)
        mine = [row for row in rows if row["involvedObject"]["name"] == name]
        mine.sort(key=lambda row: row["eventTime"])
        return [(row["reason"], row["message"]) for row in mine]
