"""The share of a canary that is a Deployment of its own: weights of the Gateway API's routes.

    python -m serving.tfserving.weights --share 0.1             prints what would be done
    python -m serving.tfserving.weights --share 0.1 --apply     does it, by kubectl

deploy/kubernetes/serving/canary has the routes. Both are patched by kubectl as a whole list of backends, since a
merge of single weights is not possible in a list.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigInvalid, ServerFailed

__all__ = ["TOTAL", "Patch", "main", "plan_weights"]

TOTAL = 1000
_ROUTES = (("grpcroute", 8500), ("httproute", 8501))


@dataclass(frozen=True)
class Patch:
    """One change of a route: its kind, its name, and the JSON merge patch."""

    kind: str
    name: str
    patch: dict[str, Any]

    def command(self, namespace: str = "") -> list[str]:
        """kubectl's arguments."""
        where = ["--namespace", namespace] if namespace else []
        patch = json.dumps(self.patch, sort_keys=True)
        return ["kubectl", "patch", *where, self.kind, self.name, "--type=merge", f"--patch={patch}"]


def plan_weights(
    share: float,
    *,
    route: str = "model-server",
    stable: str = "model-server",
    canary: str = "model-server-canary",
) -> list[Patch]:
    """The patches that give a canary's Service a share (0 to 1) of a route's requests."""
    if not 0 <= share <= 1:
        raise ConfigInvalid(f"share must be from 0 to 1, got {share}")
    weight = round(share * TOTAL)
    return [
        Patch(
            kind,
            route,
            {
                "spec": {
                    "rules": [
                        {
                            "backendRefs": [
                                {"name": stable, "port": port, "weight": TOTAL - weight},
                                {"name": canary, "port": port, "weight": weight},
                            ]
                        }
                    ]
                }
            },
        )
        for kind, port in _ROUTES
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print or apply the patches; 1 when kubectl fails, with its words."""
    parser = argparse.ArgumentParser(
        "python -m serving.tfserving.weights", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--share", type=float, required=True, help="0 to 1; 0 takes the canary out")
    parser.add_argument("--route", default="model-server")
    parser.add_argument("--stable", default="model-server", help="the Service of what is served")
    parser.add_argument("--canary", default="model-server-canary", help="the Service of the canary")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--apply", action="store_true", help="run kubectl, rather than print its commands")
    given = parser.parse_args(argv)
    try:
        for patch in plan_weights(given.share, route=given.route, stable=given.stable, canary=given.canary):
            command = patch.command(given.namespace)
            if given.apply:
                _run(command)
            else:
                print(shlex.join(command))
    except (ConfigInvalid, ServerFailed) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ServerFailed(f"kubectl can't be run: {e}", hint="run the printed commands elsewhere") from e
    if done.returncode:
        raise ServerFailed(f"kubectl says: {done.stderr.strip()}")
    print(done.stdout.strip())


if __name__ == "__main__":
    sys.exit(main())
