"""The Kubernetes API as the triggerer asks it: plain JSON, streams, and one word for errors that pass.

The client's model classes are left out: a thousand pods as V1Pod objects cost seconds of CPU at every list.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import json
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes_asyncio.client import ApiClient

__all__ = ["ApiRefused", "Cluster", "ClusterApi", "passes"]

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0
SHARED_SECONDS = 30.0
"""How long a client is given to others who ask."""
_PAGE = 500
# Refusals that say "later": too many requests, and whatever an API server says while it starts or stops.
_LATER = frozenset({408, 429, 500, 502, 503, 504})


class ApiRefused(Exception):
    """The API answered a request with an error; `status` is the HTTP status, or that of a watch's ERROR event."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def passes(error: BaseException) -> bool:
    """Whether an error is one of the way to the API, or of an API that is busy: it may pass by itself."""
    import aiohttp

    if isinstance(error, ApiRefused):
        return error.status in _LATER
    return isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, TimeoutError))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The way to a cluster, as a trigger keeps it: a connection's name and what KubernetesPodOperator was told."""

    connection: str | None = None
    extras: Mapping[str, Any] | None = None
    context: str | None = None
    config: Mapping[str, Any] | None = None
    in_cluster: bool | None = None

    def key(self) -> str:
        """The same text for the same cluster."""
        return json.dumps(dataclasses.astuple(self), sort_keys=True, default=str)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[ClusterApi]:
        """A client, shared with others of this event loop that ask within `SHARED_SECONDS`.

        A client of its own costs each of a thousand logs that are followed 0.9 MB and 0.03 CPU-s, for certificates.
        Credentials are read anew for every new client, so that expired ones are not used for ever.
        """
        kept = _clients.setdefault(asyncio.get_running_loop(), {})
        shared = kept.get(self.key())
        if shared is None or shared.is_old():
            shared = kept[self.key()] = _SharedClient(self)
        shared.users += 1
        try:
            yield ClusterApi(await asyncio.shield(shared.opened))
        except ApiRefused as e:
            if e.status in (401, 403) and kept.get(self.key()) is shared:
                del kept[self.key()]  # the next one reads its credentials anew
            raise
        finally:
            shared.users -= 1
            if not shared.users:
                if kept.get(self.key()) is shared:
                    del kept[self.key()]
                await shared.close()

    def own_client(self) -> contextlib.AbstractAsyncContextManager[ApiClient]:
        """A new client."""
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
        from kubernetes_asyncio.client import Configuration

        configuration = Configuration()
        configuration.connection_pool_maxsize = (
            0  # no limit: a log that is followed has a connection of its own
        )
        hook = AsyncKubernetesHook(
            conn_id=self.connection,
            connection_extras=dict(self.extras) if self.extras is not None else None,
            cluster_context=self.context,
            config_dict=dict(self.config) if self.config is not None else None,
            in_cluster=self.in_cluster,
            client_configuration=configuration,
        )
        return hook.get_conn()


class _SharedClient:
    """A client that opens at once, for several users; the last one closes it."""

    def __init__(self, cluster: Cluster) -> None:
        self.users = 0
        self._since = time.monotonic()
        self._stack = contextlib.AsyncExitStack()
        # Of no user's own context: the one who asked first may be cancelled first.
        self.opened = contextvars.Context().run(
            asyncio.ensure_future, self._stack.enter_async_context(cluster.own_client())
        )

    def is_old(self) -> bool:
        """Whether it is time to read credentials anew, or it could not be opened."""
        failed = self.opened.done() and (self.opened.cancelled() or self.opened.exception() is not None)
        return failed or time.monotonic() - self._since > SHARED_SECONDS

    async def close(self) -> None:
        """Close it, also where it is still being opened."""
        if not self.opened.done():
            self.opened.cancel()
            await asyncio.wait({self.opened})
        await self._stack.aclose()


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _SharedClient]]
_clients = weakref.WeakKeyDictionary()


class ClusterApi:
    """Requests about pods of one namespace at a time."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def list_pods(self, namespace: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        """All pods, page by page, and the resource version from which a watch goes on."""
        rows: list[dict[str, Any]] = []
        token = None
        while True:
            query = {"labelSelector": selector, "limit": _PAGE, **({"continue": token} if token else {})}
            page = await self._json("GET", f"/api/v1/namespaces/{namespace}/pods", query)
            rows += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return rows, str(page["metadata"]["resourceVersion"])

    async def watch_pods(
        self, namespace: str, selector: str, version: str, *, seconds: int
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of pods from a version on, until the server ends it after about `seconds`."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": seconds,
        }
        # Silence for longer than the server lets a watch last means that the other side is gone without a word.
        async with self._open(
            "GET", f"/api/v1/namespaces/{namespace}/pods", query, silence=seconds + 30
        ) as r:
            async for event in (json.loads(line) async for lines in _lines(r) for line in lines):
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiRefused(int(status.get("code") or 500), str(status.get("message", "")))
                yield event

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A pod, or None when there is none."""
        try:
            return await self._json("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        except ApiRefused as e:
            if e.status == 404:
                return None
            raise

    async def delete(
        self, namespace: str, kind: str, name: str, *, uid: str = "", grace: int | None = None
    ) -> bool:
        """Delete an object ("pods", "services", "jobs"); False when it is gone already, or is another one by now.

        What a Job owns goes with it.
        """
        body: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
        }
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self._json("DELETE", f"{group}/namespaces/{namespace}/{kind}/{name}", body=body)
        except ApiRefused as e:
            if e.status in (404, 409):
                return False
            raise
        return True

    async def log_lines(
        self, namespace: str, name: str, container: str, *, since: str = "", follow: bool = True
    ) -> AsyncIterator[list[bytes]]:
        """A container's lines with their time in front, as many as come at once; from `since` on (RFC 3339)."""
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
        if since:
            query["sinceTime"] = since
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/log"
        async with self._open("GET", path, query, silence=None if follow else REQUEST_SECONDS) as response:
            async for lines in _lines(response):
                yield lines

    async def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        async with self._open(method, path, query or {}, body=body, silence=REQUEST_SECONDS) as response:
            return dict(json.loads(await response.read()))

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        *,
        silence: float | None,
        body: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ClientResponse]:
        """A request's answer; ApiRefused for one that is an error, and aiohttp's errors on the way."""
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
        response: ClientResponse = await self._client.call_api(
            path,
            method,
            {},
            [(name, str(value)) for name, value in query.items()],
            {"Accept": "application/json, */*", "Content-Type": "application/json"},
            body=dict(body) if body is not None else None,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=timeout,
        )
        try:
            if response.status >= 300:
                raise ApiRefused(response.status, _message(await response.read()))
            yield response
        finally:
            response.close()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:300]


async def _lines(response: ClientResponse) -> AsyncIterator[list[bytes]]:
    """The whole lines of a stream, however long, as they come."""
    rest: list[bytes] = []
    async for chunk in response.content.iter_any():
        head, *more = chunk.split(b"\n")
        rest.append(head)
        if more:
            yield [line for line in (b"".join(rest), *more[:-1]) if line]
            rest = [more[-1]]
    if last := b"".join(rest):
        yield [last]
