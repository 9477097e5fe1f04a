"""What the process kubelet says it is."""

from __future__ import annotations

import platform

__all__ = ["GIT_VERSION", "version_info"]

# The part after "+" is how the platform recognises a process kubelet.
GIT_VERSION = "v1.31.0+trainyard-process-kubelet"


def version_info() -> dict[str, str]:
    """The answer of /version."""
    return {
        "major": "1",
        "minor": "31",
        "gitVersion": GIT_VERSION,
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": f"{platform.system().lower()}/{platform.machine()}",
    }
