"""The process kubelet: a loopback Kubernetes API that runs pods as processes of this machine.

It serves the part of the API that Airflow's KubernetesPodOperator and the official clients use to run pods, so
that one DAG runs on a laptop and on a cluster. It is for one machine: beyond that, Kubernetes is the engine.

    python -m trainyard.kubelet --root .kubelet        # prints its address and kubeconfig

In tests of your own, `FakeCluster` is one that lives as long as a `with` block:

    with FakeCluster() as cluster:
        cluster.core_v1().create_namespaced_pod("default", manifest)
        pod = cluster.wait_phase("my-pod", "Succeeded")

What differs from a cluster:
- No image is pulled: a container's command runs on this machine, with its Python (`environment`).
- Volumes are folders; mount paths in commands and variables are replaced by them (`volumes`).
- Memory limits are enforced by measuring, CPU limits are not enforced (`memory`, `scheduler`).
- No isolation: containers are processes of your user, and pods share the machine's network and its ports.
- SIGTERM goes to the whole process group of a container.
- Ignored: probes, lifecycle hooks, security contexts, affinity, tolerations, priorities, finalizers.
- No exec, attach or port-forward, no controllers (Deployments, garbage collection by owner) but that of Indexed Jobs.
- Each container has `TRAINYARD_TERMINATION_LOG`, the file that becomes its termination message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.kubelet.kubelet import KubeletInUse, ProcessKubelet
    from trainyard.kubelet.processes import ProcessHandle, ProcessStarter
    from trainyard.kubelet.testing import FakeCluster

__all__ = ["FakeCluster", "KubeletInUse", "ProcessHandle", "ProcessKubelet", "ProcessStarter", "main"]

_HOMES = {
    "FakeCluster": "testing",
    "KubeletInUse": "kubelet",
    "ProcessHandle": "processes",
    "ProcessKubelet": "kubelet",
    "ProcessStarter": "processes",
    "main": "__main__",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a DAG file that only asks for a name must not pay for a server.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
