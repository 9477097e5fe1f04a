"""The kinds of objects that the process kubelet knows: where they live in the API, what can be selected.

Only pods and Jobs are acted upon. The others are stored, listed, watched and handed back, which is all that pipelines
and the pod's own references (claims, config maps, secrets) need on one machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["EVENTS", "JOBS", "NAMESPACES", "NODES", "PODS", "RESOURCES", "Resource", "discovery"]

_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclasses.dataclass(frozen=True)
class Resource:
    """One kind: its plural in URLs, its name in manifests, the fields a `fieldSelector` may name."""

    plural: str
    kind: str
    namespaced: bool = True
    short: str = ""
    fields: tuple[str, ...] = ()
    kept: bool = True  # on disk, over a restart of the kubelet
    api: str = "v1"

    def __post_init__(self) -> None:
        if self.plural != self.plural.lower():
            raise ValueError(f"plural must be lower case, got {self.plural!r}")

    @property
    def selectable(self) -> tuple[str, ...]:
        """All fields that may be selected."""
        return ("metadata.name", "metadata.namespace", *self.fields)


_POD_FIELDS = (
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
)
_EVENT_FIELDS = (
    *(
        f"involvedObject.{field}"
        for field in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
    ),
    "reason",
    "type",
    "source",
    "reportingComponent",
)
RESOURCES: dict[str, Resource] = {
    r.plural: r
    for r in (
        Resource("pods", "Pod", short="po", fields=_POD_FIELDS),
        # As on a cluster, events are hints for people and are forgotten.
        Resource("events", "Event", short="ev", fields=_EVENT_FIELDS, kept=False),
        Resource("services", "Service", short="svc"),
        Resource("configmaps", "ConfigMap", short="cm"),
        Resource("secrets", "Secret", fields=("type",)),
        Resource("persistentvolumeclaims", "PersistentVolumeClaim", short="pvc"),
        Resource("persistentvolumes", "PersistentVolume", namespaced=False, short="pv"),
        Resource("namespaces", "Namespace", namespaced=False, short="ns", fields=("status.phase",)),
        Resource("resourcequotas", "ResourceQuota", short="quota"),
        Resource("serviceaccounts", "ServiceAccount", short="sa"),
        Resource("jobs", "Job", fields=("status.successful",), api="batch/v1"),
        # Made anew at each start: the machine may have changed.
        Resource("nodes", "Node", namespaced=False, short="no", fields=("spec.unschedulable",), kept=False),
    )
}
PODS = RESOURCES["pods"]
EVENTS = RESOURCES["events"]
NAMESPACES = RESOURCES["namespaces"]
NODES = RESOURCES["nodes"]
JOBS = RESOURCES["jobs"]


def discovery(api: str = "v1") -> dict[str, Any]:
    """What `GET /api/v1` (or `/apis/batch/v1`) answers, so that kubectl finds the kinds."""
    rows = [
        {
            "name": r.plural,
            "singularName": r.kind.lower(),
            "namespaced": r.namespaced,
            "kind": r.kind,
            "verbs": list(_VERBS),
            **({"shortNames": [r.short]} if r.short else {}),
        }
        for r in RESOURCES.values()
        if r.api == api
    ]
    status = ["get", "patch", "update"]
    parts = {"v1": (("pods", "log", ["get"]), ("pods", "status", status))}.get(
        api, (("jobs", "status", status),)
    )
    for plural, name, verbs in parts:
        kind = RESOURCES[plural].kind
        rows.append(
            {"name": f"{plural}/{name}", "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        )
    if api == "v1":
        rows.append(
            {
                "name": "pods/eviction",
                "singularName": "",
                "namespaced": True,
                "group": "policy",
                "version": "v1",
                "kind": "Eviction",
                "verbs": ["create"],
            }
        )
    return {"kind": "APIResourceList", "groupVersion": api, "resources": rows}
