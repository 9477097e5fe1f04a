"""Events: what happened to a pod, for people, under the reasons that Kubernetes uses."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from trainyard.kubelet.clock import epoch, micro_time, timestamp
from trainyard.kubelet.errors import ApiError
from trainyard.kubelet.resources import EVENTS
from trainyard.kubelet.store import Store

__all__ = ["EventRecorder"]

KEPT_FOR = 3600.0  # seconds, as on a cluster
KEPT_AT_MOST = 5000


class EventRecorder:
    """Writes events into the store; the same event again raises its count."""

    def __init__(self, store: Store, node: str) -> None:
        self._store = store
        self._node = node
        self._names: dict[tuple[str, ...], tuple[str, str]] = {}
        self._lock = threading.Lock()

    def normal(self, pod: Mapping[str, Any], reason: str, message: str, **more: str) -> None:
        """Something that was to happen. `container` or `component` may be named."""
        self._record(pod, "Normal", reason, message, **more)

    def warning(self, pod: Mapping[str, Any], reason: str, message: str, **more: str) -> None:
        """Something that went wrong."""
        self._record(pod, "Warning", reason, message, **more)

    def _record(
        self,
        pod: Mapping[str, Any],
        kind: str,
        reason: str,
        message: str,
        *,
        container: str = "",
        init: str = "",
        component: str = "kubelet",
    ) -> None:
        meta = pod["metadata"]
        path = f"spec.initContainers{{{init}}}" if init else f"spec.containers{{{container}}}"
        involved = {
            "kind": "Pod",
            "apiVersion": "v1",
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
            "resourceVersion": meta.get("resourceVersion", ""),
            **({"fieldPath": path} if init or container else {}),
        }
        key = (meta["uid"], kind, reason, message, involved.get("fieldPath", ""))
        now = timestamp()
        with self._lock:
            if key in self._names and self._count_up(key, now):
                return
            name = f"{meta['name'][:200]}.{time.time_ns():x}{secrets.token_hex(2)}"
            self._store.create(
                EVENTS,
                {
                    "kind": "Event",
                    "apiVersion": "v1",
                    "metadata": {"name": name, "namespace": meta["namespace"]},
                    "involvedObject": involved,
                    "reason": reason,
                    "message": message,
                    "type": kind,
                    "source": {"component": component, "host": self._node},
                    "firstTimestamp": now,
                    "lastTimestamp": now,
                    "eventTime": micro_time(),
                    "count": 1,
                    "reportingComponent": component,
                    "reportingInstance": self._node,
                },
            )
            self._names[key] = (meta["namespace"], name)
            self._forget_old()

    def _count_up(self, key: tuple[str, ...], now: str) -> bool:
        def again(event: dict[str, Any]) -> None:
            event["count"] += 1
            event["lastTimestamp"] = now

        try:
            self._store.update(EVENTS, *self._names[key], again)
        except ApiError:  # somebody deleted it: it is new again
            return False
        return True

    def _forget_old(self) -> None:
        # Insertion order is time order, so only the head of the dict has to be looked at.
        limit = time.time() - KEPT_FOR
        while self._names:
            key, (namespace, name) = next(iter(self._names.items()))
            event = self._store.find(EVENTS, namespace, name)
            if event is not None:
                if len(self._names) <= KEPT_AT_MOST and epoch(event["lastTimestamp"]) >= limit:
                    return
                self._store.delete(EVENTS, namespace, name)
            del self._names[key]
