"""The kubeconfig that clients find the process kubelet by."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["write_kubeconfig"]


def write_kubeconfig(path: Path, url: str, token: str, namespace: str) -> None:
    """Write a kubeconfig with the token, readable by this user only; JSON, which YAML parsers read."""
    name = "trainyard-process-kubelet"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": url}}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        "current-context": name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            json.dump(config, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
