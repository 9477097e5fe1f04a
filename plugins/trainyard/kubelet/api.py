"""The Kubernetes API as far as it is served: requests in, answers out; no sockets here.

Served are the objects of `resources`, with create, get, list, watch, replace, patch, delete, and the log and
eviction of pods. Jobs have a controller. A namespace comes into being with the first object in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from trainyard.kubelet import listing, podlog
from trainyard.kubelet.errors import ApiError, bad_request, wrong_uid
from trainyard.kubelet.job_manifest import check_job
from trainyard.kubelet.jobs import JobController
from trainyard.kubelet.machine import Machine
from trainyard.kubelet.node import Node
from trainyard.kubelet.objects import check_meta, check_object, check_update
from trainyard.kubelet.patching import apply_patch
from trainyard.kubelet.pod_manifest import check_pod, check_pod_update, with_pod_defaults
from trainyard.kubelet.quota import check_quota
from trainyard.kubelet.resources import JOBS, NAMESPACES, PODS, RESOURCES, Resource, discovery
from trainyard.kubelet.status import set_condition
from trainyard.kubelet.version import version_info

__all__ = ["Answer", "Api", "Request", "Stream"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One HTTP request, its token already checked."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""
    content_type: str = ""

    def flag(self, name: str) -> bool:
        """Whether a boolean query parameter is set."""
        return self.query.get(name, "").lower() in ("true", "1")

    def number(self, name: str) -> int | None:
        """A query parameter that is a whole number; 400 when it is something else."""
        text = self.query.get(name, "")
        if not text:
            return None
        try:
            return int(text)
        except ValueError as e:
            raise bad_request(f"{name} must be a whole number, got {text!r}") from e

    def json(self) -> Any:
        """The body; None when there is none, 400 when it is not JSON."""
        if not self.body.strip():
            return None
        try:
            return json.loads(self.body)
        except ValueError as e:
            raise bad_request(f"the body of the request is not JSON: {e}") from e

    @property
    def dry_run(self) -> bool:
        """Whether nothing must be changed."""
        return self.query.get("dryRun") == "All"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A JSON answer."""

    body: Any
    code: int = 200


@dataclasses.dataclass(frozen=True)
class Stream:
    """An answer that goes on; an empty chunk means that nothing came for a while."""

    chunks: Iterator[bytes]
    content_type: str


@dataclasses.dataclass(frozen=True)
class _Target:
    resource: Resource
    namespace: str | None
    name: str = ""
    subresource: str = ""


class Api:
    """Answers requests."""

    def __init__(self, machine: Machine, node: Node) -> None:
        self._machine = machine
        self._store = machine.store
        self._node = node
        self.jobs = JobController(machine, self.create_pod, node.delete)

    def handle(self, request: Request) -> Answer | Stream:
        """The answer; ApiError when it is a refusal."""
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        for api, head in (("v1", ["api", "v1"]), ("batch/v1", ["apis", "batch", "v1"])):
            if parts[: len(head)] == head and len(parts) > len(head):
                return self._object(request, _target(parts[len(head) :], request.path, api))
        if request.method == "GET":
            fixed = _fixed(parts)
            if fixed is not None:
                return fixed
        raise _unknown(request.path)

    def _object(self, request: Request, target: _Target) -> Answer | Stream:
        if target.subresource:
            return self._subresource(request, target)
        method = request.method
        if target.name:
            if method == "GET":
                return Answer(self._store.get(target.resource, target.namespace, target.name))
            if method in ("PUT", "PATCH"):
                return Answer(self._update(request, target))
            if method == "DELETE":
                return Answer(self._delete(request, target))
        else:
            if method == "GET":
                if request.flag("watch"):
                    chunks = listing.watch(self._store, target.resource, target.namespace, request.query)
                    return Stream(chunks, "application/json;stream=watch")
                return Answer(listing.page(self._store, target.resource, target.namespace, request.query))
            if method == "POST" and (target.namespace or not target.resource.namespaced):
                return Answer(self._create(request, target), 201)
            if method == "DELETE":
                return Answer(self._delete_collection(request, target))
        raise _not_allowed(method)

    def _subresource(self, request: Request, target: _Target) -> Answer | Stream:
        if target.subresource == "log" and target.resource is PODS and request.method == "GET":
            pod = self._store.get(PODS, target.namespace, target.name)
            return Stream(podlog.read(self._node, pod, request), "text/plain")
        if target.subresource == "eviction" and target.resource is PODS and request.method == "POST":
            return Answer(self._evict(request, target), 201)
        if target.subresource == "status":
            if request.method == "GET":
                return Answer(self._store.get(target.resource, target.namespace, target.name))
            if request.method in ("PUT", "PATCH"):
                return Answer(self._update(request, target))
        if target.subresource in ("exec", "attach", "portforward"):
            raise ApiError(
                501,
                "NotImplemented",
                f"the process kubelet has no {target.subresource}: a pod's processes run on this machine, "
                "look at them directly; hand back results by the termination message, not by an XCom sidecar",
            )
        raise _unknown(request.path)

    def _create(self, request: Request, target: _Target) -> dict[str, Any]:
        resource = target.resource
        obj = check_meta(resource, request.json(), target.namespace)
        if target.namespace and not request.dry_run:
            self.ensure_namespace(target.namespace)
        if resource is PODS:
            return self.create_pod(obj, dry_run=request.dry_run)
        obj = check_job(obj) if resource is JOBS else check_object(resource, obj)
        made = self._store.create(resource, obj, dry_run=request.dry_run)
        if not request.dry_run:
            self._node.retry()  # a claim, for example, that a pod waits for
            if resource is JOBS:
                self.jobs.notice()
        return made

    def create_pod(self, obj: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Take a pod, whoever wants it: 422 for a bad one, 403 for one beyond a quota."""
        check_pod(obj)
        obj = with_pod_defaults(obj)
        check_quota(self._store, obj)
        made = self._store.create(PODS, obj, dry_run=dry_run)
        if not dry_run:
            self._node.admit(made)
        return made

    def ensure_namespace(self, name: str) -> None:
        """Make a namespace unless it is there."""
        if self._store.find(NAMESPACES, None, name) is None:
            obj = check_object(NAMESPACES, check_meta(NAMESPACES, {"metadata": {"name": name}}, None))
            try:
                self._store.create(NAMESPACES, obj)
            except ApiError as e:
                if e.code != 409:  # somebody else was faster
                    raise

    def _update(self, request: Request, target: _Target) -> dict[str, Any]:
        body = request.json()
        resource, status_only = target.resource, target.subresource == "status"

        def change(draft: dict[str, Any]) -> dict[str, Any]:
            before = self._store.get(resource, target.namespace, target.name)
            if request.method == "PATCH":
                after = apply_patch(draft, body, request.content_type)
            elif isinstance(body, dict):
                after = body
            else:
                raise bad_request("the body of the request must be a JSON object")
            after = check_update(resource, before, after)
            if status_only:
                return {**before, "status": after.get("status", {})}
            if resource is PODS:
                check_pod_update(before, after)
            if "status" in before:  # written by the system only
                after["status"] = before["status"]
            return after

        return self._store.update(resource, target.namespace, target.name, change, dry_run=request.dry_run)

    def _delete(self, request: Request, target: _Target) -> dict[str, Any]:
        options = request.json() or {}
        if not isinstance(options, dict):
            raise bad_request("DeleteOptions must be an object")
        grace = request.number("gracePeriodSeconds")
        if grace is None:
            grace = options.get("gracePeriodSeconds")
        if grace is not None and (not isinstance(grace, int) or grace < 0):
            raise bad_request(f"gracePeriodSeconds must be 0 or more, got {grace!r}")
        wanted = (options.get("preconditions") or {}).get("uid")
        # As on a cluster, the pods of a batch/v1 Job stay unless the request says otherwise.
        propagation = request.query.get("propagationPolicy") or options.get("propagationPolicy") or "Orphan"
        dry_run = request.dry_run or options.get("dryRun") == ["All"]
        return self._remove(
            target, grace=grace, uid=wanted, dry_run=dry_run, with_pods=propagation != "Orphan"
        )

    def _evict(self, request: Request, target: _Target) -> dict[str, Any]:
        """A deletion that says why; there are no disruption budgets here that could forbid it."""
        body = request.json()
        if not isinstance(body, dict):
            raise bad_request("the body of the request must be an Eviction")
        options = body.get("deleteOptions") or {}
        if not request.dry_run:

            def mark(draft: dict[str, Any]) -> None:
                said = "Eviction API: evicting"
                set_condition(draft["status"], "DisruptionTarget", True, "EvictionByEvictionAPI", said)

            self._store.update(PODS, target.namespace, target.name, mark)
        self._remove(target, grace=options.get("gracePeriodSeconds"), dry_run=request.dry_run)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _remove(
        self,
        target: _Target,
        *,
        grace: float | None,
        uid: str | None = None,
        dry_run: bool = False,
        with_pods: bool = False,
    ) -> dict[str, Any]:
        resource = target.resource
        obj = self._store.get(resource, target.namespace, target.name)
        if uid is not None and uid != obj["metadata"]["uid"]:
            raise wrong_uid(resource.kind, target.name, uid, obj["metadata"]["uid"])
        if dry_run:
            return obj
        if resource is PODS:
            return self._node.delete(obj["metadata"]["namespace"], target.name, grace=grace)
        if resource is NAMESPACES:
            self._empty_namespace(target.name)
        self._store.delete(resource, target.namespace, target.name)
        if resource is JOBS and with_pods:
            self._delete_owned(obj)
        if resource.plural == "persistentvolumeclaims":
            self._machine.volumes.drop_claim(obj["metadata"]["namespace"], target.name)
        details = {"name": target.name, "kind": resource.plural, "uid": obj["metadata"]["uid"]}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "details": details,
        }

    def _delete_owned(self, owner: dict[str, Any]) -> None:
        meta = owner["metadata"]
        for pod in self._store.list(PODS, meta["namespace"])[0]:
            if any(row.get("uid") == meta["uid"] for row in pod["metadata"].get("ownerReferences") or ()):
                try:
                    self._node.delete(meta["namespace"], pod["metadata"]["name"])
                except ApiError as e:
                    if e.code != 404:  # it ended by itself meanwhile
                        raise

    def _empty_namespace(self, namespace: str) -> None:
        for resource in RESOURCES.values():
            if resource.namespaced:
                for obj in self._store.list(resource, namespace)[0]:
                    self._remove(_Target(resource, namespace, obj["metadata"]["name"]), grace=None)

    def _delete_collection(self, request: Request, target: _Target) -> dict[str, Any]:
        found = listing.page(self._store, target.resource, target.namespace, request.query)
        for obj in found["items"]:
            meta = obj["metadata"]
            one = dataclasses.replace(target, namespace=meta.get("namespace"), name=meta["name"])
            try:
                self._delete(request, one)
            except ApiError as e:
                if e.code != 404:  # it ended by itself meanwhile
                    raise
        return found


def _target(parts: list[str], path: str, api: str) -> _Target:
    """What a path below /api/v1 or /apis/batch/v1 speaks of."""
    namespace = None
    if parts[0] == "namespaces" and len(parts) > 2 and parts[2] in RESOURCES:
        namespace, parts = parts[1], parts[2:]
    resource = RESOURCES.get(parts[0])
    if (
        resource is None
        or resource.api != api
        or len(parts) > 3
        or (namespace is not None and not resource.namespaced)
    ):
        raise _unknown(path)
    if resource.namespaced and namespace is None and len(parts) > 1:
        raise _unknown(path)
    return _Target(resource, namespace, *parts[1:])


_BATCH_V1 = {"groupVersion": "batch/v1", "version": "v1"}
_BATCH = {"name": "batch", "versions": [_BATCH_V1], "preferredVersion": _BATCH_V1}


def _fixed(parts: list[str]) -> Answer | Stream | None:
    """Answers that never change."""
    if parts in (["healthz"], ["livez"], ["readyz"]):
        return Stream(iter([b"ok"]), "text/plain")
    fixed: dict[tuple[str, ...], Any] = {
        ("version",): version_info(),
        ("api",): {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        ("apis",): {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_BATCH]},
        ("apis", "batch"): {"kind": "APIGroup", "apiVersion": "v1", **_BATCH},
        ("api", "v1"): discovery(),
        ("apis", "batch", "v1"): discovery("batch/v1"),
    }
    body = fixed.get(tuple(parts))
    return Answer(body) if body is not None else None


def _unknown(path: str) -> ApiError:
    return ApiError(
        404,
        "NotFound",
        f"the process kubelet could not find the requested resource: {path} is not served here",
    )


def _not_allowed(method: str) -> ApiError:
    return ApiError(405, "MethodNotAllowed", f"the server does not allow {method} on the requested resource")
