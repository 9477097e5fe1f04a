"""A place where pods run, as the contract sees it: the official client, a namespace, and how patient to be."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from kubernetes import client
from kubernetes.client import ApiException

Result = TypeVar("Result")


@dataclasses.dataclass
class Place:
    """One namespace of a cluster or of the process kubelet. `patience` is in seconds, a guard against hanging."""

    api: client.CoreV1Api
    namespace: str
    patience: float
    image: str
    names: list[str] = dataclasses.field(default_factory=list)

    def pod(self, script: str, *, container: dict[str, Any] | None = None, labels=None, **spec: Any) -> str:
        """Create a pod of one container that runs a shell script; its name."""
        name = f"contract-{uuid.uuid4().hex[:8]}"
        self.create(name, script, container=container, labels=labels, **spec)
        return name

    def create(
        self, name: str, script: str, *, container: dict[str, Any] | None = None, labels=None, **spec: Any
    ) -> client.V1Pod:
        """The same with a given name; what the API answers."""
        base = {
            "name": "base",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
            **(container or {}),
        }
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {"restartPolicy": "Never", "containers": [base], **spec},
        }
        made = self.api.create_namespaced_pod(self.namespace, manifest)
        self.names.append(name)
        return made

    def read(self, name: str) -> client.V1Pod:
        """The pod as it is."""
        return self.api.read_namespaced_pod(name, self.namespace)

    def delete(self, name: str, grace: int | None = None) -> client.V1Pod:
        """Delete a pod, within its grace period or another; what the API answers."""
        options = {} if grace is None else {"grace_period_seconds": grace}
        return self.api.delete_namespaced_pod(name, self.namespace, **options)

    def until(self, what: Callable[[], Result | None], of: str = "it") -> Result:
        """What it gives once it gives something."""
        deadline = time.monotonic() + self.patience
        while True:
            found = what()
            if found:
                return found
            assert time.monotonic() < deadline, f"{of} did not happen: {self._state()}"
            time.sleep(0.1)

    def wait(self, name: str, *phases: str) -> client.V1Pod:
        """The pod once it is in one of these phases."""

        def there() -> client.V1Pod | None:
            pod = self.read(name)
            return pod if pod.status.phase in phases else None

        return self.until(there, f"{name} in {phases}")

    def wait_gone(self, name: str) -> None:
        """Wait until there is no such pod."""
        by_name = f"metadata.name={name}"
        self.until(
            lambda: not self.api.list_namespaced_pod(self.namespace, field_selector=by_name).items,
            f"the end of {name}",
        )

    def waiting(self, name: str, *reasons: str) -> client.V1ContainerStateWaiting:
        """The state of the pod's container once it waits for one of these reasons."""

        def there() -> client.V1ContainerStateWaiting | None:
            rows = self.read(name).status.container_statuses or []
            state = rows[0].state.waiting if rows else None
            return state if state and state.reason in reasons else None

        return self.until(there, f"{name} waiting for {reasons}")

    def log(self, name: str, **options: Any) -> str:
        """The log of a pod."""
        return self.api.read_namespaced_pod_log(
            name, self.namespace, _preload_content=False, **options
        ).data.decode()

    def events(self, name: str) -> list[client.CoreV1Event]:
        """The events of a pod, in the order of their first time."""
        found = self.api.list_namespaced_event(
            self.namespace, field_selector=f"involvedObject.name={name}"
        ).items
        return sorted(found, key=lambda e: e.first_timestamp or e.event_time)

    def clean_up(self) -> None:
        """Remove what was made, and wait for it."""
        names, self.names = self.names, []
        for name in names:
            try:
                self.delete(name, grace=0)
            except ApiException as e:
                if e.status != 404:
                    raise
        for name in names:
            self.wait_gone(name)

    def _state(self) -> dict[str, Any]:
        pods = self.api.list_namespaced_pod(self.namespace).items
        return {pod.metadata.name: pod.status for pod in pods if pod.metadata.name in self.names}


def terminated(pod: client.V1Pod) -> client.V1ContainerStateTerminated:
    """How the pod's container ended."""
    return pod.status.container_statuses[0].state.terminated
