"""All pods of the machine: taking them in, ending them, keeping what finished ones leave."""

from __future__ import annotations

import functools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainyard.kubelet.clock import epoch, timestamp
from trainyard.kubelet.container import log_path
from trainyard.kubelet.errors import ApiError, wrong_uid
from trainyard.kubelet.logs import LogFile
from trainyard.kubelet.machine import Machine
from trainyard.kubelet.pod import Ending, PodWorker
from trainyard.kubelet.resources import PODS
from trainyard.kubelet.scheduler import Scheduler
from trainyard.kubelet.status import set_condition
from trainyard.kubelet.volumes import MountError

__all__ = ["KEEP_FINISHED", "KEEP_FINISHED_FOR", "Node"]

log = logging.getLogger(__name__)

# Finished pods and their logs stay until they are deleted; beyond these, the oldest go (looked at whenever a
# pod finishes). A node that runs more pods keeps as many: they may all end before anybody has asked how.
KEEP_FINISHED = 500
KEEP_FINISHED_FOR = 7 * 24 * 3600.0  # seconds


class Node:
    """Runs pods and ends them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._scheduler = Scheduler(machine.node)
        self._lock = threading.RLock()  # never held while the scheduler is called
        self._workers: dict[str, PodWorker] = {}
        self.closing = False

    def admit(self, pod: Mapping[str, Any]) -> None:
        """Let a new pod start as soon as there is room."""
        if self.closing:
            return
        worker = PodWorker(pod, self._machine, self._finished)
        with self._lock:
            self._workers[worker.uid] = worker
        self._scheduler.submit(
            pod,
            start=functools.partial(self._assign, worker),
            refuse=functools.partial(self._refuse, worker),
            check=functools.partial(self._missing_claim, pod),
        )

    def _assign(self, worker: PodWorker, gpus: tuple[int, ...]) -> None:
        def change(draft: dict[str, Any]) -> None:
            draft["spec"]["nodeName"] = self._machine.node.name
            set_condition(draft["status"], "PodScheduled", True)
            draft["status"]["startTime"] = timestamp()

        pod = self._change(worker, change)
        if pod is not None:
            text = f"Successfully assigned {worker.namespace}/{worker.name} to {self._machine.node.name}"
            self._machine.events.normal(pod, "Scheduled", text, component="default-scheduler")
            worker.start(pod, gpus)

    def _refuse(self, worker: PodWorker, reason: str) -> None:
        def change(draft: dict[str, Any]) -> None:
            set_condition(draft["status"], "PodScheduled", False, "Unschedulable", reason)

        pod = self._change(worker, change)
        if pod is not None:
            self._machine.events.warning(pod, "FailedScheduling", reason, component="default-scheduler")

    def _change(self, worker: PodWorker, change: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        try:
            return self._machine.store.update(PODS, worker.namespace, worker.name, change, uid=worker.uid)
        except ApiError:
            # Deleted between its creation and its being scheduled.
            log.debug("pod %s/%s went before it could start", worker.namespace, worker.name)
            with self._lock:
                self._workers.pop(worker.uid, None)
            self._scheduler.cancel(worker.uid)
            self._scheduler.release(worker.uid)
            return None

    def _missing_claim(self, pod: Mapping[str, Any]) -> str | None:
        for volume in pod["spec"].get("volumes") or ():
            if claim := volume.get("persistentVolumeClaim"):
                try:
                    self._machine.volumes.claim_folder(pod["metadata"]["namespace"], claim["claimName"])
                except MountError as e:
                    return str(e)
        return None

    def retry(self) -> None:
        """Something that a waiting pod may need has come."""
        self._scheduler.retry()

    def delete(
        self, namespace: str, name: str, *, grace: float | None = None, uid: str | None = None
    ) -> dict[str, Any]:
        """End a pod and remove it: within its grace period, or at once with `grace` 0. Its last or current state."""
        store = self._machine.store
        pod = store.get(PODS, namespace, name)
        found = pod["metadata"]["uid"]
        if uid is not None and uid != found:
            raise wrong_uid("Pod", name, uid, found)
        seconds = float(pod["spec"]["terminationGracePeriodSeconds"] if grace is None else grace)
        waiting = self._scheduler.cancel(found)
        with self._lock:
            if waiting:
                self._workers.pop(found, None)
            worker = self._workers.get(found)
            if worker is not None:
                pod = self._mark_deleted(pod, seconds)
        if worker is None:
            return self._remove(pod)
        worker.stop(Ending(seconds))
        if seconds == 0:
            try:
                return store.delete(PODS, namespace, name, uid=found)
            except ApiError:
                log.debug("pod %s/%s ended by itself meanwhile", namespace, name)
        return pod

    def _mark_deleted(self, pod: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        def mark(draft: dict[str, Any]) -> None:
            meta = draft["metadata"]
            ends = time.time() + seconds
            if "deletionTimestamp" in meta:  # asked again: only sooner
                ends = min(ends, epoch(meta["deletionTimestamp"]))
            meta["deletionTimestamp"] = timestamp(ends)
            meta["deletionGracePeriodSeconds"] = int(seconds)

        meta = pod["metadata"]
        return self._machine.store.update(PODS, meta["namespace"], meta["name"], mark, uid=meta["uid"])

    def _remove(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        meta = pod["metadata"]
        last = self._machine.store.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"])
        shutil.rmtree(self._machine.pod_folder(meta["uid"]), ignore_errors=True)
        return last

    def _finished(self, worker: PodWorker) -> None:
        """Called by a worker when nothing of its pod runs any more."""
        folder = self._machine.pod_folder(worker.uid)
        shutil.rmtree(folder / "volumes", ignore_errors=True)  # emptyDir lives as long as the pod runs
        with self._lock:
            self._workers.pop(worker.uid, None)
            pod = self._machine.store.find(PODS, worker.namespace, worker.name)
        if pod is None or pod["metadata"]["uid"] != worker.uid:  # deleted by force
            shutil.rmtree(folder, ignore_errors=True)
        elif "deletionTimestamp" in pod["metadata"]:
            self._remove(pod)
        self._scheduler.release(worker.uid)
        self.forget_old()

    def forget_old(self) -> None:
        """Remove finished pods beyond `KEEP_FINISHED` and `KEEP_FINISHED_FOR`."""
        keep = max(KEEP_FINISHED, self._machine.node.max_pods)
        pods, _ = self._machine.store.list(PODS)
        done = [pod for pod in pods if pod["status"]["phase"] in ("Succeeded", "Failed")]
        done.sort(key=lambda pod: pod["metadata"]["creationTimestamp"], reverse=True)
        oldest = time.time() - KEEP_FINISHED_FOR
        for i, pod in enumerate(done):
            if i >= keep or epoch(pod["metadata"]["creationTimestamp"]) < oldest:
                try:
                    self._remove(pod)
                except ApiError:  # somebody else was faster
                    log.debug("pod %s was removed meanwhile", pod["metadata"]["name"])

    def log_of(self, pod: Mapping[str, Any], container: str, attempt: int) -> tuple[Path, LogFile | None]:
        """The log file of one run of a container, and its live end while there may be one."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            worker = self._workers.get(uid)
        live = worker.live_log(container, attempt) if worker is not None else None
        return log_path(self._machine.pod_folder(uid) / "containers" / container, attempt), live

    def shut_down(self, grace: float) -> None:
        """End all pods, each within its own grace period and all within `grace` seconds."""
        self.closing = True
        with self._lock:
            workers = list(self._workers.values())
        # All of them first, or one that waits would get the room of one that ends. The next life marks them.
        running = [worker for worker in workers if not self._scheduler.cancel(worker.uid)]
        for worker in running:
            pod = self._machine.store.find(PODS, worker.namespace, worker.name)
            own = pod["spec"]["terminationGracePeriodSeconds"] if pod is not None else 0
            worker.stop(
                Ending(
                    min(grace, float(own)),
                    "Terminated",
                    "Pod was terminated in response to imminent node shutdown.",
                )
            )
        deadline = time.monotonic() + grace + 10
        for worker in running:
            if not worker.join(max(0.0, deadline - time.monotonic())):
                log.error("pod %s/%s does not end", worker.namespace, worker.name)
