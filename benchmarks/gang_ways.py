"""Three ways to run a gang of pods that do nothing: by hand, by Trainyard, as plain mapped pod operators."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from gang_pause import LABEL, manifest, setting
from gang_proxy import CountingProxy
from trainyard.platform import Platform

from trainers.job.record import JobRecord, JobState

__all__ = [
    "PATIENCE",
    "AirflowWay",
    "Figures",
    "Limit",
    "PodObserver",
    "airflow_processes",
    "cpu_of",
    "pss_of",
    "since",
    "tell",
]

PATIENCE = 900.0
"""Seconds after which something hangs."""

CALLS_STARTING, CALLS_WAITING, CALLS_ENDING = "starting", "waiting", "ending"


@dataclasses.dataclass(frozen=True)
class Figures:
    """One gang's run: seconds from the trigger to all running and from the word to all gone.

    `calls` are requests at the API server by phase and kind; `cpu` CPU-seconds of Airflow's components from the
    trigger to the run's end, `idle` what all would have used in that time anyway; `pss` their bytes while all wait.
    """

    way: str
    size: int
    running: float
    gone: float
    calls: Mapping[str, Mapping[str, int]]
    cpu: Mapping[str, float] = dataclasses.field(default_factory=dict)
    idle: float = 0.0
    pss: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def cpu_a_replica(self) -> float:
        """CPU-seconds of all of Airflow."""
        return sum(self.cpu.values()) / self.size

    def calls_a_replica(self) -> float:
        """Without those made while all only wait, which the time that they wait decides."""
        return sum(sum(self.calls[phase].values()) for phase in (CALLS_STARTING, CALLS_ENDING)) / self.size

    def waiting_calls(self, hold: float) -> float:
        """Of one replica in a minute of waiting."""
        return sum(self.calls[CALLS_WAITING].values()) / self.size / hold * 60 if hold else 0.0


class PodObserver(threading.Thread):
    """Notes when all pods of a run are running, and when all are gone; asks the cluster itself, not the proxy."""

    def __init__(self, api: Any, namespace: str, run: str, size: int) -> None:
        super().__init__(daemon=True)
        self._api, self._namespace, self._run, self._size = api, namespace, run, size
        self._running: set[str] = set()
        self._there: set[str] = set()
        self.running, self.gone = threading.Event(), threading.Event()
        self.running_at = self.gone_at = 0.0

    def run(self) -> None:
        """Watch until all are gone."""
        from kubernetes import watch

        while True:
            # A watch that the server ends is asked for again, and begins with all there are.
            for event in watch.Watch().stream(
                self._api.list_namespaced_pod, self._namespace, label_selector=f"{LABEL}={self._run}"
            ):
                pod = event["object"]
                self._note(event["type"], pod.metadata.name, pod.status.phase)
                if self.gone.is_set():
                    return

    def _note(self, kind: str, name: str, phase: str) -> None:
        if kind == "DELETED":
            self._there.discard(name)
        else:
            self._there.add(name)
        if phase in ("Running", "Succeeded", "Failed"):
            self._running.add(name)
        if len(self._running) >= self._size and not self.running.is_set():
            self.running_at = time.time()
            self.running.set()
        if self.running.is_set() and not self._there:
            self.gone_at = time.time()
            self.gone.set()

    def __str__(self) -> str:
        return f"{self._run}: {len(self._running)} of {self._size} have run, {len(self._there)} are there"


def wait_for(event: threading.Event, what: object, *, over: Callable[[], bool] = lambda: False) -> None:
    """Wait; SystemExit when it takes too long or nothing is to come any more."""
    deadline = time.monotonic() + PATIENCE
    while not event.wait(1.0):
        if time.monotonic() > deadline or over():
            raise SystemExit(f"gave up: {what}")


_told: list[int] = []  # pipes stay open: a pod that comes to its pipe late finds its word there


def tell(run: str, size: int) -> None:
    """Give a run's pods the word to end."""
    file = Path(setting("TOLD")) / run
    if not setting("PIPES"):
        file.touch()
        return
    _told.append(os.open(file, os.O_RDWR))
    os.write(_told[-1], b"\n" * size)


class Counted:
    """Requests by phase."""

    def __init__(self, proxy: CountingProxy) -> None:
        self._proxy, self._before = proxy, proxy.counts()
        self.calls: dict[str, dict[str, int]] = {}

    def end(self, phase: str) -> None:
        """All since the last call belong to this phase."""
        now = self._proxy.counts()
        self.calls[phase] = dict(sorted((now - self._before).items()))
        self._before = now


@dataclasses.dataclass(frozen=True)
class Place:
    """Where pods run: the proxy before it, a client that goes past the proxy, the namespace."""

    proxy: CountingProxy
    kubeconfig: str
    api: Any
    namespace: str


class Limit:
    """The pods straight through the API: one client creates them, waits by a watch and deletes them."""

    name = "limit"

    def __init__(self, place: Place) -> None:
        from kubernetes import client, config

        self._place = place
        self._connection = config.new_client_from_config(place.kubeconfig)
        self._api = client.CoreV1Api(self._connection)

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def measure(self, size: int, run: str, hold: float) -> Figures:
        """One gang."""
        from kubernetes import watch

        place = self._place
        observer = PodObserver(place.api, place.namespace, run, size)
        observer.start()
        counted = Counted(place.proxy)
        begun = time.time()
        for index in range(size):
            self._api.create_namespaced_pod(place.namespace, manifest(run, index))
        wait_for(observer.running, observer)
        counted.end(CALLS_STARTING)
        time.sleep(hold)
        counted.end(CALLS_WAITING)
        tell(run, size)
        told, left = time.time(), size
        for event in watch.Watch().stream(
            self._api.list_namespaced_pod, place.namespace, label_selector=f"{LABEL}={run}"
        ):
            pod = event["object"]
            if event["type"] != "DELETED" and pod.status.phase == "Succeeded":
                if not pod.metadata.deletion_timestamp:
                    self._api.delete_namespaced_pod(pod.metadata.name, place.namespace)
                    left -= 1
                if not left:
                    break
        wait_for(observer.gone, observer)
        counted.end(CALLS_ENDING)
        return Figures(self.name, size, observer.running_at - begun, observer.gone_at - told, counted.calls)


class AirflowWay:
    """A DAG of an embedded platform."""

    def __init__(self, name: str, dag: str, platform: Platform, place: Place) -> None:
        self.name = name
        self._dag, self._platform, self._place = dag, platform, place
        self._idle = 0.0  # CPU-seconds a second

    def prepare(self, size: int, seconds: float = 8.0) -> None:
        """Run a gang that doesn't count, then see what Airflow uses while it does nothing."""
        self._platform.airflow.wait_for_dag(self._dag)
        self._platform.airflow.set_paused(self._dag, False)
        self.measure(size, f"{self.name}-first", 0.0)
        before = cpu_of(self._platform)
        time.sleep(seconds)
        self._idle = sum(since(before, self._platform).values()) / seconds

    def measure(self, size: int, run: str, hold: float) -> Figures:
        """One gang, by one run of the DAG."""
        place, airflow = self._place, self._platform.airflow
        observer = PodObserver(place.api, place.namespace, run, size)
        observer.start()
        counted, before = Counted(place.proxy), cpu_of(self._platform)
        begun = time.time()
        airflow.trigger(self._dag, {"size": size, "run": run}, run_id=run)

        def over() -> bool:
            return airflow.run(self._dag, run).is_over

        wait_for(observer.running, observer, over=over)
        counted.end(CALLS_STARTING)
        time.sleep(hold)
        pss = pss_of(self._platform)
        counted.end(CALLS_WAITING)
        for folder in self._platform.storage.glob(f"jobs/{self._dag}/{run}"):
            JobRecord.open(folder).finish(JobState.SUCCEEDED)
        tell(run, size)
        told = time.time()
        while not over():
            time.sleep(0.5)
        # After the run nobody else deletes pods; a failed run of plain operators leaves them.
        state = airflow.run(self._dag, run).state
        if state != "success":
            raise SystemExit(f"run {run} of {self._dag} ended as {state}")
        wait_for(observer.gone, observer)
        ended = time.time()
        counted.end(CALLS_ENDING)
        return Figures(
            self.name,
            size,
            observer.running_at - begun,
            observer.gone_at - told,
            counted.calls,
            since(before, self._platform),
            self._idle * (ended - begun),
            pss,
        )


def airflow_processes(platform: Platform) -> dict[str, list[psutil.Process]]:
    """Airflow's processes with their children, by component."""
    found = {}
    for service in platform.state["services"]:
        if service["pid"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(service["pid"])
                found[service["name"]] = [root, *root.children(recursive=True)]
    return found


def cpu_of(platform: Platform) -> dict[str, float]:
    """CPU-seconds of Airflow's components so far, with those of processes that have ended."""
    found: dict[str, float] = {}
    for name, processes in airflow_processes(platform).items():
        found[name] = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[name] += times.user + times.system + times.children_user + times.children_system
    return found


def since(before: Mapping[str, float], platform: Platform) -> dict[str, float]:
    """CPU-seconds since then."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in cpu_of(platform).items()}


def pss_of(platform: Platform) -> dict[str, int]:
    """Bytes of Airflow's components, shared pages counted in part."""
    found: dict[str, int] = {}
    for name, processes in airflow_processes(platform).items():
        found[name] = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                found[name] += process.memory_full_info().pss
    return found
