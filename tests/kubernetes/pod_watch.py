"""What a namespace's pods look like while they live: every pod that was ever there, by its newest state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.kubernetes.real_cluster import Tenant

__all__ = ["PodWatch"]

# What a process may do, as its kernel says, and what it sees of the cluster; one `name: value` a line.
LOOK_INSIDE = """
sed -n 's/^\\(Uid\\|Gid\\|CapEff\\|CapBnd\\|NoNewPrivs\\|Seccomp\\):\\t\\([0-9a-f]*\\).*/\\1: \\2/p' /proc/1/status
(: > /opt/e2e) 2>/dev/null && echo 'Root: writable' || echo 'Root: read-only'
(: > "${TMPDIR:-/tmp}/e2e") 2>/dev/null && echo 'Scratch: writable' || echo 'Scratch: read-only'
[ -e /var/run/secrets/kubernetes.io/serviceaccount/token ] && echo 'Token: there' || echo 'Token: none'
"""


class PodWatch:
    """Watches a namespace's pods as long as the block lasts.

    `pods` are manifests by name, as last seen alive or ended; `inside` is what `LOOK_INSIDE` said in a running pod of
    a role, by role, and `problems` why there was no answer.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.pods: dict[str, Mapping[str, Any]] = {}
        self.inside: dict[str, dict[str, str]] = {}
        self.problems: dict[str, str] = {}
        self._tenant = tenant
        # A client of its own: the watch holds a connection, in a thread of its own.
        self._connection = config.new_client_from_config(str(tenant.cluster.kubeconfig))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PodWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()

    def _watch(self) -> None:
        core = client.CoreV1Api(self._connection)
        while not self._over.is_set():
            try:
                for event in watch.Watch().stream(
                    core.list_namespaced_pod, self._tenant.name, timeout_seconds=5
                ):
                    if event["type"] in ("ADDED", "MODIFIED"):
                        pod = event["raw_object"]
                        self.pods[pod["metadata"]["name"]] = pod
            except (ApiException, HTTPError):
                self._over.wait(1)  # it is taken up again

    def look_inside(self, role: str) -> None:
        """Look into a running pod of a role, once; `meanwhile` of a run may call it again and again."""
        if role in self.inside:
            return
        for pod in list(self.pods.values()):
            meta, status = pod["metadata"], pod["status"]
            if meta.get("labels", {}).get("trainyard.io/role") == role and status.get("phase") == "Running":
                command = ("exec", "-n", self._tenant.name, meta["name"], "-c", "base", "--", "sh", "-c")
                try:
                    said = self._tenant.cluster.kubectl(*command, LOOK_INSIDE)
                except AssertionError as e:
                    # It may just have ended, which the cluster says a moment later.
                    self.problems[role] = str(e)
                    return
                self.inside[role] = dict(line.split(": ", 1) for line in said.splitlines())
                return

    def where(self, suits: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
        """The pods that suit."""
        return [pod for pod in self.pods.values() if suits(pod)]
