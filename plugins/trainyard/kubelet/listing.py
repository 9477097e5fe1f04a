"""Lists, page by page, and watches."""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from trainyard.kubelet.errors import ApiError, bad_request
from trainyard.kubelet.matching import Matcher, field_selector, label_selector
from trainyard.kubelet.resources import Resource
from trainyard.kubelet.store import Change, Store

__all__ = ["page", "watch"]

_HEARTBEAT = 2.0  # seconds of silence after which a watch says b"", so that a client that left is noticed
_LONGEST_WATCH = 3600.0


def _matcher(resource: Resource, query: Mapping[str, str]) -> Matcher:
    labels = label_selector(query.get("labelSelector"))
    fields = field_selector(resource, query.get("fieldSelector"))
    return lambda obj: labels(obj) and fields(obj)


def page(store: Store, resource: Resource, namespace: str | None, query: Mapping[str, str]) -> dict[str, Any]:
    """A list object with what the query selects; `limit` and `continue` cut it in pages."""
    matches = _matcher(resource, query)
    objects, version = store.list(resource, namespace)
    rows = [obj for obj in objects if matches(obj)]
    if query.get("continue"):
        after = _decode(query["continue"])
        rows = [obj for obj in rows if _place(obj) > after]
    meta: dict[str, Any] = {"resourceVersion": str(version)}
    limit = _whole(query, "limit")
    if limit and len(rows) > limit:
        meta["continue"] = base64.urlsafe_b64encode(json.dumps(_place(rows[limit - 1])).encode()).decode()
        meta["remainingItemCount"] = len(rows) - limit
        rows = rows[:limit]
    return {"kind": f"{resource.kind}List", "apiVersion": resource.api, "metadata": meta, "items": rows}


def _place(obj: Mapping[str, Any]) -> list[str]:
    return [obj["metadata"].get("namespace", ""), obj["metadata"]["name"]]


def _decode(token: str) -> list[str]:
    try:
        place = json.loads(base64.urlsafe_b64decode(token))
    except (ValueError, binascii.Error) as e:
        raise bad_request(f"continue key is not valid: {token!r}") from e
    if not isinstance(place, list) or not all(isinstance(part, str) for part in place):
        raise bad_request(f"continue key is not valid: {token!r}")
    return place


def _whole(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if not text:
        return None
    if not text.isdigit():
        raise bad_request(f"{name} must be a whole number of 0 or more, got {text!r}")
    return int(text)


def watch(
    store: Store, resource: Resource, namespace: str | None, query: Mapping[str, str]
) -> Iterator[bytes]:
    """The events of a watch, a JSON line each: first what there is, or from `resourceVersion` on what comes."""
    # Bad parameters are refused before anything is sent, so they are read here and not in the generator.
    matches = _matcher(resource, query)
    version = _whole(query, "resourceVersion") or 0
    seconds = _whole(query, "timeoutSeconds")
    return _events(store, resource, namespace, matches, version, float(seconds or _LONGEST_WATCH))


def _events(
    store: Store, resource: Resource, namespace: str | None, matches: Matcher, version: int, seconds: float
) -> Iterator[bytes]:
    deadline = time.monotonic() + seconds
    if version == 0:
        objects, version = store.list(resource, namespace)
        for obj in objects:
            if matches(obj):
                yield _line("ADDED", obj)
    while not store.closed:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        try:
            changes = store.changes(version, min(left, _HEARTBEAT))
        except ApiError as e:
            yield _line("ERROR", e.status())
            return
        if not changes:
            yield b""
        for change in changes:
            version = change.version
            if change.plural == resource.plural:
                kind = _seen_as(change, namespace, matches)
                if kind is not None:
                    yield _line(kind, change.object)


def _seen_as(change: Change, namespace: str | None, matches: Matcher) -> str | None:
    """What a change is for one who sees only what matches: an object that begins to match is ADDED."""
    if namespace is not None and change.object["metadata"].get("namespace") != namespace:
        return None
    before = change.before is not None and matches(change.before)
    after = change.type != "DELETED" and matches(change.object)
    if before and after:
        return "MODIFIED"
    if after:
        return "ADDED"
    return "DELETED" if before else None


def _line(kind: str, obj: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"
