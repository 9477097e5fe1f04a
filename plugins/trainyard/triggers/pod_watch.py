"""One list and watch of our pods a namespace and connection, shared by all triggers of a triggerer.

    async with PodWatch.shared(cluster, "trainyard") as watch:
        with watch.pod("digits-worker-1-x7k2", uid) as seen:
            while not (await seen.next()).gone:
                ...

A hundred waiting replicas cost the API server one watch, and not a request a pod every few seconds. An API that is
away is asked again, with growing pauses, for as long as somebody waits; nothing is concluded from its silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trainers.job import labels
from trainyard.triggers.cluster_api import ApiRefused, Cluster, ClusterApi, passes

__all__ = ["PodWatch", "Seen", "SeenPod", "outline"]

log = logging.getLogger(__name__)

SELECTOR = f"{labels.LABEL_MANAGED_BY}={labels.MANAGED_BY}"
WATCH_SECONDS = 120
"""How long the server keeps one watch open; a connection that died unnoticed is found out this much later."""
LINGER = 30.0
"""Seconds that a watch goes on without anybody who waits: the next task comes soon."""
REFUSED_SECONDS = 60.0
"""Refusals (no rights, bad credentials) that last longer than this are told to those who wait."""
LATE = 2.0
"""Seconds after which a pod that the watch has not shown is asked for by name."""
_PAUSES = (0.5, 10.0)  # the first and the longest pause between attempts, in seconds

_META = (
    *("name", "namespace", "uid", "labels", "creationTimestamp"),
    *("deletionTimestamp", "deletionGracePeriodSeconds"),
)
_SPEC = ("nodeName", "readinessGates")

_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, PodWatch]]


class Seen(NamedTuple):
    """What is known of a pod: its outline (None before the first sight), and whether it is gone for good.

    `refused` says why nothing can be known: the API has refused to tell for a minute.
    """

    pod: dict[str, Any] | None
    gone: bool = False
    refused: str = ""


def outline(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A pod's identity and status, of its spec only where it runs: small, and nothing of its environment."""
    meta, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    return {
        "metadata": {key: meta[key] for key in _META if meta.get(key) is not None},
        "spec": {"containers": [], **{key: spec[key] for key in _SPEC if spec.get(key)}},
        "status": dict(pod.get("status") or {}),
    }


class SeenPod:
    """The latest sight of one pod, for one who waits."""

    def __init__(self, watch: PodWatch, name: str, uid: str) -> None:
        self.name = name
        self.uid = uid
        self.latest = Seen(None)
        self._watch = watch
        self._changed = asyncio.Event()

    async def next(self) -> Seen:
        """Wait for news; the latest. Of several changes in between only the last is told."""
        await self._changed.wait()
        self._changed.clear()
        return self.latest

    def show(self, pod: Mapping[str, Any] | None, *, gone: bool = False) -> None:
        """Tell a sight; a pod of the same name with another uid means that ours is gone."""
        if pod is not None and self.uid and pod["metadata"]["uid"] != self.uid:
            pod, gone = None, True
        self.latest = Seen(outline(pod) if pod is not None else self.latest.pod, gone)
        self._changed.set()

    def refuse(self, why: str) -> None:
        """Tell that the API does not answer this question."""
        self.latest = self.latest._replace(refused=why)
        self._changed.set()


class PodWatch:
    """The pods of ours in one namespace, as they are; made by `shared`."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.in_touch = False
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._pods: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, list[SeenPod]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._users = 0
        self._unused_since = clock()

    @classmethod
    @contextlib.asynccontextmanager
    async def shared(cls, cluster: Cluster, namespace: str) -> AsyncIterator[PodWatch]:
        """The watch of this event loop; it begins with the first user and ends a while after the last."""
        running = _watches.setdefault(asyncio.get_running_loop(), {})
        key = f"{namespace} {cluster.key()}"
        if key not in running:
            running[key] = cls(cluster, namespace)
            running[key]._start(lambda: running.pop(key, None))
        watch = running[key]
        watch._users += 1
        try:
            yield watch
        finally:
            watch._users -= 1
            watch._unused_since = watch._clock()

    @contextlib.contextmanager
    def pod(self, name: str, uid: str = "") -> Iterator[SeenPod]:
        """Follow one pod."""
        seen = SeenPod(self, name, uid)
        self._seen.setdefault(name, []).append(seen)
        late = None
        if name in self._pods:
            seen.show(self._pods[name])
        else:
            # It may have gone before anybody looked: no watch tells of that.
            late = self._errand(self._look(seen))
        try:
            yield seen
        finally:
            if late is not None:
                late.cancel()
            self._seen[name].remove(seen)
            if not self._seen[name]:
                del self._seen[name]

    # ---- what others are to be rid of

    def delete(
        self, name: str, uid: str, *, kind: str = "pods", grace: int | None = None, after: float = 0.0
    ) -> asyncio.Task[None]:
        """Delete an object, however long that takes; with `after` only if it is still there by then."""
        return self._errand(self._delete(name, uid, kind, grace, after))

    async def _delete(self, name: str, uid: str, kind: str, grace: int | None, after: float) -> None:
        if after:
            await self._sleep(after)
            if self.in_touch and name not in self._pods:
                return

        async def request(api: ClusterApi) -> None:
            if await api.delete(self.namespace, kind, name, uid=uid, grace=grace):
                log.info("deleted %s %s", kind, name)

        await self._patiently(request, f"{kind} {name} can't be deleted")

    async def _look(self, seen: SeenPod) -> None:
        await self._sleep(LATE)
        if seen.latest.pod is not None or seen.latest.gone:
            return

        async def request(api: ClusterApi) -> None:
            pod = await api.read_pod(self.namespace, seen.name)
            if seen.latest.pod is None:
                seen.show(pod, gone=pod is None)

        await self._patiently(request, f"pod {seen.name} can't be read")

    async def _patiently(self, request: Callable[[ClusterApi], Awaitable[None]], what: str) -> None:
        for pause in self._pauses():
            try:
                async with self.cluster.connect() as api:
                    await request(api)
                return
            except Exception as e:  # noqa: BLE001 - nobody waits for this task, so it says what is wrong itself
                if not passes(e):
                    log.warning("%s: %s", what, e)
                    return
                log.info("%s yet: %s", what, e)
            await self._sleep(pause)

    def _errand(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """A task that this watch stays for, outside of any trigger's own context (its log, say)."""
        task: asyncio.Task[None] = contextvars.Context().run(asyncio.ensure_future, work)  # type: ignore[arg-type]
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    # ---- the watch itself

    def _start(self, ended: Callable[[], object]) -> None:
        self._task = contextvars.Context().run(asyncio.ensure_future, self._run())
        self._task.add_done_callback(lambda task: ended())

    async def _run(self) -> None:
        pauses = self._pauses()
        refused_since: float | None = None
        while self._wanted():
            begun = self._clock()
            try:
                async with self.cluster.connect() as api:
                    version = await self._list(api)
                    refused_since = None
                    while self._wanted():
                        version = await self._follow(api, version)
            except Exception as e:  # noqa: BLE001 - whatever it is, those who wait would wait for ever
                self.in_touch = False
                if isinstance(e, ApiRefused) and e.status == 410:
                    log.info("pods of %s are listed anew: %s", self.namespace, e.message)
                elif passes(e):
                    log.warning("the Kubernetes API can't be reached, pods of %s: %s", self.namespace, e)
                    refused_since = None
                else:
                    log.warning("pods of %s can't be watched: %s", self.namespace, e)
                    refused_since = refused_since or begun
                    if self._clock() - refused_since >= REFUSED_SECONDS:
                        self._tell_refused(str(e))
            if self._clock() - begun > _PAUSES[1]:
                pauses = self._pauses()
            await self._sleep(next(pauses))

    def _wanted(self) -> bool:
        return bool(self._users or self._errands) or self._clock() - self._unused_since < LINGER

    def _pauses(self) -> Iterator[float]:
        pause, longest = _PAUSES
        while True:
            yield pause * (0.5 + self._jitter())
            pause = min(pause * 2, longest)

    async def _list(self, api: ClusterApi) -> str:
        expected = [seen for row in self._seen.values() for seen in row]
        rows, version = await api.list_pods(self.namespace, SELECTOR)
        self._pods = {row["metadata"]["name"]: outline(row) for row in rows}
        self.in_touch = True
        for seen in expected:
            pod = self._pods.get(seen.name)
            # One that nobody has seen yet may be younger than the list; `_look` asks for it.
            if pod is not None or seen.latest.pod is not None:
                seen.show(pod, gone=pod is None)
        return version

    async def _follow(self, api: ClusterApi, version: str) -> str:
        async for event in api.watch_pods(self.namespace, SELECTOR, version, seconds=WATCH_SECONDS):
            pod = event["object"]
            version = pod["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            name, gone = pod["metadata"]["name"], event["type"] == "DELETED"
            if gone:
                self._pods.pop(name, None)
            else:
                self._pods[name] = outline(pod)
            for seen in self._seen.get(name, ()):
                # The end of another pod of that name says nothing of ours.
                if not gone or seen.uid in ("", pod["metadata"]["uid"]):
                    seen.show(pod, gone=gone)
        return version

    def _tell_refused(self, why: str) -> None:
        for row in self._seen.values():
            for seen in row:
                seen.refuse(why)


_watches = weakref.WeakKeyDictionary()
