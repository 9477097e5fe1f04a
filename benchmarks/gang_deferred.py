"""A thousand replicas that wait in the triggerer: does every pod's end reach its task, and what does it take?"""

from __future__ import annotations

import collections
import contextlib
import sqlite3
import time
from typing import Any

import psutil
from gang_ways import PATIENCE, Place, PodObserver, cpu_of, pss_of, since, tell
from trainyard.platform import Platform

__all__ = ["measure_deferred"]

DAG, RUN, TASK = "gang_ours", "deferred", "train.replica"
FAIL_EACH = 50
"""Every so many pods fail, to see that each task gets its own pod's end."""

_ENDED = ("success", "failed", "upstream_failed", "skipped")


class Tasks:
    """The states of the replicas' tasks, read from the platform's database: the API would cost what is measured."""

    def __init__(self, platform: Platform) -> None:
        self._path = f"file:{platform.settings.airflow_database}?mode=ro"

    def rows(self) -> list[tuple[int, str | None]]:
        """Map index and state."""
        with contextlib.closing(sqlite3.connect(self._path, uri=True, timeout=60)) as database:
            query = "select map_index, state from task_instance where dag_id=? and run_id=? and task_id=?"
            return database.execute(query, (DAG, RUN, TASK)).fetchall()  # type: ignore[no-any-return]

    def states(self) -> collections.Counter[str]:
        """How many are in which state."""
        return collections.Counter(state or "none" for index, state in self.rows() if index >= 0)


def measure_deferred(
    platform: Platform, place: Place, replicas: int, kubelet: list[psutil.Process]
) -> dict[str, Any]:
    """Start them, let them wait for a minute, end them all at once; what was seen."""
    airflow, tasks = platform.airflow, Tasks(platform)
    airflow.wait_for_dag(DAG)
    airflow.set_paused(DAG, False)
    observer = PodObserver(place.api, place.namespace, RUN, replicas)
    observer.start()
    found: dict[str, Any] = {"replicas": replicas, "fail_each": FAIL_EACH, "triggerer_peak": 0, "pss_peak": 0}
    begun, cpu = time.time(), cpu_of(platform)

    def look(what: str) -> collections.Counter[str]:
        states, pss = tasks.states(), pss_of(platform)
        found["triggerer_peak"] = max(found["triggerer_peak"], pss["triggerer"])
        found["pss_peak"] = max(found["pss_peak"], sum(pss.values()))
        text = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        print(
            f"{time.time() - begun:6.0f} s {what}: {text}; triggerer {pss['triggerer'] / 1e6:.0f} MB, "
            f"Airflow {sum(pss.values()) / 1e6:.0f} MB",
            flush=True,
        )
        if airflow.run(DAG, RUN).is_over and sum(states[s] for s in _ENDED) < replicas:
            raise SystemExit("the run was over before its replicas")
        return states

    def until(what: str, done: Any) -> float:
        deadline = time.monotonic() + 4 * PATIENCE
        while not done(look(what)):
            if time.monotonic() > deadline:
                raise SystemExit(f"gave up while {what}: {observer}")
            time.sleep(10)
        return time.time()

    airflow.trigger(DAG, {"size": replicas, "run": RUN, "fail_each": FAIL_EACH}, run_id=RUN)
    deferred = until("starting", lambda s: s["deferred"] == replicas and observer.running.is_set())
    found["starting"] = deferred - begun
    found["cpu_starting"] = since(cpu, platform)
    found["kubelet"] = [sum(p.memory_full_info().pss for p in kubelet), sum(p.num_threads() for p in kubelet)]
    calls, cpu, waited = place.proxy.counts(), cpu_of(platform), time.time()
    time.sleep(60)
    minutes = (time.time() - waited) / 60
    found["waiting_calls"] = sum((place.proxy.counts() - calls).values()) / minutes
    found["cpu_waiting"] = {name: used / minutes for name, used in since(cpu, platform).items()}
    look("waiting")
    cpu, told = cpu_of(platform), time.time()
    tell(RUN, replicas)
    found["ending"] = until("ending", lambda s: sum(s[state] for state in _ENDED) == replicas) - told
    found["cpu_ending"] = since(cpu, platform)
    found["calls"] = dict(sorted(place.proxy.counts().items()))
    expected = {i: "failed" if i % FAIL_EACH == 0 else "success" for i in range(replicas)}
    wrong = {i: state for i, state in tasks.rows() if i >= 0 and expected[i] != state}
    found["states"] = dict(tasks.states())
    found["wrong"] = wrong
    print(f"of {replicas} ends {replicas - len(wrong)} have reached their task", flush=True)
    return found
