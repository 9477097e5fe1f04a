"""What every pod of ours has unless its author says otherwise: no rights that it doesn't need, room to write.

Together with the operator's own settings a pod meets the `restricted` level of Kubernetes' Pod Security Standards
(https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted), and beyond it has a root file
system that can't be written and no token of a service account.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.checks import check
from trainers.job.errors import InvalidSpec
from trainers.job.pod_overlay import BASE, merge_pod_overlays

if TYPE_CHECKING:
    from kubernetes.client import V1Pod, V1PodSecurityContext, V1SecurityContext, V1Volume, V1VolumeMount

__all__ = ["container_security", "merged_over", "overlay_of", "pod_security", "scratch"]

_SCRATCH = "trainyard-scratch"
_SAYS = "FallbackToLogsOnError"
_POD: Mapping[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def overlay_of(field: str, value: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """An overlay, or that of a pod template file: YAML with one Pod or a part of one.

    Raises InvalidSpec for a file that can't be read or is no mapping.
    """
    if not isinstance(value, str):
        return value
    import yaml

    try:
        found = yaml.safe_load(Path(value).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise InvalidSpec(field, "be a pod template file that can be read", value, hint=str(e)) from e
    check(isinstance(found, Mapping), field, "be a file with one Pod", value)
    check(found.get("kind", "Pod") == "Pod", field, "be a file with a Pod", found.get("kind"))
    return {name: part for name, part in found.items() if name not in ("apiVersion", "kind")}


def pod_security(said: Mapping[str, Any], fs_group: int | None) -> V1PodSecurityContext:
    """The pod's security context; `said` is the spec of an overlay, `fs_group` owns what is mounted."""
    group = {} if fs_group is None else {"fsGroup": fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return _pod_of(
        {"securityContext": {**_POD, **group, **said.get("securityContext", {})}}
    ).spec.security_context


def container_security(said: Mapping[str, Any]) -> V1SecurityContext:
    """The security context of our container; `said` is what an overlay says of that container."""
    wanted = merge_pod_overlays(_CONTAINER, said.get("securityContext", {}))
    return (
        _pod_of({"containers": [{"name": BASE, "securityContext": wanted}]})
        .spec.containers[0]
        .security_context
    )


def scratch(path: str) -> tuple[V1Volume, V1VolumeMount]:
    """A volume that lives as long as the pod, to be written at `path`."""
    from kubernetes.client import V1EmptyDirVolumeSource, V1Volume, V1VolumeMount

    volume = V1Volume(name=_SCRATCH, empty_dir=V1EmptyDirVolumeSource())
    return volume, V1VolumeMount(name=_SCRATCH, mount_path=path)


def merged_over(pod: V1Pod | None, overlay: Mapping[str, Any]) -> V1Pod:
    """A base for the provider's merge: `overlay` upon `pod`, our container first, as containers are told by place."""
    from kubernetes.client import ApiClient

    known = {} if pod is None else ApiClient().sanitize_for_serialization(pod)
    merged = merge_pod_overlays(known, overlay)
    spec = dict(merged.get("spec", {}))
    rows = sorted(spec.get("containers", ()), key=lambda row: row["name"] != BASE)
    if not rows or rows[0]["name"] != BASE:
        rows = [{"name": BASE}, *rows]
    # An init container that fails says why in the pod's status: its last lines, where it leaves no message.
    first = [{"terminationMessagePolicy": _SAYS, **row} for row in spec.get("initContainers", ())]
    known = {"initContainers": first} if first else {}
    return _pod_of({**spec, "containers": rows, **known}, merged.get("metadata"))


def _pod_of(spec: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> V1Pod:
    from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator

    return PodGenerator.deserialize_model_dict(
        {"metadata": dict(metadata or {}), "spec": {"containers": [{"name": BASE}], **spec}}
    )
