"""Where a cluster puts the pods of a gang, and in whose turn."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from trainers.job import labels
from trainers.job.checks import check

__all__ = ["KUEUE_QUEUE", "Placement"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

# https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/#running-a-group-of-pods-to-be-admitted-together
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
_KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-total-count"


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a gang's pods are placed.

    `queue` is a Kueue LocalQueue: Kueue then admits the gang as a whole, or lets it wait. `priority_class` names a
    PriorityClass. `nodes` is "spread" (replicas on different nodes as far as there are enough), "pack" (near each
    other as far as there is room) or "" (the scheduler's own mind); `topology_key` is the node label that says what
    is one place: a host, or a zone or rack.
    """

    queue: str = ""
    priority_class: str = ""
    nodes: str = ""
    topology_key: str = "kubernetes.io/hostname"

    def __post_init__(self) -> None:
        for name in ("queue", "priority_class"):
            value = getattr(self, name)
            ok = isinstance(value, str) and (not value or _NAME.fullmatch(value) is not None)
            check(ok, f"placement.{name}", "be the name of a Kubernetes object, or empty", value)
        check(self.nodes in ("", "spread", "pack"), "placement.nodes", "be spread, pack or empty", self.nodes)
        ok = isinstance(self.topology_key, str) and _KEY.fullmatch(self.topology_key) is not None
        check(ok, "placement.topology_key", "be a node label's name", self.topology_key)

    def labels(self, gang: str) -> dict[str, str]:
        """What each pod of a gang is labelled with besides."""
        return {KUEUE_QUEUE: self.queue, _KUEUE_GROUP: gang} if self.queue else {}

    def overlay(self, gang: str, replicas: int) -> dict[str, Any]:
        """The part of a Pod manifest that says it, {} where nothing is asked; see `trainers.job.pod_overlay`."""
        overlay: dict[str, Any] = {}
        spec: dict[str, Any] = {}
        if self.queue:
            # A replica's retry is a pod of the same group, which Kueue takes in place of the one that ended.
            overlay["metadata"] = {"annotations": {_KUEUE_TOTAL: str(replicas)}}
        if self.priority_class:
            spec["priorityClassName"] = self.priority_class
        same_gang: Mapping[str, Any] = {"matchLabels": {labels.LABEL_GANG: gang}}
        if self.nodes == "spread":
            # Hard rules would let a gang wait that has more replicas than there are nodes.
            spec["topologySpreadConstraints"] = [
                {
                    "maxSkew": 1,
                    "topologyKey": self.topology_key,
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": same_gang,
                }
            ]
        elif self.nodes == "pack":
            term = {"labelSelector": same_gang, "topologyKey": self.topology_key}
            near = [{"weight": 100, "podAffinityTerm": term}]
            spec["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": near}}
        if spec:
            overlay["spec"] = spec
        return overlay
