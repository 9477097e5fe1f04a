"""What the gang benchmark's pods run, in both DAGs and bare: nothing, until they are told to end.

Its settings come by the environment, as DAG files are parsed in Airflow's processes.

    GANG_BENCH_TOLD       the folder of the files that pods wait for
    GANG_BENCH_MOUNT      set: the folder is mounted from the pod's node
    GANG_BENCH_PIPES      set: the files are named pipes
    GANG_BENCH_IMAGE      any image with a shell
    GANG_BENCH_NAMESPACE  where the pods are
    GANG_BENCH_MEMORY     what each may use, a quantity: a thousand have to fit one machine
    GANG_BENCH_RETRIES    of each replica's task; Trainyard's own number if it is not set
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["CPU", "LABEL", "command", "manifest", "memory", "mounts", "setting"]

LABEL = "benchmark"
CPU = 0.01


def setting(name: str, default: str = "") -> str:
    """One of the settings above, by the end of its name."""
    return os.environ.get(f"GANG_BENCH_{name}", default)


def memory() -> str:
    """A pod's memory."""
    return setting("MEMORY", "32Mi")


def command(run: str, code: int = 0) -> list[str]:
    """Wait for the word to end, then end with `code`.

    A named pipe takes no CPU while a pod waits, which counts with a thousand of them on one machine. Other nodes
    see only that a file is there.
    """
    file = f"{setting('TOLD')}/{run}"
    wait = f"read word < {file}" if setting("PIPES") else f"until [ -e {file} ]; do sleep 1; done"
    return ["sh", "-c", f"{wait}; exit {code}"]


def mounts() -> dict[str, Any]:
    """A part of a Pod manifest that gives pods the folder, and a user that is not root."""
    if not setting("MOUNT"):
        return {}
    volume, mount = {"path": setting("TOLD")}, {"mountPath": setting("TOLD"), "readOnly": True}
    return {
        "spec": {
            "securityContext": {"runAsUser": 10001},
            "volumes": [{"name": "told", "hostPath": volume}],
            "containers": [{"name": "base", "volumeMounts": [{"name": "told", **mount}]}],
        }
    }


def manifest(run: str, index: int) -> dict[str, Any]:
    """A bare pod of the same kind."""
    spec = mounts().get("spec", {})
    base = {
        **spec.get("containers", [{}])[0],
        "name": "base",
        "image": setting("IMAGE"),
        "command": command(run),
        "resources": {"requests": {"cpu": str(CPU), "memory": memory()}, "limits": {"memory": memory()}},
    }
    return {
        "metadata": {"name": f"{run}-{index}", "labels": {LABEL: run}},
        "spec": {**spec, "restartPolicy": "Never", "containers": [base]},
    }
