"""The Job controller: keeps a pod for each index of a Job until it has succeeded or may not be tried again.

One thread that sleeps while there are no Jobs. It holds nothing in memory that the objects don't say, so that a kubelet
that was started again goes on where the one before it was. Two things are simpler than on a cluster: a pod that is
deleted by hand is replaced without being counted, and all Jobs are looked at after any change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.kubelet.clock import epoch, timestamp
from trainyard.kubelet.errors import ApiError
from trainyard.kubelet.job_manifest import action_for, index_of, pod_of, ranges
from trainyard.kubelet.machine import Machine
from trainyard.kubelet.resources import JOBS, PODS
from trainyard.kubelet.status import set_condition

__all__ = ["JobController"]

log = logging.getLogger(__name__)

Object = dict[str, Any]
_FOR_EVER = 3600.0


class JobController:
    """Makes and deletes the pods of Jobs; `create` and `delete` are the API's own."""

    def __init__(
        self, machine: Machine, create: Callable[[Object], Object], delete: Callable[[str, str], Object]
    ) -> None:
        self._store = machine.store
        self._events = machine.events
        self._backoff = machine.backoff
        self._create = create
        self._delete = delete
        self._some = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def start(self) -> None:
        """Go on with the Jobs that are there, and wait for others."""
        self._some.set()
        self._thread.start()

    def stop(self) -> None:
        """Leave all pods as they are."""
        self._stopping = True
        self._some.set()
        self._store.wake()
        self._thread.join()

    def notice(self) -> None:
        """There is a new Job."""
        self._some.set()

    def _run(self) -> None:
        while True:
            self._some.wait()
            if self._stopping:
                return
            self._some.clear()
            version = self._store.version
            waits = [self._look(job) for job in self._store.list(JOBS)[0]]
            if waits:
                self._some.set()
                until = min(waits)
                self._store.wait(
                    lambda version=version: self._stopping or self._store.version > version, until
                )

    def _look(self, job: Object) -> float:
        """Bring one Job's pods to what it wants; seconds until it must be looked at again at the latest."""
        meta = job["metadata"]
        try:
            return _Look(self, job).run()
        except ApiError as e:  # deleted meanwhile, or its pods are refused
            log.info("job %s/%s: %s", meta["namespace"], meta["name"], e)
            return self._backoff[0]


class _Look:
    """One look at one Job."""

    def __init__(self, controller: JobController, job: Object) -> None:
        self._c = controller
        self._job = job
        self._spec = job["spec"]
        self._now = time.time()
        uid = job["metadata"]["uid"]
        pods = controller._store.list(PODS, job["metadata"]["namespace"])[0]
        self._pods = [
            p for p in pods if any(o["uid"] == uid for o in p["metadata"].get("ownerReferences", ()))
        ]

    def run(self) -> float:
        status = self._job.get("status") or {}
        ended = [row for row in status.get("conditions") or () if row["type"] in ("Complete", "Failed")]
        if ended:
            return self._after(epoch(ended[0]["lastTransitionTime"]))
        if self._spec.get("suspend"):
            self._end_pods()
            self._write(suspended=True)
            return _FOR_EVER
        started = epoch(status["startTime"]) if status.get("startTime") else self._now
        deadline = self._spec.get("activeDeadlineSeconds")
        if deadline is not None and self._now >= started + deadline:
            why = "Job was active longer than specified deadline"
            return self._finish("Failed", "DeadlineExceeded", why)
        wait = self._reconcile()
        return wait if deadline is None else min(wait, started + deadline - self._now)

    def _reconcile(self) -> float:
        done, failed, counted = self._ends()
        limit = self._spec["backoffLimit"]
        if failed is None:
            return self._finish("Failed", "PodFailurePolicy", "A pod's end matches a FailJob rule")
        if sum(counted.values()) > limit:
            return self._finish(
                "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
            )
        completions = self._spec["completions"]
        if len(done | failed) >= completions:
            self._write(done, failed)
            if failed:
                return self._finish("Failed", "FailedIndexes", "Job has failed indexes", done, failed)
            return self._finish(
                "Complete", "CompletionsReached", "Reached expected number of succeeded pods", done
            )
        living = {index_of(p) for p in self._pods if not _ended(p)}
        wait, room = _FOR_EVER, self._spec["parallelism"] - len(living)
        for index in range(completions):
            if room <= 0 or index in living or index in done or index in failed:
                continue
            due = self._due(index, counted.get(index, 0)) - self._now
            if due > 0:
                wait = min(wait, due)
                continue
            self._c._create(pod_of(self._job, index))
            room -= 1
        self._write(done, failed)
        return wait

    def _ends(self) -> tuple[set[int], set[int] | None, dict[int, int]]:
        """Indices that have succeeded and that have failed for good (None: all have), and counted failures of each."""
        done, failed, counted = set(), set(), dict[int, int]()
        per_index = self._spec.get("backoffLimitPerIndex")
        for pod in self._pods:
            index, phase = index_of(pod), pod["status"]["phase"]
            if phase == "Succeeded":
                done.add(index)
            elif phase == "Failed":
                action = action_for(self._job, pod)
                if action == "FailJob":
                    return done, None, counted
                if action == "FailIndex":
                    failed.add(index)
                elif action == "Count":
                    counted[index] = counted.get(index, 0) + 1
                    if per_index is not None and counted[index] > per_index:
                        failed.add(index)
        return done, failed - done, counted

    def _due(self, index: int, failures: int) -> float:
        """When an index may be tried again: after a wait that doubles with each failure that counts."""
        if not failures:
            return self._now
        first, longest = self._c._backoff
        ends = [_end_of(p) for p in self._pods if index_of(p) == index]
        return max(ends) + min(longest, first * 2 ** (failures - 1))

    def _finish(self, kind: str, reason: str, message: str, *known: set[int]) -> float:
        self._end_pods()

        def change(job: Object) -> None:
            set_condition(job["status"], kind, True, reason, message)
            if kind == "Complete":
                job["status"]["completionTime"] = timestamp()

        if not known:
            done, failed, _ = self._ends()
            self._write(done, failed or set())
        self._update(change)
        return self._after(self._now)

    def _after(self, ended: float) -> float:
        """The life of a Job that has ended."""
        ttl = self._spec.get("ttlSecondsAfterFinished")
        if ttl is None:
            return _FOR_EVER
        if self._now < ended + ttl:
            return ended + ttl - self._now
        meta = self._job["metadata"]
        for pod in self._pods:
            self._remove(pod)
        self._c._store.delete(JOBS, meta["namespace"], meta["name"], uid=meta["uid"])
        return _FOR_EVER

    def _end_pods(self) -> None:
        for pod in self._pods:
            if not _ended(pod) and "deletionTimestamp" not in pod["metadata"]:
                self._remove(pod)

    def _remove(self, pod: Mapping[str, Any]) -> None:
        try:
            self._c._delete(pod["metadata"]["namespace"], pod["metadata"]["name"])
        except ApiError as e:
            if e.code != 404:
                raise

    def _write(
        self, done: set[int] | None = None, failed: set[int] | None = None, *, suspended: bool = False
    ) -> None:
        living = [p for p in self._pods if not _ended(p)]
        ready = [p for p in living if _is_ready(p)]

        def change(job: Object) -> None:
            status = job["status"]
            status.update(active=len(living), ready=len(ready), terminating=0)
            if done is not None:
                status["succeeded"] = len(done)
                status["completedIndexes"] = ranges(done)
            if failed is not None:
                status["failed"] = sum(p["status"]["phase"] == "Failed" for p in self._pods)
                if self._spec.get("backoffLimitPerIndex") is not None:
                    status["failedIndexes"] = ranges(failed)
            if suspended:
                status.pop("startTime", None)
                set_condition(status, "Suspended", True, "JobSuspended", "Job suspended")
            else:
                status.setdefault("startTime", timestamp(self._now))
                if any(row["type"] == "Suspended" for row in status.get("conditions") or ()):
                    set_condition(status, "Suspended", False, "JobResumed", "Job resumed")

        self._update(change)

    def _update(self, change: Callable[[Object], None]) -> None:
        meta = self._job["metadata"]
        self._c._store.update(JOBS, meta["namespace"], meta["name"], change, uid=meta["uid"])


def _ended(pod: Mapping[str, Any]) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _is_ready(pod: Mapping[str, Any]) -> bool:
    rows = pod["status"].get("conditions") or ()
    return any(row["type"] == "Ready" and row["status"] == "True" for row in rows)


def _end_of(pod: Mapping[str, Any]) -> float:
    rows = pod["status"].get("containerStatuses") or ()
    ends = [row["state"]["terminated"]["finishedAt"] for row in rows if "terminated" in row["state"]]
    return max(map(epoch, ends), default=epoch(pod["metadata"]["creationTimestamp"]))
