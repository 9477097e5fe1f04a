"""The page of the gang benchmark, in Markdown."""

from __future__ import annotations

import collections
import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from gang_ways import Figures

__all__ = ["page"]

TITLES = {"limit": "by hand (the limit)", "ours": "**Trainyard**", "plain": "plain pod operators"}
LATER = {16: 10.0, 64: 30.0}
"""Seconds after the limit by which a gang of that size is wanted to run."""

_HEAD = """# Gangs: what each replica costs beside its pod

Set-up: {machine}, Python {python}, {date}. {where} The machine is shared: trust ratios and CPU-seconds, and run it
again on yours. Command: `.venv/bin/python benchmarks/gang.py`, with `KUBECONFIG` for a cluster.
"""

_GANGS = """## Gangs of pods that do nothing

Three ways in one run, {repeats} each, on {where}; medians. *By hand*: one client creates the pods one after another,
watches, and deletes each that has ended. *Trainyard*: the train group (plan, admit, service, replicas, verdict,
cleanup) with deferrable replicas on the embedded platform. *Plain*: `KubernetesPodOperator.partial(deferrable=True)
.expand(...)` on an Airflow that has its own defaults where the platform chooses others for speed (no preloaded
operator, the scheduler's idle sleep of 1 s, two parsing processes). Both Airflows run {slots} tasks at once and keep
their data in SQLite. All replicas wait for {hold:g} s once all run; then all are told to end at once.

*Calls* are requests at the API server, counted by a proxy before it, a replica: while the gang starts and ends, and a
minute of waiting. *CPU* is that of all of Airflow's processes from the trigger to the run's end, a replica, with what
they use anyway (*idle*) in it; *each more* is what a replica costs beyond those of the next smaller gang.
"""


def page(raw: Mapping[str, Any]) -> str:
    """All of it; parts that were not measured are left out."""
    gangs, deferred = raw.get("gangs"), raw.get("deferred")
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    where = (
        "Pods of the gangs run on a real cluster on the same machine." if gangs and gangs["cluster"] else ""
    )
    parts = [
        _HEAD.format(
            machine=f"{os.cpu_count()} cores, {memory}, {platform.system()} {platform.machine()}",
            python=platform.python_version(),
            date=dt.date.today(),
            where=where or "Pods are processes (the process kubelet).",
        )
    ]
    if gangs:
        parts.append(_gangs(gangs))
    if deferred:
        parts.append(_deferred(deferred))
    parts.append(
        f"<details><summary>raw numbers</summary>\n\n```json\n{json.dumps(raw, indent=1)}\n```\n\n</details>\n"
    )
    return "\n".join(parts)


def _gangs(raw: Mapping[str, Any]) -> str:
    runs = [Figures(**row) for row in raw["runs"]]
    sizes = sorted({figures.size for figures in runs})
    found = {
        (way, size): [f for f in runs if (f.way, f.size) == (way, size)] for way in TITLES for size in sizes
    }
    text = _GANGS.format(
        repeats="once" if len(runs) == 3 * len(sizes) else f"{len(runs) // 3 // len(sizes)} times",
        where="a Kubernetes cluster on this machine" if raw["cluster"] else "the process kubelet",
        slots=raw["slots"],
        hold=raw["hold"],
    )
    rows = [_row(found, way, sizes, size, raw["hold"]) for size in sizes for way in TITLES]
    heads = [
        "gang of",
        "way",
        "all running",
        "all gone",
        "calls",
        "calls a minute",
        "CPU-s",
        "idle",
        "each more",
    ]
    parts = [_wanted, _calls, _components, _memory]
    return "\n".join([text, _table(heads, rows), *(part(found, sizes) for part in parts)])


def _row(
    found: Mapping[Any, Sequence[Figures]], way: str, sizes: Sequence[int], size: int, hold: float
) -> list[str]:
    runs = found[way, size]
    airflow = way != "limit"
    smaller = sizes[sizes.index(size) - 1] if size != sizes[0] else 0
    more = (_cpu(runs) - _cpu(found[way, smaller])) / (size - smaller) if airflow and smaller else None
    return [
        str(size),
        TITLES[way],
        f"{_median(f.running for f in runs):.1f} s",
        f"{_median(f.gone for f in runs):.1f} s",
        f"{_median(f.calls_a_replica() for f in runs):.1f}",
        f"{_median(f.waiting_calls(hold) for f in runs):.1f}",
        f"{_median(f.cpu_a_replica() for f in runs):.2f}" if airflow else "",
        f"{_median(f.idle / size for f in runs):.2f}" if airflow else "",
        f"{more:.2f}" if more is not None else "",
    ]


def _wanted(found: Mapping[Any, Sequence[Figures]], sizes: Sequence[int]) -> str:
    def of(way: str, size: int, what: Any) -> float:
        return _median(what(f) for f in found[way, size])

    def calls(f: Figures) -> float:
        return f.calls_a_replica()

    def cpu(f: Figures) -> float:
        return f.cpu_a_replica()

    rows = []
    for size, seconds in LATER.items():
        if size in sizes:
            late = of("ours", size, lambda f: f.running) - of("limit", size, lambda f: f.running)
            rows.append(
                [f"{size} running after the limit's", f"{seconds:g} s", f"{late:.1f} s", late <= seconds]
            )
    first, last = sizes[0], sizes[-1]
    for name, what in (("calls a replica", calls), ("CPU-s a replica", cpu)):
        small, large = of("ours", first, what), of("ours", last, what)
        if first != last:
            rows.append(
                [
                    f"{name}, {last} to {first}",
                    "at most the same",
                    f"{large:.2f} to {small:.2f}",
                    large <= small,
                ]
            )
        share = large / of("plain", last, what)
        rows.append([f"{name}, to the plain way's, {last}", "under 50%", f"{share:.0%}", share < 0.5])
    table = [[*row[:3], "reached" if row[3] else "**not reached**"] for row in rows]
    return "\n" + _table(["", "wanted", "found", ""], table)


def _calls(found: Mapping[Any, Sequence[Figures]], sizes: Sequence[int]) -> str:
    size = sizes[-1]
    counts = {}
    for way in TITLES:
        runs = found[way, size]
        total: collections.Counter[str] = collections.Counter()
        for figures in runs:
            for phase in ("starting", "ending"):
                total.update(figures.calls[phase])
        counts[way] = {kind: count / len(runs) for kind, count in total.items()}
    kinds = sorted({kind for row in counts.values() for kind in row})
    rows = [[kind, *(f"{counts[way].get(kind, 0):.0f}" for way in TITLES)] for kind in kinds]
    return f"\nRequests of a gang of {size}, while it starts and ends:\n\n" + _table(
        ["request", *TITLES.values()], rows
    )


def _components(found: Mapping[Any, Sequence[Figures]], sizes: Sequence[int]) -> str:
    """Where the CPU goes."""
    ways, size = [way for way in TITLES if way != "limit"], sizes[-1]
    rows = [
        [name, *(f"{_median(f.cpu[name] for f in found[way, size]) / size:.2f}" for way in ways)]
        for name in found["ours", size][0].cpu
    ]
    return f"\nCPU-seconds a replica of a gang of {size}:\n\n" + _table(
        ["", *(TITLES[way] for way in ways)], rows
    )


def _memory(found: Mapping[Any, Sequence[Figures]], sizes: Sequence[int]) -> str:
    ways = [way for way in TITLES if way != "limit"]
    components = list(found["ours", sizes[0]][0].pss)
    rows = [
        [
            name,
            *(
                f"{_median(f.pss[name] for f in found[way, size]) / 1e6:.0f}"
                for way in ways
                for size in sizes
            ),
        ]
        for name in components
    ]
    rows.append(
        [
            "together",
            *(
                f"{_median(sum(f.pss.values()) for f in found[way, size]) / 1e6:.0f}"
                for way in ways
                for size in sizes
            ),
        ]
    )
    heads = [f"{TITLES[way]}, {size}" for way in ways for size in sizes]
    return "\nMemory of Airflow's processes while all replicas wait (PSS, MB):\n\n" + _table(
        ["", *heads], rows
    )


def _deferred(raw: Mapping[str, Any]) -> str:
    count, minutes = raw["replicas"], raw["starting"] / 60
    arrived = count - len(raw["wrong"])
    peak = raw["triggerer_peak"] / 1e6
    rows = [
        ["ends that reached their own task", f"{count:,}", f"{arrived:,}", arrived == count],
        ["memory of the triggerer, at most (PSS)", "under 1,000 MB", f"{peak:,.0f} MB", peak < 1000],
    ]
    table = _table(
        ["", "wanted", "found", ""], [[*row[:3], "reached" if row[3] else "**not reached**"] for row in rows]
    )
    more = _table(
        ["", ""],
        [
            ["from the trigger to all deferred", f"{raw['starting']:.0f} s ({count / minutes:.0f} a minute)"],
            [
                "from the word to every task's end",
                f"{raw['ending']:.0f} s ({count / raw['ending'] * 60:.0f} a minute)",
            ],
            ["Airflow's CPU for a start", f"{sum(raw['cpu_starting'].values()) / count:.2f} s"],
            ["Airflow's CPU for an end", f"{sum(raw['cpu_ending'].values()) / count:.2f} s"],
            ["Airflow's CPU while all wait", f"{sum(raw['cpu_waiting'].values()) / 60:.0%} of a core"],
            ["of which the triggerer's", f"{raw['cpu_waiting']['triggerer'] / 60:.0%} of a core"],
            ["requests at the API while all wait", f"{raw['waiting_calls']:.1f} a minute"],
            ["all of Airflow's memory, at most", f"{raw['pss_peak'] / 1e6:,.0f} MB"],
            [
                "the process kubelet's memory and threads",
                f"{raw['kubelet'][0] / 1e6:,.0f} MB, {raw['kubelet'][1]:,}",
            ],
        ],
    )
    calls = ", ".join(f"{count:,} {kind}" for kind, count in raw["calls"].items())
    return f"""
## {count:,} deferred replicas

One gang on the process kubelet (`--max-pods`), whose pods are processes that wait for a word and take no CPU; every
{raw["fail_each"]}th fails in the end, the others succeed, all at the same moment. Airflow is the embedded platform:
SQLite, {raw["slots"]} tasks at once, one triggerer with Airflow's own capacity of 1,000 triggers, the default pool of
128 slots, in which deferred tasks don't count. No retries.

{table}
{more}
Requests in all: {calls}.

{_bounds(raw, sum(raw["cpu_starting"].values()) / count)}
"""


def _bounds(raw: Mapping[str, Any], start: float) -> str:
    """What the figures are made of; `start` is in CPU-seconds."""
    count, cores = raw["replicas"], os.cpu_count() or 1
    api, scheduler = (raw["cpu_starting"][name] / count for name in ("api-server", "scheduler"))
    waiting = raw["cpu_waiting"]["scheduler"] / 60
    return f"""What bounds it: a start is one process of a task, {scheduler:.2f} CPU-s of the scheduler with its workers
and {api:.2f} of the API server that they speak to, so {cores} cores can make {cores / start * 60:.0f} a minute if they
do nothing else; the kubelet that starts the pods is on the same ones. A success needs no process, the triggerer ends
it; a failure comes back to a worker. While all wait, the scheduler takes {waiting:.0%} of a core: it looks at every
task of a running DAG run, and on the embedded platform it looks ten times a second (`scheduler_idle_sleep_time`, 1 s by
default). The triggerer is full at 1,000 (`[triggerer] capacity`); beyond that one runs a second one, or leaves roles of
more than 32 replicas to Indexed Jobs, as is the default where the cluster has those."""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cpu(runs: Sequence[Figures]) -> float:
    return _median(sum(figures.cpu.values()) for figures in runs)


def _median(values: Any) -> float:
    return statistics.median(values)
