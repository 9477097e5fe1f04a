"""The log of a pod's container: which run, from where, and the refusals when there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainyard.kubelet.clock import epoch
from trainyard.kubelet.errors import bad_request
from trainyard.kubelet.logs import read_log
from trainyard.kubelet.node import Node

if TYPE_CHECKING:
    from trainyard.kubelet.api import Request

__all__ = ["read"]


def read(node: Node, pod: Mapping[str, Any], request: Request) -> Iterator[bytes]:
    """The log that the request asks for; 400 when that container has none (yet)."""
    name = _container(pod, request.query.get("container"))
    attempt = _attempt(pod, name, previous=request.flag("previous"))
    path, live = node.log_of(pod, name, attempt)
    if not path.exists():
        raise bad_request(f'container "{name}" in pod "{pod["metadata"]["name"]}" has no log any more')
    return read_log(
        path,
        live,
        follow=request.flag("follow"),
        timestamps=request.flag("timestamps"),
        since=_since(request),
        tail_lines=_at_least(request, "tailLines", 0),
        limit=_at_least(request, "limitBytes", 1),
    )


def _container(pod: Mapping[str, Any], wanted: str | None) -> str:
    spec, name = pod["spec"], pod["metadata"]["name"]
    mains = [row["name"] for row in spec["containers"]]
    known = [*mains, *(row["name"] for row in spec.get("initContainers") or ())]
    if not wanted:
        if len(mains) == 1:
            return str(mains[0])
        raise bad_request(
            f"a container name must be specified for pod {name}, choose one of: [{' '.join(known)}]"
        )
    if wanted not in known:
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    return wanted


def _attempt(pod: Mapping[str, Any], container: str, *, previous: bool) -> int:
    status, name = pod["status"], pod["metadata"]["name"]
    rows = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    row = next((row for row in rows if row["name"] == container), None)
    if row is None or ("waiting" in row["state"] and not row["lastState"]):
        reason = row["state"]["waiting"]["reason"] if row else "ContainerCreating"
        if row is None and not status.get("startTime"):
            reason = "the pod is not scheduled"
        raise bad_request(f'container "{container}" in pod "{name}" is waiting to start: {reason}')
    # While it waits for a restart, what ran last is its log.
    attempt = int(row["restartCount"]) - int(previous)
    if attempt < 0:
        raise bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
    return attempt


def _since(request: Request) -> float | None:
    seconds, moment = _at_least(request, "sinceSeconds", 1), request.query.get("sinceTime")
    if seconds is not None and moment:
        raise bad_request("at most one of sinceTime or sinceSeconds may be specified")
    if seconds is not None:
        return time.time() - seconds
    if not moment:
        return None
    try:
        return epoch(moment)
    except ValueError as e:
        raise bad_request(f"sinceTime must be an RFC 3339 time, got {moment!r}") from e


def _at_least(request: Request, name: str, least: int) -> int | None:
    value = request.number(name)
    if value is not None and value < least:
        raise bad_request(f"{name} must be {least} or more, got {value}")
    return value
