"""Which pods may run now: the machine as the one node of a cluster.

What pods request is counted against what the node says it has, as a scheduler does; a pod that does not fit
waits as Pending and its condition and events say why, in the scheduler's own words.

CPU is counted against `CPU_OVERCOMMIT` times the machine's cores: on one machine a gang of processes shares the
cores and is slower, where on a cluster it would wait for nodes. Memory and GPUs are counted as they are.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import platform
import socket
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import psutil

from trainyard.kubelet.clock import timestamp
from trainyard.kubelet.matching import node_selector
from trainyard.kubelet.quantity import parse_quantity

__all__ = ["CPU_OVERCOMMIT", "GPU", "MAX_PODS", "NodeSpec", "Scheduler", "requests_of"]

CPU_OVERCOMMIT = 16
GPU = "nvidia.com/gpu"
MAX_PODS = 110
"""How many pods run at once unless it is told otherwise: Kubernetes's default for a node."""


@dataclasses.dataclass(frozen=True)
class NodeSpec:
    """The node: `cpu` in cores, `memory` in bytes, `gpus` in devices; labels for `nodeSelector`."""

    name: str
    cpu: int
    memory: int
    gpus: int = 0
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_pods: int = MAX_PODS

    def __post_init__(self) -> None:
        for field in ("cpu", "memory", "max_pods"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        if self.gpus < 0:
            raise ValueError(f"gpus must not be negative, got {self.gpus}")

    @classmethod
    def of_this_machine(
        cls, *, gpus: int = 0, labels: Mapping[str, str] | None = None, max_pods: int = MAX_PODS
    ) -> NodeSpec:
        """What this machine has; GPUs only if told, since finding them needs their driver."""
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        host = socket.gethostname()
        return cls(
            name="process-kubelet",
            cpu=os.cpu_count() or 1,
            memory=psutil.virtual_memory().total,
            gpus=gpus,
            max_pods=max_pods,
            labels={
                "kubernetes.io/hostname": host[:63].strip("-.") or "localhost",
                "kubernetes.io/os": platform.system().lower(),
                "kubernetes.io/arch": machine,
                "node.kubernetes.io/instance-type": "process-kubelet",
                **(labels or {}),
            },
        )

    @property
    def capacity(self) -> dict[str, str]:
        """What there is, as the node's status says it."""
        rows = {"cpu": str(self.cpu), "memory": f"{self.memory // 1024}Ki", "pods": str(self.max_pods)}
        return {**rows, GPU: str(self.gpus)} if self.gpus else rows

    @property
    def allocatable(self) -> dict[str, str]:
        """What pods may request; more CPU than there is, see `CPU_OVERCOMMIT`."""
        return {**self.capacity, "cpu": str(self.cpu * CPU_OVERCOMMIT)}

    def manifest(self, version: str) -> dict[str, Any]:
        """The Node object."""
        now = timestamp()
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        return {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {"name": self.name, "labels": dict(self.labels)},
            "spec": {},
            "status": {
                "capacity": self.capacity,
                "allocatable": self.allocatable,
                "conditions": [ready],
                "addresses": [
                    {"type": "InternalIP", "address": "127.0.0.1"},
                    {"type": "Hostname", "address": "localhost"},
                ],
                "nodeInfo": {
                    "kubeletVersion": version,
                    "kubeProxyVersion": version,
                    "operatingSystem": platform.system().lower(),
                    "architecture": self.labels.get("kubernetes.io/arch", platform.machine()),
                    "kernelVersion": platform.release(),
                    "osImage": platform.platform(),
                    "containerRuntimeVersion": "process://1",
                    "machineID": "",
                    "systemUUID": "",
                    "bootID": "",
                },
            },
        }


def requests_of(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """What a pod requests: the sum of its containers, or one init container's request if that is more."""
    total: dict[str, Decimal] = {}
    for container in pod["spec"]["containers"]:
        for key, value in (container["resources"].get("requests") or {}).items():
            total[key] = total.get(key, Decimal(0)) + parse_quantity(value)
    for container in pod["spec"].get("initContainers") or ():
        for key, value in (container["resources"].get("requests") or {}).items():
            total[key] = max(total.get(key, Decimal(0)), parse_quantity(value))
    return {key: value for key, value in total.items() if value}


@dataclasses.dataclass
class _Waiting:
    pod: Mapping[str, Any]
    start: Callable[[tuple[int, ...]], None]
    refuse: Callable[[str], None]
    check: Callable[[], str | None]
    requests: Mapping[str, Decimal]
    said: str = ""


class Scheduler:
    """Lets pods start as long as their requests fit; those that wait are tried again in order of arrival."""

    def __init__(self, node: NodeSpec) -> None:
        self._node = node
        self._room = {key: parse_quantity(value) for key, value in node.allocatable.items()}
        self._lock = threading.RLock()
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, tuple[Mapping[str, Decimal], tuple[int, ...]]] = {}
        self._used: collections.defaultdict[str, Decimal] = collections.defaultdict(Decimal)

    def submit(
        self,
        pod: Mapping[str, Any],
        *,
        start: Callable[[tuple[int, ...]], None],
        refuse: Callable[[str], None],
        check: Callable[[], str | None],
    ) -> None:
        """Ask for room. `start(gpu indexes)` is called once there is; `refuse(reason)` when there is none yet,
        once for each new reason; `check()` may name one more thing that is missing."""
        with self._lock:
            waiting = _Waiting(pod, start, refuse, check, requests_of(pod))
            self._waiting[pod["metadata"]["uid"]] = waiting
        self.retry()

    def cancel(self, uid: str) -> bool:
        """Forget a pod that waits; False when it does not wait (any more)."""
        with self._lock:
            return self._waiting.pop(uid, None) is not None

    def release(self, uid: str) -> None:
        """The pod of that uid is over: others may have its room."""
        with self._lock:
            requests, _ = self._running.pop(uid, ({}, ()))
            self._count(requests, -1)
        self.retry()

    def retry(self) -> None:
        """Look again at all that wait: there may be more room, or a claim that was missing."""
        with self._lock:
            for uid, waiting in list(self._waiting.items()):
                reason = self._why_not(waiting)
                if reason is None:
                    del self._waiting[uid]
                    gpus = self._take_gpus(waiting.requests)
                    self._running[uid] = (waiting.requests, gpus)
                    self._count(waiting.requests, 1)
                    waiting.start(gpus)
                elif reason != waiting.said:
                    waiting.said = reason
                    waiting.refuse(reason)

    def _why_not(self, waiting: _Waiting) -> str | None:
        pod = waiting.pod
        head = "0/1 nodes are available"
        wanted_node = pod["spec"].get("nodeName")
        if wanted_node and wanted_node != self._node.name:
            return f'{head}: 1 node(s) didn\'t match the requested node name "{wanted_node}".'
        if not node_selector(pod["spec"].get("nodeSelector"), self._node.labels):
            return f"{head}: 1 node(s) didn't match Pod's node affinity/selector."
        if missing := waiting.check():
            return f"{head}: {missing}."
        if len(self._running) >= self._node.max_pods:
            return f"{head}: 1 Too many pods."
        short = [
            f"1 Insufficient {key}"
            for key, value in sorted(waiting.requests.items())
            if value > self._room.get(key, Decimal(0)) - self._used[key]
        ]
        return f"{head}: {', '.join(short)}." if short else None

    def _count(self, requests: Mapping[str, Decimal], sign: int) -> None:
        for key, value in requests.items():
            self._used[key] += sign * value

    def _take_gpus(self, requests: Mapping[str, Decimal]) -> tuple[int, ...]:
        count = int(requests.get(GPU, 0))
        taken = {index for _, gpus in self._running.values() for index in gpus}
        return tuple(index for index in range(self._node.gpus) if index not in taken)[:count]
