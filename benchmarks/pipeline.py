"""From a started platform to a verified release of digits: where each second goes, and what Airflow costs.

    .venv/bin/python benchmarks/pipeline.py [--runs 3] [--out benchmarks/pipeline.md]

Starts an embedded platform in a folder of its own, runs `digits_retrain` `--runs` times, and beside each run
the peer: the same steps as bare processes one after another, without Airflow, Kubernetes API or warm
interpreter (one process trains, as a script would). A pod's own seconds are seen from outside, by watching the
kubelet's API; a second in which no pod runs and no light task of ours works is Airflow's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform as machine
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from trainyard.platform import Platform
from trainyard.platform.pipeline_run import follow, start_run, unpaused

from trainers.job.labels import LABEL_COMPONENT, LABEL_INDEX, LABEL_ROLE

DAG = "digits_retrain"
# Plain tasks that do work of the pipeline's own in Airflow's worker; all other plain tasks count as overhead.
LIGHT = ("ingest", "release.publish", "release.deploy", "release.verify", "release.promote")


class PodWatch(threading.Thread):
    """Notes when each pod's process starts and ends, in this process's clock: Kubernetes tells whole seconds."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        super().__init__(daemon=True)
        from kubernetes import client, config

        self._namespace = namespace
        self._api = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
        self.spans: dict[str, list[float | None]] = {}
        self.names: dict[str, str] = {}

    def run(self) -> None:
        from kubernetes import watch

        for event in watch.Watch().stream(self._api.list_namespaced_pod, self._namespace):
            now, pod = time.time(), event["object"]
            states = [s.state for s in (pod.status.container_statuses or ())]
            key = pod.metadata.uid
            labels = pod.metadata.labels
            if any(s.running or s.terminated for s in states) and key not in self.spans:
                self.spans[key] = [now, None]
                role = labels.get(LABEL_ROLE)
                self.names[key] = f"{role}-{labels[LABEL_INDEX]}" if role else labels.get("task_id", "?")
                self.names[key] += "" if role else f" ({labels.get(LABEL_COMPONENT)})"
            if any(s.terminated for s in states) and self.spans[key][1] is None:
                self.spans[key][1] = now


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class MemoryWatch(threading.Thread):
    """The greatest proportional set size of a process tree, bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root, self.peak, self.done = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(1.0):
            total = 0
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.peak = max(self.peak, total)


def one_run(platform: Platform, number: int) -> dict[str, Any]:
    """Run the pipeline once; its split."""
    watch = PodWatch(platform.settings.kubeconfig, platform.settings.namespace)
    watch.start()
    memory = MemoryWatch(platform.state["supervisor"]["pid"])
    memory.start()
    dag = platform.airflow.wait_for_dag(DAG)
    begin = time.time()
    run = start_run(platform.airflow, dag, {"seed": number})
    with unpaused(platform.airflow, dag, platform.settings.pause_notes):
        *_, snapshot = follow(platform.airflow, run, platform.storage)
    memory.done.set()
    if snapshot.run.state != "success":
        raise SystemExit(
            f"run {run.run_id} ended as {snapshot.run.state}; see `trainyard status` for its logs"
        )
    tasks = [t for t in snapshot.tasks if t.started and t.ended]
    # A verified release: the clock stops when `promote` has ended; what comes after keeps nobody waiting.
    end = max(t.ended for t in tasks if t.task_id == "release.promote")
    pods = {
        watch.names[key]: (max(span[0], begin), min(span[1] or end, end))
        for key, span in watch.spans.items()
        if (span[1] or end) > begin
    }
    light = {t.task_id: (t.started, t.ended) for t in tasks if t.task_id in LIGHT}
    own = covered([*pods.values(), *light.values()])
    return {
        "wall": end - begin,
        "airflow": end - begin - own,
        "pods": {name: b - a for name, (a, b) in sorted(pods.items(), key=lambda item: item[1])},
        "light": {name: b - a for name, (a, b) in light.items()},
        "train": covered([span for name, span in pods.items() if name.partition("-")[2].isdigit()]),
        "tasks": len(tasks),
        "peak": memory.peak,
    }


def bare_run(storage: Path, scratch: Path) -> dict[str, float]:
    """The peer: the same steps by hand, a fresh process each, one after another; seconds a step."""
    from trainers.job.plan import Cluster, make_plan
    from trainers.job.record import JobRecord
    from trainers.job.spec import TrainingJob

    seconds: dict[str, float] = {}

    def step(name: str, *command: str, **env: str) -> dict[str, Any]:
        message = scratch / f"{name}.json"
        started = time.time()
        subprocess.run(
            [sys.executable, "-m", *command],
            env={**os.environ, "TRAINYARD_TERMINATION_LOG": str(message), **env},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        seconds[name] = time.time() - started
        text = message.read_text() if message.exists() else ""
        return json.loads(text).get("result", {}) if text else {}

    spec = {
        "source": str(storage / "raw/digits"),
        "output": str(scratch / "records"),
        "name": "digits",
        "label": "label",
    }
    records = step("prepare", "trainers.records", "--spec", json.dumps(spec))
    job = TrainingJob(
        "bare",
        "trainers.models.digits",
        {"steps": 400, "batch_size": 64, "seed": 1},
        inputs={"records": records["manifest"]},
        output=str(scratch / "job"),
    )
    plan = make_plan(job, Cluster.process([0]), gang="bare-00000000")
    JobRecord.create(plan)
    step("train", "trainers.runtime.launcher", **plan.replicas[0].env)
    common = {"job": job.output, "manifest": records["manifest"]}
    step("evaluate", "trainers.evaluate", "--spec", json.dumps({**common, "champion": None}))
    step("export", "trainers.export", "--spec", json.dumps({**common, "output": str(scratch / "export")}))
    return seconds


@contextlib.contextmanager
def fresh_platform(home: Path) -> Iterator[tuple[Platform, float]]:
    """A platform in its own folder, with the seconds it took to start."""
    platform = Platform(home)
    started = time.time()
    with platform.running():
        yield platform, time.time() - started


def median(values: list[float]) -> float:
    return statistics.median(values)


def report(starts: list[float], runs: list[dict[str, Any]], bare: list[dict[str, float]]) -> str:
    """The page, in Markdown."""
    cpu = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {machine.platform()}"
    lines = [
        "# Pipeline: from trigger to a verified release of digits",
        "",
        f"Set-up: {cpu}, Python {machine.python_version()}, {dt.date.today()}; n = {len(runs)}, medians.",
        "Command: `.venv/bin/python benchmarks/pipeline.py`. The machine is shared: trust ratios, re-run on yours.",
        "",
        "| what | wanted | median | each run |",
        "| --- | --- | --- | --- |",
    ]

    def row(name: str, wanted: str, values: list[float], unit: str = "s") -> None:
        each = ", ".join(f"{v:.1f}" for v in values)
        lines.append(f"| {name} | {wanted} | {median(values):.1f} {unit} | {each} |")

    row("platform start (first: makes its database)", "< 30 s", starts)
    row("trigger to verified release", "< 75 s", [r["wall"] for r in runs])
    row("of which Airflow's", "< 20 s", [r["airflow"] for r in runs])
    row("the same steps by hand, cold, no gang", "peer", [sum(b.values()) for b in bare])
    row("peak memory of all processes (PSS)", "< 3,500 MB", [r["peak"] / 1e6 for r in runs], "MB")
    lines += [
        "",
        f"{runs[0]['tasks']} task instances a run.",
        "",
        "| stage | median | by hand |",
        "| --- | --- | --- |",
    ]
    stages = [*runs[0]["light"], *runs[0]["pods"]]
    for name in stages:
        values = [{**r["light"], **r["pods"]}.get(name, 0.0) for r in runs]
        step = next((s for s in bare[0] if s in name), None)
        hand = f"{median([b[step] for b in bare]):.1f} s" if step else ""
        lines.append(f"| {name} | {median(values):.1f} s | {hand} |")
    lines.append(
        f"| training as a whole (first replica up to last down) | {median([r['train'] for r in runs]):.1f} s "
        f"| {median([b['train'] for b in bare]):.1f} s |"
    )
    raw = {"starts": starts, "runs": runs, "bare": bare}
    lines += [
        "",
        "<details><summary>raw numbers</summary>",
        "",
        "```json",
        json.dumps(raw, indent=1),
        "```",
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3, help="how often the platform is started")
    parser.add_argument("--out", type=Path, default=None, help="write the page there too")
    options = parser.parse_args()
    starts: list[float] = []
    runs: list[dict[str, Any]] = []
    bare: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="trainyard-benchmark-") as folder:
        home = Path(folder) / "home"
        for _ in range(max(0, options.starts - 1)):
            with fresh_platform(home) as (_platform, seconds):
                starts.append(seconds)
        with fresh_platform(home) as (platform, seconds):
            starts.append(seconds)
            for number in range(options.runs):
                runs.append(one_run(platform, number))
                print(json.dumps(runs[-1]), flush=True)
                scratch = Path(folder) / f"bare-{number}"
                scratch.mkdir()
                bare.append(bare_run(platform.storage, scratch))
                print(json.dumps(bare[-1]), flush=True)
    page = report(starts, runs, bare)
    print(page)
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
