"""JobTrigger: waits for an Indexed Job in the triggerer, tells its log, deletes it when its task is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError
from airflow.triggers.base import BaseTrigger, TriggerEvent
from kubernetes_asyncio.client import ApiException, BatchV1Api, CoreV1Api, V1DeleteOptions

from trainyard.indexed_jobs import GroupWatch, all_are_there, end_of
from trainyard.triggers.group_log import GroupLog
from trainyard.triggers.pod_log import Place, earlier_places, log_of_task

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from kubernetes_asyncio.client import ApiClient

__all__ = ["JobTrigger"]

_TIMEOUT = 30  # seconds a request
_LOG_SECONDS = 90.0


class JobTrigger(BaseTrigger):
    """Fires {"failure": ...} when a Job does not come up within its budgets (seconds), {} when it has ended or is gone.

    An API server that does not answer is asked again. `connection_extras` are those of the connection, which a trigger
    need not look up then. `job` is the job's folder, whose logs of `replicas` are told from `since` on (ISO 8601, UTC)
    where the triggerer sees it; the event says then that they are "told".
    """

    def __init__(
        self,
        *,
        name: str,
        namespace: str,
        kubernetes_conn_id: str,
        schedule: float,
        start: float,
        poll: float = 5.0,
        connection_extras: dict[str, Any] | None = None,
        job: str = "",
        replicas: list[str] | None = None,
        since: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        self.namespace = namespace
        self.kubernetes_conn_id = kubernetes_conn_id
        self.schedule = schedule
        self.start = start
        self.poll = poll
        self.connection_extras = connection_extras
        self.job = job
        self.replicas = replicas or []
        self.since = since
        self.tell: Callable[[str, str], None] | None = None  # instead of the task's log
        self._watch = GroupWatch(schedule=schedule, start=start)
        self._fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Its class and arguments."""
        names = (
            *("name", "namespace", "kubernetes_conn_id", "schedule", "start", "poll", "connection_extras"),
            *("job", "replicas", "since"),
        )
        return f"{__name__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look every `poll` seconds."""
        ended = asyncio.Event()
        telling = asyncio.ensure_future(self._tell(ended))
        try:
            found = await self._wait()
            ended.set()
            done, _ = await asyncio.wait({telling}, timeout=_LOG_SECONDS)
            told = bool(done) and telling.exception() is None and telling.result()
        finally:
            telling.cancel()
        self._fired = True
        yield TriggerEvent({**found, **({"told": True} if told else {})})

    async def _tell(self, ended: asyncio.Event) -> bool:
        """Tell the replicas' lines until the group has ended; whether their logs can be seen here."""
        if not self.job or not await asyncio.to_thread((Path(self.job) / "plan.json").exists):
            return False
        places = await asyncio.to_thread(self._earlier)
        log = GroupLog(Path(self.job), self.replicas, since=self.since, places=places, tell=self.tell)
        await log.follow(ended)
        return True

    def _earlier(self) -> dict[str, Place]:
        """How far a triggerer before this one has told each replica's log."""
        if self.task_instance is None:
            return {}
        path = log_of_task(self.task_instance)
        return earlier_places(path.parent, path.name, self.replicas)

    async def _wait(self) -> dict[str, Any]:
        """What `_look` finds in the end."""
        async with self._hook().get_conn() as connection:
            while True:
                try:
                    found = await self._look(connection)
                except (ApiException, ClientError, asyncio.TimeoutError, OSError) as e:
                    status = getattr(e, "status", None)
                    if status is not None and 400 <= status < 500 and status not in (408, 429):
                        raise
                    self.log.warning("job %s can't be looked at, it is tried again: %s", self.name, e)
                    found = None
                if found is not None:
                    return found
                await asyncio.sleep(self.poll)

    async def _look(self, connection: ApiClient) -> dict[str, Any] | None:
        core = CoreV1Api(connection)
        try:
            job = await BatchV1Api(connection).read_namespaced_job(
                self.name, self.namespace, _request_timeout=_TIMEOUT
            )
        except ApiException as e:
            if e.status != 404:
                raise
            return {}
        if end_of(job) is not None:
            return {}
        if all_are_there(job):
            return None
        pods = await core.list_namespaced_pod(
            self.namespace, label_selector=f"job-name={self.name}", _request_timeout=_TIMEOUT
        )
        failure = self._watch.look(job, pods.items)
        for name in self._watch.lost:
            self.log.warning("pod %s was lost with its node; it is deleted by force", name)
            with contextlib.suppress(ApiException):  # it is tried again at the next look
                await core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        return {"failure": failure.to_dict()} if failure else None

    async def on_kill(self) -> None:
        """Delete the Job and its pods: its task was marked, cleared or timed out."""
        if self._fired:
            return
        async with self._hook().get_conn() as connection:
            try:
                await BatchV1Api(connection).delete_namespaced_job(
                    self.name, self.namespace, body=V1DeleteOptions(propagation_policy="Background")
                )
            except ApiException as e:
                if e.status != 404:
                    self.log.error("job %s could not be deleted: %s", self.name, e)

    def _hook(self) -> AsyncKubernetesHook:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook

        return AsyncKubernetesHook(
            conn_id=self.kubernetes_conn_id, in_cluster=None, connection_extras=self.connection_extras
        )
