"""How fast training is: our strategies, the limit, Keras `fit` and TF1's SyncReplicasOptimizer, side by side.

    .venv/bin/python benchmarks/training.py [--windows 5] [--seconds 3] [--only PATTERN] [--out benchmarks/training.md]

An MNIST-shaped set in TFRecords (28 x 28 grayscale, made of scikit-learn's digits), an MLP 784-500-10 and a
LeNet-like CNN, batches of 100 and 1024. Each contender trains for at least `--windows` windows of `--seconds`,
after its start-up; the figure is the median window. The limit is measured before and after the others, to show how
much the machine itself moved. CPU figures count all processes of a contender.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
CASES = [(model, batch) for model in ("mlp", "cnn") for batch in (100, 1024)]
LIMIT, LIMIT_AGAIN = "bare loop from memory (the limit)", "the limit again, at the end"
LOCAL, FIT, CLASSIC = "local", "Keras fit", "TF1 SyncReplicasOptimizer, 1 ps + 2 workers"


@dataclasses.dataclass(frozen=True)
class Figures:
    """Examples a second of each window, examples a CPU-second of each, and what else is known."""

    rates: Sequence[float]
    cpu_rates: Sequence[float]
    loss: float
    input_wait: float | None = None

    @property
    def rate(self) -> float:
        """The median window's examples a second."""
        return statistics.median(self.rates)

    @property
    def cpu_rate(self) -> float:
        """The median window's examples a CPU-second."""
        return statistics.median(self.cpu_rates)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how long."""

    model: str
    batch: int
    manifest: str
    windows: int
    seconds: float


# ---- data


def make_records(folder: Path, rows: int = 60_000) -> str:
    """MNIST-shaped records: the 1,797 digits, enlarged to 28 x 28, shifted, with noise; the manifest's path."""
    import numpy as np
    from sklearn.datasets import load_digits

    from trainers.records.build import prepare

    rng = np.random.default_rng(1)
    digits = load_digits()
    small = np.repeat(np.repeat(digits.images * (255 / 16), 3, axis=1), 3, axis=2)  # 24 x 24
    chosen = rng.integers(0, len(small), rows)
    images = rng.integers(0, 40, (rows, 28, 28)).astype(np.float32)
    top, left = rng.integers(0, 5, (2, rows))
    for i, (which, y, x) in enumerate(zip(chosen, top, left, strict=True)):
        images[i, y : y + 24, x : x + 24] += small[which]
    raw = folder / "raw"
    raw.mkdir()
    write_idx(raw / "train-images-idx3-ubyte", np.clip(images, 0, 255).astype(np.uint8))
    write_idx(raw / "train-labels-idx1-ubyte", digits.target[chosen].astype(np.uint8))
    done = prepare(
        raw, folder / "records", name="mnist", label="label", eval_fraction=0.02, shards=4, progress=quiet
    )
    return str(done.path)


def write_idx(path: Path, array: Any) -> None:
    """An array of uint8 in MNIST's own format."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.tobytes())


def quiet(_line: str) -> None:
    """No progress."""


# ---- contenders


def peer(script: str, case: Case, *more: str) -> Figures:
    """One of benchmarks/peers in a process of its own."""
    command = [
        sys.executable, str(HERE / "peers" / script), "--manifest", case.manifest, "--model", case.model,
        "--batch", str(case.batch), "--windows", str(case.windows), "--seconds", str(case.seconds), *more,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-3000:]}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    if "marks" in said:  # of synchronous workers: an update has seen both their batches
        rates, cpu_rates = between(said["marks"], 2 * case.batch)
        return Figures(rates, cpu_rates, said["loss"])
    return Figures(said["rates"], said["cpu_rates"], said["loss"])


def between(marks: Sequence[tuple[float, float, float]], examples: int) -> tuple[list[float], list[float]]:
    """Rates between marks (step, time, CPU seconds), by time and by CPU time."""
    pairs = list(itertools.pairwise(marks))
    rates = [examples * (b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs]
    return rates, [examples * (b[0] - a[0]) / max(b[2] - a[2], 1e-6) for a, b in pairs]


def gang(case: Case, strategy: Mapping[str, Any], *, workers: int = 0, ps: int = 0, **args: Any) -> Figures:
    """A real gang, launchers and all; its heartbeats are what is measured."""
    from trainers.job.plan import Cluster, make_plan
    from trainers.job.ports import free_ports
    from trainers.job.spec import Budgets, Resources, Strategy, TrainingJob, standard_roles
    from trainers.runtime.local_gang import LocalGang

    kind = Strategy.from_dict(strategy)
    alone = not workers
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as folder:
        job = TrainingJob(
            "bench",
            "training_models",
            args={
                "model": case.model,
                "batch_size": case.batch,
                "learning_rate": 0.02,
                "steps": 1 << 30,
                "seed": 1,
                "checkpoint_every": 1 << 29,
                **args,
            },
            roles=standard_roles(
                kind, workers=workers, ps=ps, resources={"default": Resources(cpu=2.0 if alone else 1.0)}
            ),
            strategy=kind,
            budgets=Budgets(start=300.0, stall=300.0),
            inputs={"records": case.manifest},
            output=folder,
        )
        plan = make_plan(job, Cluster.process(free_ports(1 + workers + ps)), gang="bench-00000000")
        together = 1
        if kind.kind.value == "multi_worker":
            together = 1 + workers
        elif kind.kind.value == "mirrored":
            together = int(args["devices"])
        elif kind.sync:
            together = workers - kind.backup_workers
        with LocalGang(plan, env={"PYTHONPATH": str(HERE)}) as run:
            run.start()
            return follow(run, case, case.batch * together)


def follow(run: Any, case: Case, examples: int) -> Figures:
    """Watch a gang that trains until there are enough windows."""
    record = run.record
    processes = {psutil.Process(p.pid) for p in run.launchers.values()}
    deadline = time.monotonic() + 300
    marks: list[tuple[float, float, float]] = []
    waits: list[float] = []
    last, settled = None, None
    while len(marks) <= case.windows:
        if run.poll() or time.monotonic() > deadline:
            logs = "\n".join(run.log(name)[-2000:] for name in run.launchers)
            raise SystemExit(f"the gang did not train: {run.exit_codes}\n{logs}")
        time.sleep(0.005)
        beat = record.heartbeat("chief", 0)
        if beat is None or beat.phase != "training" or not beat.step or beat.step == last:
            continue
        now, last = time.monotonic(), beat.step
        settled = settled or now
        if now - settled < 3.0:  # the first calls are short: how many steps to pack is being found out
            continue
        if not marks or now - marks[-1][1] >= case.seconds:
            marks.append((beat.step, now, cpu_of(processes)))
            waits.append(beat.input_wait or 0.0)
    rates, cpu_rates = between(marks, examples)
    return Figures(rates, cpu_rates, beat.loss or float("nan"), statistics.median(waits[1:]))


def cpu_of(roots: set[psutil.Process]) -> float:
    """CPU seconds that trees of processes have used."""
    total = 0.0
    for root in roots:
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


CONTENDERS: dict[str, Any] = {
    LIMIT: lambda case: peer("bare_loop.py", case),
    LOCAL: lambda case: gang(case, {"kind": "local"}),
    FIT: lambda case: peer("keras_fit.py", case, "--per-call", "1"),
    "Keras fit, 32 steps a call": lambda case: peer("keras_fit.py", case, "--per-call", "32"),
    "mirrored, 2 devices": lambda case: gang(case, {"kind": "mirrored"}, devices=2),
    "parameter_server, 1 ps + 2 workers": lambda case: gang(
        case, {"kind": "parameter_server"}, workers=2, ps=1
    ),
    "parameter_server sync, 1 ps + 2 workers": lambda case: gang(
        case, {"kind": "parameter_server", "sync": True}, workers=2, ps=1
    ),
    "multi_worker, 2": lambda case: gang(case, {"kind": "multi_worker"}, workers=1),
    CLASSIC: lambda case: peer("sync_replicas.py", case),
    LIMIT_AGAIN: lambda case: peer("bare_loop.py", case),
}


# ---- the page


def page(found: Mapping[tuple[str, int], Mapping[str, Figures]], options: argparse.Namespace) -> str:
    """The tables in Markdown."""
    memory = psutil.virtual_memory().total / 2**30
    lines = [
        "# Training: examples a second",
        "",
        f"Set-up: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}, Python "
        f"{platform.python_version()}, {dt.date.today()}; each figure is the median of {options.windows} windows of "
        f"{options.seconds:g} s.",
        "Command: `.venv/bin/python benchmarks/training.py --out benchmarks/training.md`. The machine is shared: trust",
        "ratios (the limit is measured twice, to show by how much), and run it again on yours.",
    ]
    for (model, batch), contenders in found.items():
        limit = contenders[LIMIT].rate if LIMIT in contenders else None
        lines += [
            "",
            f"## {model.upper()}, batch {batch}",
            "",
            "| | examples/s | of the limit | examples/CPU-s | input wait | slowest and fastest window |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, f in contenders.items():
            share = f"{f.rate / limit:.0%}" if limit else ""
            wait = "" if f.input_wait is None else f"{f.input_wait:.1%}"
            spread = f"{min(f.rates):,.0f} - {max(f.rates):,.0f}"
            lines.append(f"| {name} | {f.rate:,.0f} | {share} | {f.cpu_rate:,.0f} | {wait} | {spread} |")
    return "\n".join(lines) + "\n"


def wanted(found: Mapping[tuple[str, int], Mapping[str, Figures]]) -> str:
    """Which of the goals are met, as a table."""
    lines = ["", "## Goals", "", "| goal | found |", "| --- | --- |"]
    for (model, batch), c in found.items():
        title = f"{model.upper()}, batch {batch}"
        if LOCAL in c and LIMIT in c and (model == "cnn" or batch == 100):
            goal = 0.95 if model == "cnn" else 0.85
            limit = statistics.fmean(c[name].rate for name in (LIMIT, LIMIT_AGAIN) if name in c)
            lines.append(f"| {title}: local at least {goal:.0%} of the limit | {c[LOCAL].rate / limit:.0%} |")
        modes = {n: f for n, f in c.items() if n.startswith(("mirrored", "parameter", "multi"))}
        for peer_name in [FIT] * (model == "cnn") + [CLASSIC]:
            if peer_name in c:
                ratios = ", ".join(
                    f"{n.split(',')[0]} {f.rate / c[peer_name].rate:.2f}" for n, f in modes.items()
                )
                lines.append(
                    f"| {title}: every distributed mode ahead of {peer_name.split(',')[0]} | {ratios} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="contenders whose names match this pattern")
    parser.add_argument("--cases", default="", help="such as mlp-100,cnn-1024")
    parser.add_argument("--manifest", help="records made before, instead of new ones")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [c for c in CASES if not options.cases or f"{c[0]}-{c[1]}" in options.cases.split(",")]
    found: dict[tuple[str, int], dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as folder:
        manifest = options.manifest or make_records(Path(folder))
        for model, batch in cases:
            case = Case(model, batch, manifest, options.windows, options.seconds)
            figures = found.setdefault((model, batch), {})
            for name, run in CONTENDERS.items():
                if not re.search(options.only, name):
                    continue
                figures[name] = run(case)
                print(f"{model} {batch:5} {name:45} {figures[name].rate:10,.0f} examples/s", flush=True)
    text = page(found, options) + wanted(found)
    text += "\n<details><summary>raw numbers</summary>\n\n```json\n"
    text += json.dumps(
        {f"{m}-{b}": {n: [round(r) for r in f.rates] for n, f in c.items()} for (m, b), c in found.items()},
        indent=1,
    )
    text += "\n```\n\n</details>\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
