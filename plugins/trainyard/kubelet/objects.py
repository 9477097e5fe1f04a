"""What the API server checks in every object: its kind, name, labels, and what an update may change."""

from __future__ import annotations

import base64
import copy
import re
import secrets
from collections.abc import Mapping
from typing import Any

from trainyard.kubelet.errors import bad_request, conflict, invalid
from trainyard.kubelet.quantity import parse_quantity
from trainyard.kubelet.resources import Resource

__all__ = [
    "LABEL",
    "LABEL_RULE",
    "RANDOM",
    "Causes",
    "check_meta",
    "check_object",
    "check_update",
    "json_type",
]

Causes = list[tuple[str, str]]

LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
LABEL_RULE = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character"
)
_QUALIFIED = re.compile(r"^([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]$")
_LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$")
_VALUE_RULE = (
    "a valid label must be an empty string or at most 63 alphanumeric characters, '-', '_' or '.', "
    "and must start and end with an alphanumeric character"
)
RANDOM = "bcdfghjklmnpqrstvwxz2456789"  # Kubernetes's own alphabet: no vowels, no bad words


def check_meta(resource: Resource, obj: Any, namespace: str | None) -> dict[str, Any]:
    """A copy of a new manifest with its kind, namespace and (maybe generated) name set; 400 or 422 if it is bad."""
    if not isinstance(obj, dict):
        raise bad_request("the body of the request must be a JSON object")
    obj = copy.deepcopy(obj)
    for field, want in (("kind", resource.kind), ("apiVersion", resource.api)):
        if obj.setdefault(field, want) != want:
            raise bad_request(
                f"the {field} of the manifest must be {want} at this address, got {obj[field]!r}"
            )
    meta = obj.setdefault("metadata", {})
    if not isinstance(meta, dict):
        raise bad_request("metadata must be an object")
    if resource.namespaced:
        if meta.setdefault("namespace", namespace) != namespace:
            raise bad_request(
                f"the namespace of the provided object does not match the namespace sent on the request: "
                f"{meta['namespace']!r} and {namespace!r}"
            )
    else:
        meta.pop("namespace", None)
    if not meta.get("name") and meta.get("generateName"):
        stem = str(meta["generateName"])[:58]
        meta["name"] = stem + "".join(secrets.choice(RANDOM) for _ in range(5))
    causes: Causes = []
    _check_name(meta, causes)
    for field in ("labels", "annotations"):
        _check_map(meta, field, causes)
    if causes:
        raise invalid(resource.kind, str(meta.get("name") or meta.get("generateName") or ""), causes)
    return obj


def _check_name(meta: Mapping[str, Any], causes: Causes) -> None:
    name = meta.get("name")
    if not name:
        causes.append(("metadata.name", "Required value: name or generateName is required"))
    elif not isinstance(name, str) or len(name) > 253 or not _SUBDOMAIN.match(name):
        causes.append(("metadata.name", f'Invalid value: "{name}": {_SUBDOMAIN_RULE}'))


def _check_map(meta: Mapping[str, Any], field: str, causes: Causes) -> None:
    rows = meta.get(field)
    if rows is None:
        return
    if not isinstance(rows, dict):
        raise bad_request(f"metadata.{field} must be an object")
    for key, value in rows.items():
        if not isinstance(value, str):
            raise bad_request(
                f"json: cannot unmarshal {json_type(value)} into Go struct field ObjectMeta.metadata.{field} "
                f"of type string: the value of {key!r} must be a string"
            )
        prefix, _, last = key.rpartition("/")
        if not _QUALIFIED.match(last) or (prefix and not _SUBDOMAIN.match(prefix.lower())):
            causes.append(
                (f"metadata.{field}", f'Invalid value: "{key}": a key must be "name" or "prefix/name"')
            )
        if field == "labels" and not _LABEL_VALUE.match(value):
            causes.append(("metadata.labels", f'Invalid value: "{value}": {_VALUE_RULE}'))


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return {dict: "object", list: "array", type(None): "null"}.get(type(value), "string")


def check_object(resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
    """The checks and defaults of the kinds that are only kept."""
    name = obj["metadata"]["name"]
    if resource.plural == "secrets" and "stringData" in obj:
        data = obj.setdefault("data", {})
        for key, value in (obj.pop("stringData") or {}).items():
            data[key] = base64.b64encode(str(value).encode()).decode()
    if resource.plural == "secrets":
        obj.setdefault("type", "Opaque")
    elif resource.plural == "namespaces":
        obj["status"] = {"phase": "Active"}
    elif resource.plural == "services":
        spec = obj.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        if not spec.get("ports") and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
            raise invalid("Service", name, [("spec.ports", "Required value")])
        spec.setdefault("clusterIP", "127.0.0.1")
        obj["status"] = {"loadBalancer": {}}
    elif resource.plural == "resourcequotas":
        for key, value in ((obj.get("spec") or {}).get("hard") or {}).items():
            try:
                parse_quantity(value)
            except ValueError as e:
                raise bad_request(f"spec.hard[{key}]: {e}") from e
    elif resource.plural == "persistentvolumeclaims":
        spec = obj.setdefault("spec", {})
        if not spec.get("accessModes"):
            raise invalid("PersistentVolumeClaim", name, [("spec.accessModes", "Required value")])
        capacity = (spec.get("resources") or {}).get("requests") or {}
        obj["status"] = {"phase": "Bound", "accessModes": spec["accessModes"], "capacity": capacity}
    return obj


def check_update(resource: Resource, before: Mapping[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """An updated object with its identity kept; 409 when it is built on an older version, 422 when it is bad."""
    meta, old = after.setdefault("metadata", {}), before["metadata"]
    seen = meta.get("resourceVersion")
    if seen and seen != old["resourceVersion"]:
        why = "the object has been modified; please apply your changes to the latest version and try again"
        raise conflict(resource.plural, old["name"], why)
    for field in ("name", "namespace", "uid"):
        if field in old and meta.setdefault(field, old[field]) != old[field]:
            raise invalid(
                resource.kind, old["name"], [(f"metadata.{field}", "Invalid value: field is immutable")]
            )
    for field in (
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ):
        meta.pop(field, None)
        if field in old:
            meta[field] = old[field]
    after.setdefault("kind", resource.kind)
    after.setdefault("apiVersion", resource.api)
    causes: Causes = []
    for field in ("labels", "annotations"):
        _check_map(meta, field, causes)
    if causes:
        raise invalid(resource.kind, old["name"], causes)
    return after
