"""A pod overlay: what a job's author adds to the pods that Trainyard makes, in the shape of a Pod manifest.

    {"metadata": {"annotations": {...}},
     "spec": {"serviceAccountName": "reader", "priorityClassName": "batch",
              "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
              "containers": [{"name": "base", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}]}}

Whatever a Pod may have can be said, but for what the gang stands on (names, addresses, labels, command, restart
policy), which is refused with the field's name. The container of ours is called `base`; others are sidecars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.job.checks import check, json_map, sequence

__all__ = ["BASE", "check_pod_overlay", "merge_pod_overlays"]

BASE = "base"
"""The container that runs the launcher or step."""

_OURS = "trainyard.io/"
_OUR_SPEC = ("hostname", "subdomain", "restartPolicy", "activeDeadlineSeconds")
_OUR_CONTAINER = ("command", "args", "image", "terminationMessagePath", "terminationMessagePolicy")
# What a list's rows are told apart by, where Kubernetes itself merges them by it.
_KEYS = {"volumeMounts": "mountPath", "hostAliases": "ip", "topologySpreadConstraints": "topologyKey"}
_SECRET_NAME = re.compile(r"(?i)(password|passwd|secret|token|api_?key|access_?key|private_?key)")


def check_pod_overlay(field: str, overlay: Any) -> Mapping[str, Any]:
    """A read-only copy of an overlay that may be; InvalidSpec names the part that may not."""
    found = json_map(field, overlay)
    _only(field, found, ("metadata", "spec"))
    metadata, spec = _object(field, found, "metadata"), _object(field, found, "spec")
    _only(f"{field}.metadata", metadata, ("labels", "annotations"))
    for label in _object(f"{field}.metadata", metadata, "labels"):
        check(not label.startswith(_OURS), f"{field}.metadata.labels", f"not begin with {_OURS}", label)
    for name in _OUR_SPEC:
        hint = "budgets.total is the deadline" if name == "activeDeadlineSeconds" else ""
        check(name not in spec, f"{field}.spec.{name}", "be left to the gang", spec.get(name), hint)
    for group in ("containers", "initContainers"):
        rows = sequence(f"{field}.spec.{group}", spec.get(group, ()))
        for row in rows:
            where = f"{field}.spec.{group}"
            check(isinstance(row, Mapping) and bool(row.get("name")), where, "have a name each", row)
            _check_container(
                f"{where}[{row['name']}]", row, ours=group == "containers" and row["name"] == BASE
            )
    return found


def _only(field: str, value: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(value) - set(known))
    check(not unknown, field, f"have no fields but {', '.join(known)}", unknown)


def _object(field: str, value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = value.get(name, {})
    check(isinstance(part, Mapping), f"{field}.{name}", "be an object", part)
    return part  # type: ignore[no-any-return]


def _check_container(field: str, row: Mapping[str, Any], *, ours: bool) -> None:
    for name in _OUR_CONTAINER if ours else ():
        check(name not in row, f"{field}.{name}", "be left to the role", row.get(name))
    for variable in sequence(f"{field}.env", row.get("env", ())):
        name = str(variable.get("name", "")) if isinstance(variable, Mapping) else ""
        check(bool(name), f"{field}.env", "be a list of {name, value or valueFrom}", variable)
        # A plan is printed and stored: what looks like a secret must come from a Secret.
        check(
            "value" not in variable or not _SECRET_NAME.search(name),
            f"{field}.env[{name}]",
            "come from a Secret (valueFrom.secretKeyRef), since plans are stored and shown",
            "a value",
        )


def merge_pod_overlays(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid upon `base`: objects by field, lists of named rows by name, other lists one after the other.

    >>> merge_pod_overlays({"spec": {"volumes": [{"name": "a"}]}}, {"spec": {"volumes": [{"name": "b"}]}})
    {'spec': {'volumes': [{'name': 'a'}, {'name': 'b'}]}}
    """
    merged = dict(base)
    for name, value in over.items():
        known = merged.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_pod_overlays(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            merged[name] = _merge_rows(known, value, _KEYS.get(name, "name"))
        else:
            merged[name] = value
    return merged


def _merge_rows(base: list[Any], over: list[Any], key: str) -> list[Any]:
    def name_of(row: Any) -> Any:
        return row.get(key) if isinstance(row, Mapping) else None

    merged = list(base)
    where = {name_of(row): i for i, row in enumerate(merged) if name_of(row) is not None}
    for row in over:
        at = where.get(name_of(row))
        if at is None:
            merged.append(row)
        else:
            merged[at] = merge_pod_overlays(merged[at], row)
    return merged
