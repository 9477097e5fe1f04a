"""PodTrigger: wait for one pod in the triggerer, tell its log as it grows, and say how it ended.

The trigger is made again from its arguments by whatever triggerer runs it next: it takes the pod up by name and uid
and starts nothing. Its event carries the pod's last status, so that the task's end needs no pod any more: one that
was collected after its end has still ended as it did.

    status      success, failed   how the container ended, `pod` says the rest
                gone              deleted before it ended
                given_up          there is no use in waiting: `what` is an error of `trainyard.given_up`, `message` its
                late              a deadline passed: `what` is schedule, start or execution
                image             it can't be started: `message`
                refused           the API has refused to tell for a minute: `message`

A task that has nothing left to do after a success ends here, without another process (`finish`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from trainyard.given_up import Lookout, PodGivenUp
from trainyard.pods import pod_from
from trainyard.triggers.cluster_api import Cluster
from trainyard.triggers.pod_log import Place, PodLog, earlier_place, log_of_task
from trainyard.triggers.pod_watch import PodWatch, Seen, SeenPod

__all__ = ["PodTrigger", "judged"]

COLLECT_SECONDS = 120.0
"""After its end the task deletes the pod; one that is still there after this has nobody who does."""
_FINISH_SECONDS = 2.0
"""A pod is deleted this much after the event of its success: a triggerer that dies in between finds it again."""
_KILL_SECONDS = 25.0  # Airflow gives `on_kill` 30; what is not done by then goes on without it
_TOUCH_SECONDS = 1.0
_LOG_SECONDS = 90.0


class PodTrigger(BaseTrigger):
    """Wait for the pod `name` with `uid`; `began` is when that began (epoch seconds), so that deadlines stay.

    `deadline` (epoch seconds) is the task's own, from its execution_timeout. `collect` and `kill` say whether the pod
    is deleted after its end, and when the task is cleared or marked; `finish` that a success ends the task at once:
    a process for it alone costs more than all else of a replica that only waits. `job` and `replica` name the
    replica's log in its job's folder; `gang` the Service that goes with the whole run, `lease` the uid of the Job
    that owns it.
    """

    def __init__(
        self,
        *,
        name: str,
        namespace: str,
        uid: str = "",
        container: str = "base",
        cluster: Mapping[str, Any] | None = None,
        began: float = 0.0,
        schedule_timeout: float = 600.0,
        startup_timeout: float = 600.0,
        deadline: float | None = None,
        grace: int | None = None,
        collect: bool = True,
        kill: bool = True,
        finish: bool = False,
        get_logs: bool = True,
        job: str = "",
        replica: str = "",
        gang: str = "",
        lease: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        self.namespace = namespace
        self.uid = uid
        self.container = container
        self.cluster = dict(cluster or {})
        self.began = began
        self.schedule_timeout = schedule_timeout
        self.startup_timeout = startup_timeout
        self.deadline = deadline
        self.grace = grace
        self.collect = collect
        self.kill = kill
        self.finish = finish
        self.get_logs = get_logs
        self.job = job
        self.replica = replica
        self.gang = gang
        self.lease = lease
        self.tell: Callable[[str, str], None] | None = None  # instead of the task's log
        self._fired = False
        self._lookout = Lookout()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and the arguments that make it again."""
        names = (
            *("name", "namespace", "uid", "container", "cluster", "began", "schedule_timeout"),
            *("startup_timeout", "deadline", "grace", "collect", "kill", "finish", "get_logs"),
            *("job", "replica", "gang", "lease"),
        )
        return f"{__name__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event, once the pod has ended or can't."""
        async with PodWatch.shared(Cluster(**self.cluster), self.namespace) as watch:
            with watch.pod(self.name, self.uid) as seen:
                event = await self.wait(watch, seen)
            over = self.finish and event["status"] == "success"
            if self.collect:
                # The task that comes back deletes it; where none comes (marked failed just now), this does.
                after = _FINISH_SECONDS if over else COLLECT_SECONDS
                watch.delete(self.name, self.uid, grace=self.grace, after=after)
        self._fired = True
        if over:
            self.log.info("pod %s has ended well", self.name)
        yield TaskSuccessEvent() if over else TriggerEvent(event)

    async def on_kill(self) -> None:
        """The task was cleared or marked: delete the pod, and what belongs to the run where that is over."""
        if self._fired:
            return
        async with PodWatch.shared(Cluster(**self.cluster), self.namespace) as watch:
            tasks = []
            if self.kill:
                tasks.append(watch.delete(self.name, self.uid, grace=self.grace))
            if self.gang and await self._run_is_over():
                tasks.append(watch.delete(self.gang, "", kind="services"))
                if self.lease:
                    tasks.append(watch.delete(self.gang, self.lease, kind="jobs"))
            # A slow API is waited for by the watch, which outlasts this trigger.
            if tasks:
                await asyncio.wait(tasks, timeout=_KILL_SECONDS)

    async def _run_is_over(self) -> bool:
        """Whether the whole run has ended (marked failed, timed out): then no cleanup task may come."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from asgiref.sync import sync_to_async

        ti = self.task_instance
        if ti is None:
            return False
        state = await sync_to_async(RuntimeTaskInstance.get_dagrun_state)(ti.dag_id, ti.run_id)
        return state in ("failed", "success")

    # ---- waiting

    async def wait(self, watch: PodWatch, seen: SeenPod) -> dict[str, Any]:
        """The event, once the sights of the pod ask for one."""
        ended = asyncio.Event()
        telling: asyncio.Task[bool] | None = None
        log = await self._pod_log() if self.get_logs else None
        try:
            while True:
                sight = await self._news(seen)
                started = _started(sight.pod, self.container)
                if log is not None and telling is None and started:
                    telling = asyncio.ensure_future(log.follow(started, ended))
                event = self._verdict(watch, sight)
                if event is None:
                    continue
                if telling is not None and log is not None:
                    ended.set()
                    done, _ = await asyncio.wait({telling}, timeout=_LOG_SECONDS)
                    if not done or telling.exception() is not None or not telling.result():
                        self.log.warning("the last lines of pod %s could not be had", self.name)
                return {"name": self.name, "namespace": self.namespace, "pod": sight.pod, **event}
        finally:
            if telling is not None:
                telling.cancel()

    async def _news(self, seen: SeenPod) -> Seen:
        """The latest sight: new, or looked at again since a deadline may have passed."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(seen.next(), _TOUCH_SECONDS if self._may_be_late(seen) else 15.0)
        return seen.latest

    def _may_be_late(self, seen: SeenPod) -> bool:
        """Whether a deadline may pass soon."""
        pod = seen.latest.pod
        near = self.deadline is not None and self.deadline - time.time() < 30
        return near or pod is None or pod["status"].get("phase") in (None, "Pending", "Unknown")

    def _verdict(self, watch: PodWatch, sight: Seen) -> dict[str, Any] | None:
        """What is to be said of a sight; None to go on waiting."""
        status = judged(sight.pod, self.container) if sight.pod else ""
        if status:
            return {"status": status, "message": "the pod has ended"}
        if sight.gone:
            return {"status": "gone", "message": f"pod {self.name} was deleted before it ended"}
        if sight.refused:
            return {"status": "refused", "message": sight.refused}
        if self.deadline is not None and time.time() >= self.deadline:
            return {
                "status": "late",
                "what": "execution",
                "message": "the task's execution_timeout has passed",
            }
        if sight.pod is None or not watch.in_touch:
            return None  # what can't be seen is not late
        return self._no_use(sight.pod) or self._start_of(sight.pod)

    def _no_use(self, pod: Mapping[str, Any]) -> dict[str, Any] | None:
        """Whether a pod is lost with its node, or waits for what will not come."""
        if not pod["metadata"].get("deletionTimestamp") and not _waits(pod):
            return None
        try:
            self._lookout.look(pod_from(pod))
        except PodGivenUp as e:
            return {"status": "given_up", "what": type(e).__name__, "message": str(e)}
        return None

    def _start_of(self, pod: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is wrong with how the pod starts."""
        if pod["status"].get("phase") not in (None, "Pending", "Unknown"):
            return None
        problem = _image_problem(pod)
        if problem:
            return {"status": "image", "message": problem}
        placed = next((c for c in pod["status"].get("conditions") or () if c["type"] == "PodScheduled"), {})
        if placed.get("status") == "True":
            begun = max(self.began, _epoch(placed.get("lastTransitionTime")))
            if time.time() < begun + self.startup_timeout:
                return None
            message = f"pod {self.name} took too long to start: more than {self.startup_timeout:g} s"
            return {"status": "late", "what": "start", "message": message}
        if time.time() < self.began + self.schedule_timeout:
            return None
        why = f": {placed['message']}" if placed.get("message") else ""
        message = f"pod {self.name} was not scheduled within {self.schedule_timeout:g} s{why}"
        return {"status": "late", "what": "schedule", "message": message}

    async def _pod_log(self) -> PodLog:
        place = await asyncio.to_thread(self._earlier)
        return PodLog(
            Cluster(**self.cluster),
            self.namespace,
            self.name,
            self.container,
            job=self.job,
            replica=self.replica,
            place=place,
            tell=self.tell,
        )

    def _earlier(self) -> Place:
        """How far a triggerer before this one has told the log."""
        if self.task_instance is None:
            return Place()
        path = log_of_task(self.task_instance)
        return earlier_place(path.parent, path.name)


# ---- plain functions over a pod's outline


def judged(pod: dict[str, Any], container: str) -> str:
    """ "success" or "failed" once our container has ended, else "".

    The container decides, and the pod's phase is set to say the same: a sidecar may run on until the pod is deleted.
    """
    status = pod["status"]
    phase = status.get("phase")
    ended = _state(pod, container).get("terminated")
    if phase not in ("Succeeded", "Failed") and ended is None:
        return ""
    if phase not in ("Succeeded", "Failed"):
        phase = status["phase"] = (
            "Succeeded" if ended is not None and ended.get("exitCode") == 0 else "Failed"
        )
    return "success" if phase == "Succeeded" else "failed"


def _state(pod: Mapping[str, Any], container: str) -> dict[str, Any]:
    rows = pod["status"].get("containerStatuses") or ()
    return next((row.get("state") or {} for row in rows if row["name"] == container), {})


def _started(pod: Mapping[str, Any] | None, container: str) -> str:
    """When the container started, "" while it has not."""
    state = _state(pod, container) if pod else {}
    told = state.get("running") or state.get("terminated") or {}
    return str(told.get("startedAt") or "")


def _image_problem(pod: Mapping[str, Any]) -> str:
    """Why the pod's image can't be had, where waiting does not help; as KubernetesPodOperator judges it."""
    if not _waits(pod):
        return ""
    from airflow.providers.cncf.kubernetes.utils.pod_manager import detect_pod_terminate_early_issues

    return " ".join((detect_pod_terminate_early_issues(pod_from(pod)) or "").split())


def _waits(pod: Mapping[str, Any]) -> bool:
    status = pod["status"]
    rows = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return any((row.get("state") or {}).get("waiting") for row in rows)


def _epoch(moment: str | None) -> float:
    return dt.datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp() if moment else 0.0
