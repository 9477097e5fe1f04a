"""The `restricted` level of Kubernetes' Pod Security Standards, rule by rule, over a Pod as a manifest.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ (baseline and restricted). A cluster checks the
same by its admission; this tells it without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["violations"]

_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.ping_group_range",
    }
)
_SECCOMP = ("RuntimeDefault", "Localhost")


def violations(pod: Mapping[str, Any]) -> list[str]:
    """What the `restricted` level would refuse, as "field: why" lines; [] for a pod that it takes."""
    spec = pod["spec"]
    return [*_pod_rules(spec), *(line for row in _containers(spec) for line in _container_rules(row, spec))]


def _containers(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = ("initContainers", "containers", "ephemeralContainers")
    return [row for group in groups for row in spec.get(group) or ()]


def _pod_rules(spec: Mapping[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name}: is true"
    for volume in spec.get("volumes") or ():
        kinds = set(volume) - {"name"}
        if not kinds <= _VOLUMES:
            yield f"volumes[{volume['name']}]: is a {', '.join(sorted(kinds - _VOLUMES))}"
    for sysctl in (spec.get("securityContext") or {}).get("sysctls") or ():
        if sysctl["name"] not in _SYSCTLS:
            yield f"sysctls: {sysctl['name']}"


def _container_rules(row: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[str]:
    shared, own = spec.get("securityContext") or {}, row.get("securityContext") or {}
    where = f"containers[{row['name']}]"

    def said(name: str) -> Any:
        return own[name] if own.get(name) is not None else shared.get(name)

    if own.get("privileged"):
        yield f"{where}: is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{where}: may escalate its privileges"
    if said("runAsNonRoot") is not True:
        yield f"{where}: may run as root"
    if said("runAsUser") == 0:
        yield f"{where}: runs as user 0"
    if (said("seccompProfile") or {}).get("type") not in _SECCOMP:
        yield f"{where}: has no seccomp profile"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{where}: does not drop all capabilities"
    if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield f"{where}: adds capabilities {capabilities['add']}"
    if own.get("procMount") not in (None, "Default"):
        yield f"{where}: mounts proc as {own['procMount']}"
    if any(port.get("hostPort") for port in row.get("ports") or ()):
        yield f"{where}: takes a port of its host"
