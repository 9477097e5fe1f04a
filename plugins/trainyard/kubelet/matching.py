"""Label and field selectors: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#api."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.kubelet.errors import bad_request
from trainyard.kubelet.resources import Resource

__all__ = ["Matcher", "field_selector", "label_selector", "node_selector"]

Matcher = Callable[[Mapping[str, Any]], bool]

_KEY = r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?"
_SET = re.compile(rf"^\s*(?P<key>{_KEY})\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)\s*$")
_EQUAL = re.compile(rf"^\s*(?P<key>{_KEY})\s*(?P<op>==|=|!=)\s*(?P<value>{_VALUE})\s*$")
_EXISTS = re.compile(rf"^\s*(?P<not>!)?\s*(?P<key>{_KEY})\s*$")
_COMMA = re.compile(r",(?![^()]*\))")  # not one between parentheses


def label_selector(text: str | None) -> Matcher:
    """A test of an object's labels; understands =, ==, !=, in, notin, key, !key, all joined by commas.

    As on a cluster, `!=` and `notin` also choose objects without the key.
    """
    if not text or not text.strip():
        return lambda obj: True
    tests = [_label_requirement(part) for part in _COMMA.split(text)]

    def matches(obj: Mapping[str, Any]) -> bool:
        labels = obj.get("metadata", {}).get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def _label_requirement(text: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(text):
        key, wanted = found["key"], {value.strip() for value in found["values"].split(",")}
        if found["op"] == "in":
            return lambda labels: labels.get(key) in wanted
        return lambda labels: labels.get(key) not in wanted
    if found := _EQUAL.match(text):
        key, value = found["key"], found["value"]
        if found["op"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.match(text):
        key = found["key"]
        if found["not"]:
            return lambda labels: key not in labels
        return lambda labels: key in labels
    raise bad_request(f"unable to parse requirement: {text.strip()!r} is not a label selector")


def field_selector(resource: Resource, text: str | None) -> Matcher:
    """A test of an object's fields; =, == and != on the fields that the kind lets one select."""
    if not text or not text.strip():
        return lambda obj: True
    tests = [_field_requirement(resource, part.strip()) for part in text.split(",") if part.strip()]
    return lambda obj: all(test(obj) for test in tests)


def _field_requirement(resource: Resource, text: str) -> Matcher:
    found = re.match(r"^([A-Za-z.]+)(==|=|!=)(.*)$", text)
    if not found:
        raise bad_request(f"invalid selector: {text!r}; can't understand it")
    path, operator, value = found.groups()
    if path not in resource.selectable:
        raise bad_request(
            f"field label not supported: {path}; of {resource.plural} one can select "
            + ", ".join(resource.selectable)
        )
    keys = ("source", "component") if path == "source" else tuple(path.split("."))
    if operator == "!=":
        return lambda obj: _field(obj, keys) != value
    return lambda obj: _field(obj, keys) == value


def _field(obj: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    current: Any = obj
    for key in keys:
        current = current.get(key) if isinstance(current, Mapping) else None
    return "" if current is None else str(current)


def node_selector(wanted: Mapping[str, str] | None, labels: Mapping[str, str]) -> bool:
    """Whether a node of these labels satisfies a pod's `nodeSelector`."""
    return all(labels.get(key) == value for key, value in (wanted or {}).items())
