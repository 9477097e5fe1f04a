"""What the API server checks and fills in before it takes a pod.

A manifest that a cluster refuses must be refused here too, or it would fail only there. Not the whole schema is
checked, but what pipelines get wrong: containers, env, mounts, quantities.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainyard.kubelet.errors import bad_request, invalid
from trainyard.kubelet.objects import LABEL, LABEL_RULE, Causes, json_type
from trainyard.kubelet.quantity import parse_quantity
from trainyard.kubelet.volumes import VOLUME_TYPES

__all__ = ["DEFAULT_TERMINATION_LOG", "check_pod", "check_pod_update", "with_pod_defaults"]

DEFAULT_TERMINATION_LOG = "/dev/termination-log"

_ENV_NAME = re.compile(r"^[ -<>-~]+$")  # printable ASCII but "=", the rule since Kubernetes 1.32


def with_pod_defaults(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod with what the API server fills in; call after `check_pod`."""
    spec = pod["spec"]
    for field, value in (
        ("restartPolicy", "Always"),
        ("terminationGracePeriodSeconds", 30),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
        ("serviceAccountName", "default"),
        ("enableServiceLinks", True),
        ("securityContext", {}),
    ):
        if spec.get(field) is None:
            spec[field] = value
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        for field, value in (
            ("terminationMessagePath", DEFAULT_TERMINATION_LOG),
            ("terminationMessagePolicy", "File"),
            ("imagePullPolicy", "IfNotPresent"),
            ("resources", {}),
        ):
            if container.get(field) is None:
                container[field] = value
        limits = container["resources"].get("limits") or {}
        if limits:
            # A limit without a request is the request, as on a cluster.
            container["resources"]["requests"] = {**limits, **(container["resources"].get("requests") or {})}
    pod["status"] = {"phase": "Pending", "qosClass": _qos(spec["containers"])}
    return pod


def _qos(containers: list[dict[str, Any]]) -> str:
    rows = [container["resources"] for container in containers]
    if not any(row.get("requests") or row.get("limits") for row in rows):
        return "BestEffort"
    guaranteed = all(
        {"cpu", "memory"} <= set(row.get("limits") or {}) and row.get("requests") == row.get("limits")
        for row in rows
    )
    return "Guaranteed" if guaranteed else "Burstable"


def check_pod(pod: dict[str, Any]) -> None:
    """Raise 400 or 422 for a pod that a cluster would refuse, or that the process kubelet can't run."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        raise invalid("Pod", pod["metadata"]["name"], [("spec", "Required value")])
    causes: Causes = []
    containers = _rows(spec, "containers", "spec")
    if not containers:
        causes.append(("spec.containers", "Required value"))
    if spec.get("restartPolicy") not in (None, "Always", "OnFailure", "Never"):
        causes.append(
            (
                "spec.restartPolicy",
                f'Unsupported value: "{spec["restartPolicy"]}": supported values: "Always", "OnFailure", "Never"',
            )
        )
    for field, least in (("activeDeadlineSeconds", 1), ("terminationGracePeriodSeconds", 0)):
        value = spec.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            causes.append((f"spec.{field}", f"Invalid value: {value!r}: must be at least {least}"))
    for field in ("hostname", "subdomain"):
        if spec.get(field) and not LABEL.match(str(spec[field])):
            causes.append((f"spec.{field}", f'Invalid value: "{spec[field]}": {LABEL_RULE}'))
    chosen = spec.get("nodeSelector") or {}
    if not isinstance(chosen, dict) or not all(isinstance(value, str) for value in chosen.values()):
        raise bad_request(f"spec.nodeSelector must be an object of strings, got {chosen!r}")
    volumes = _check_volumes(spec, causes)
    names: set[str] = set()
    for field, rows in (
        ("spec.initContainers", _rows(spec, "initContainers", "spec")),
        ("spec.containers", containers),
    ):
        for i, container in enumerate(rows):
            _check_container(container, f"{field}[{i}]", volumes, names, causes)
    if causes:
        raise invalid("Pod", pod["metadata"]["name"], causes)


def _rows(parent: Mapping[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    rows = parent.get(field)
    if rows is None:
        return []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise bad_request(f"{where}.{field} must be a list of objects")
    return rows


def _check_volumes(spec: Mapping[str, Any], causes: Causes) -> set[str]:
    names: set[str] = set()
    for i, volume in enumerate(_rows(spec, "volumes", "spec")):
        where = f"spec.volumes[{i}]"
        name = str(volume.get("name") or "")
        if not name:
            causes.append((f"{where}.name", "Required value"))
        elif name in names:
            causes.append((f"{where}.name", f'Duplicate value: "{name}"'))
        names.add(name)
        claim = volume.get("persistentVolumeClaim")
        if claim is not None and not (isinstance(claim, dict) and claim.get("claimName")):
            causes.append((f"{where}.persistentVolumeClaim.claimName", "Required value"))
        host = volume.get("hostPath")
        if host is not None and not (isinstance(host, dict) and host.get("path")):
            causes.append((f"{where}.hostPath.path", "Required value"))
        kinds = [key for key in volume if key != "name" and volume[key] is not None]
        if len(kinds) > 1:
            causes.append((where, "Forbidden: may not specify more than 1 volume type"))
        elif kinds and kinds[0] not in VOLUME_TYPES:
            supported = ", ".join(VOLUME_TYPES)
            causes.append(
                (
                    where,
                    f'Unsupported value: "{kinds[0]}": the process kubelet has volumes of type {supported}',
                )
            )
    return names


def _check_container(
    container: Mapping[str, Any], where: str, volumes: set[str], names: set[str], causes: Causes
) -> None:
    name = str(container.get("name") or "")
    if not name:
        causes.append((f"{where}.name", "Required value"))
    elif not LABEL.match(name):
        causes.append((f"{where}.name", f'Invalid value: "{name}": {LABEL_RULE}'))
    elif name in names:
        causes.append((f"{where}.name", f'Duplicate value: "{name}"'))
    names.add(name)
    if not container.get("image"):
        causes.append((f"{where}.image", "Required value"))
    if container.get("restartPolicy"):
        causes.append(
            (
                f"{where}.restartPolicy",
                "Forbidden: sidecar containers are not supported by the process kubelet",
            )
        )
    for field in ("command", "args"):
        value = container.get(field)
        if value is not None and (
            not isinstance(value, list) or not all(isinstance(part, str) for part in value)
        ):
            raise bad_request(f"{where}.{field} must be a list of strings, got {value!r}")
    _check_env(container, where, causes)
    for i, mount in enumerate(_rows(container, "volumeMounts", where)):
        if mount.get("name") not in volumes:
            causes.append((f"{where}.volumeMounts[{i}].name", f'Not found: "{mount.get("name")}"'))
        if not mount.get("mountPath"):
            causes.append((f"{where}.volumeMounts[{i}].mountPath", "Required value"))
        sub = str(mount.get("subPath") or "")
        if sub.startswith("/") or ".." in sub.split("/"):
            causes.append(
                (f"{where}.volumeMounts[{i}].subPath", f'Invalid value: "{sub}": must not contain ".."')
            )
    _check_amounts(container, where, causes)


def _check_env(container: Mapping[str, Any], where: str, causes: Causes) -> None:
    for i, entry in enumerate(_rows(container, "env", where)):
        field = f"{where}.env[{i}]"
        name = entry.get("name")
        if not name:
            causes.append((f"{field}.name", "Required value"))
        elif not isinstance(name, str) or not _ENV_NAME.match(name):
            causes.append((f"{field}.name", f'Invalid value: "{name}": must be printable and hold no "="'))
        value = entry.get("value")
        if value is not None and not isinstance(value, str):
            raise bad_request(
                f"json: cannot unmarshal {json_type(value)} into Go struct field EnvVar.{field}.value "
                f"of type string: the value of {name!r} must be a string, got {value!r}"
            )
        if value and entry.get("valueFrom"):
            causes.append(
                (f"{field}.valueFrom", "Invalid value: may not be specified when `value` is not empty")
            )
    _rows(container, "envFrom", where)


def _check_amounts(container: Mapping[str, Any], where: str, causes: Causes) -> None:
    amounts: dict[str, dict[str, Any]] = {}
    for part in ("limits", "requests"):
        rows = (container.get("resources") or {}).get(part) or {}
        amounts[part] = {}
        for key, value in rows.items():
            try:
                amounts[part][key] = parse_quantity(value)
            except ValueError as e:
                raise bad_request(f"{where}.resources.{part}[{key}]: {e}") from e
            if amounts[part][key] < 0:
                causes.append(
                    (
                        f"{where}.resources.{part}[{key}]",
                        f'Invalid value: "{value}": must be greater than or equal to 0',
                    )
                )
    for key, value in amounts["requests"].items():
        if key in amounts["limits"] and value > amounts["limits"][key]:
            causes.append(
                (
                    f"{where}.resources.requests",
                    f'Invalid value: "{value}": must be less than or equal to {key} limit of '
                    f"{amounts['limits'][key]}",
                )
            )


# What may change in the spec of a pod that exists; the rest is decided at its creation.
_MUTABLE = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations")


def check_pod_update(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """422 when an update changes what can't be changed in a pod."""

    def fixed(pod: Mapping[str, Any]) -> dict[str, Any]:
        spec = {key: value for key, value in (pod.get("spec") or {}).items() if key not in _MUTABLE}
        for field in ("containers", "initContainers"):
            if field in spec:
                spec[field] = [
                    {key: value for key, value in row.items() if key != "image"} for row in spec[field]
                ]
        return spec

    if fixed(before) != fixed(after):
        message = f"Forbidden: pod updates may not change fields other than image and {', '.join(_MUTABLE)}"
        raise invalid("Pod", before["metadata"]["name"], [("spec", message)])
