"""The page of benchmarks/serving.py: tables, goals with verdicts, and words about what bounds, all from the figures."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Results", "page"]

Run = Mapping[str, Any]

TITLES = {
    "ours: gRPC": "**ours**, gRPC",
    "ours, batching: gRPC": "**ours**, gRPC, `--enable_batching`",
    "ours, pool: gRPC": "ours, gRPC, `--grpc_direct=false`",
    "no-op: gRPC": "ceiling: no-op server of grpcio",
    "MLServer: gRPC": "MLServer, gRPC",
    "ours: REST": "**ours**, REST",
    "MLflow: REST": "`mlflow models serve`, REST",
    "MLServer: REST": "MLServer, REST",
}
MODELS = {
    "mlp": "MLP, 784-500-10",
    "cnn": "CNN, two convolutions and two dense layers",
}


@dataclass(frozen=True)
class Results:
    """What was measured: runs of "contender | model | batch | clients", calls in process, and the rest."""

    runs: Mapping[str, Sequence[Run]]
    calls: Mapping[str, Sequence[Run]]
    missing: Mapping[str, str]
    memory: Mapping[str, int]
    swaps: Sequence[Run]
    releases: Sequence[Run]
    commands: Run
    sizes: Mapping[str, int]

    def middle(self, contender: str, cell: str, value: str = "rate") -> float | None:
        """The median of the rounds, None where it was not measured."""
        runs = (self.calls if contender in ("session", "signature") else self.runs).get(
            f"{contender} | {cell}"
        )
        return statistics.median(run[value] for run in runs) if runs else None

    def ratio(self, one: str, other: str, cell: str, value: str = "rate") -> float | None:
        a, b = self.middle(one, cell, value), self.middle(other, cell, value)
        return a / b if a is not None and b else None

    def tail(self, contender: str, cell: str) -> float | None:
        """p99 to p50, the median of the rounds."""
        runs = self.runs.get(f"{contender} | {cell}")
        return statistics.median(run["p99"] / run["p50"] for run in runs) if runs else None

    def spread(self) -> float:
        """How many times the best round's rate was that of the worst, in the middle of all that was measured."""
        rates = [[run["rate"] for run in runs] for runs in self.runs.values()]
        return statistics.median(max(rate) / min(rate) for rate in rates)

    def cells(self) -> list[str]:
        """ "model | batch | clients" of all that was measured, in the order of measuring."""
        return list(dict.fromkeys(key.split(" | ", 1)[1] for key in self.runs))


def _prose(text: str) -> list[str]:
    """Lines of a paragraph, or of an item of a list."""
    return textwrap.wrap(text, 118, subsequent_indent="  " * text.startswith("- "), break_on_hyphens=False)


def page(results: Results, options: argparse.Namespace) -> str:
    lines = [*_head(results, options), *_goals(results, options)]
    for kind in dict.fromkeys(cell.rsplit(" | ", 1)[0] for cell in results.cells()):
        lines += _table(results, kind)
    lines += [*_calls(results), *_memory(results), *_swaps(results), *_releases(results), *_bounds(results)]
    raw = {
        "runs": results.runs,
        "in process": results.calls,
        "versions": {"swaps": results.swaps, "releases": results.releases, "commands": results.commands},
    }
    lines += [
        "",
        "<details><summary>raw numbers</summary>",
        "",
        "Seconds and requests a second.",
        "",
        "```json",
    ]
    parts = [
        f' "{name}": {{\n'
        + ",\n".join(f'  "{k}": {json.dumps(_rounded(v))}' for k, v in value.items())
        + "\n }"
        for name, value in raw.items()
    ]
    lines += ["{", ",\n".join(parts), "}"]
    return "\n".join([*lines, "```", "", "</details>"]) + "\n"


def _head(results: Results, options: argparse.Namespace) -> list[str]:
    memory = psutil.virtual_memory().total / 2**30
    names = ("tensorflow", "grpcio", "protobuf", "uvicorn", "mlflow")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    sizes = ", ".join(f"{MODELS[model]} ({size / 1e6:.1f} MB)" for model, size in results.sizes.items())
    command = ".venv/bin/python benchmarks/serving.py" + (" --quick" if options.quick else "")
    if (options.rounds, options.seconds) != (5, 0.8) and not options.quick:
        command += f" --rounds {options.rounds} --seconds {options.seconds:g}"
    lines = [
        "# Serving: requests a second, latency, and what a release takes",
        "",
        *_prose(
            f"Set-up: {os.cpu_count()} cores ({_cpu_model()}), {memory:.0f} GiB, {platform.system()} "
            f"{platform.machine()}, Python {platform.python_version()}, {versions}, {dt.date.today()}. "
            f"Models: {sizes}. Each figure is the median of {options.rounds} interleaved rounds of "
            f"{options.seconds:g} s. Command: `{command} --markdown benchmarks/serving.md`. Clients and servers share "
            "the machine's cores: trust ratios and CPU time a request more than rates, and run it again on yours. "
            f"The machine's load average was {options.busy:.1f} when it began; 0 is a quiet machine. From round to "
            f"round the same figure differed by {results.spread():.1f} times (the middle one of all), which on a "
            "machine of one's own it hardly does: what is nearer together than that is no difference."
        ),
        "",
        *_prose(
            "Each client keeps one connection and one request in flight, with bytes made beforehand; all clients are "
            "one process of plain sockets, the same for every server, so that little of the time is theirs. Every "
            "server's answer is compared with the model's before anything is measured. *of the ceiling* compares with "
            "a server of grpcio's (`grpc.server`) with as many threads and the same message types, which answers a "
            "constant without running anything."
        ),
        "",
        *_prose(
            "The peers: `mlflow models serve` has the model as a `tf.Module`, its quickest road. MLServer loads the "
            "same function by settings files alone (its MLflow runtime), over REST and gRPC, where BentoML, LitServe, "
            "Ray Serve and KServe want a service written around the model; the model runs in the server's process, "
            "which is MLServer's quickest way. Neither speaks TensorFlow Serving's API, so each gets its own "
            "protocol's message of the same numbers: raw bytes over gRPC, decimal digits in JSON."
        ),
    ]
    lines += [f"Not measured: {name}, {why}." for name, why in results.missing.items()]
    if options.quick:
        lines += ["", "**This is a quick run, to try the benchmark out: its figures say little.**"]
    return lines


def _table(results: Results, kind: str) -> list[str]:
    model, batch = kind.split(" | ")
    examples = "1 example" if batch == "1" else f"{batch} examples"
    lines = [
        "", f"## {MODELS[model]}: {examples} a request", "",
        "| | clients | requests/s | of the ceiling | p50 ms | p99 ms | server's CPU us | least and most requests/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for contender, title in TITLES.items():
        for cell in results.cells():
            runs = results.runs.get(f"{contender} | {cell}")
            if not runs or not cell.startswith(f"{kind} | "):
                continue
            share = results.ratio(contender, "no-op: gRPC", cell) if contender.endswith("gRPC") else None
            rates = [run["rate"] for run in runs]
            middle = {
                value: results.middle(contender, cell, value) or 0 for value in ("rate", "p50", "p99", "cpu")
            }
            lines.append(
                f"| {title} | {cell.rsplit(' ', 1)[1]} | {middle['rate']:,.0f} "
                f"| {'' if share is None else f'{share:.0%}'} "
                f"| {middle['p50'] * 1e3:.2f} | {middle['p99'] * 1e3:.2f} | {middle['cpu'] * 1e6:,.0f} "
                f"| {min(rates):,.0f} - {max(rates):,.0f} |"
            )
    return lines


def _calls(results: Results) -> list[str]:
    lines = [
        "", "## The limit: the function called in process", "",
        "Arrays in, arrays out, no server and no messages: the session's callable (as our server calls it), and the",
        "signature of `tf.saved_model.load` (as Python code usually does).", "",
        "| model | examples | threads | session, calls/s | CPU us a call | signature, calls/s | CPU us a call |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for key in results.calls:
        road, cell = key.split(" | ", 1)
        if road == "session":
            both = [
                f"{results.middle(road, cell):,.0f} | {(results.middle(road, cell, 'cpu') or 0) * 1e6:,.0f}"
                for road in ("session", "signature")
            ]
            lines.append(f"| {cell} | {' | '.join(both)} |")
    return lines


def _memory(results: Results) -> list[str]:
    lines = [
        "",
        "## Memory",
        "",
        "Resident, of all processes of a server with both models, after the run.",
        "",
    ]
    lines += ["| | MB |", "| --- | --- |"]
    seen = set()
    for name, size in results.memory.items():
        title = TITLES[name].removesuffix(", gRPC").removesuffix(", REST").replace(", gRPC,", ",")
        if title not in seen:
            lines.append(f"| {title} | {size / 1e6:,.0f} |")
        seen.add(title)
    return lines


def _swaps(results: Results) -> list[str]:
    if not results.swaps:
        return []
    lines = [
        "", "## A new version under load", "",
        "Four clients ask for the latest version of the CNN without a pause, one example a request, in windows without",
        "and with a swap. A swap loads the new version, warms it up and unloads the old one.", "",
        "| window | requests | errors | p50 ms | p99 ms | p50 ms with swap | p99 ms with swap | new one serves |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    lines += [
        f"| {number} | {run['requests'] + run['swap_requests']:,} | {run['errors']} | {run['p50'] * 1e3:.2f} "
        f"| {run['p99'] * 1e3:.2f} | {run['swap_p50'] * 1e3:.2f} | {run['swap_p99'] * 1e3:.2f} "
        f"| after {run['available_s']:.2f} s |"
        for number, run in enumerate(results.swaps, 1)
    ]
    return lines


def _releases(results: Results) -> list[str]:
    if not results.releases:
        return []
    steps = list(results.releases[0])
    lines = [
        "", "## A release", "",
        "The release steps against a running server: a second version of the CNN beside its champion. `publish` checks",
        "digests and makes the version visible, `deploy` has it loaded and warmed up, `verify` compares its answers to",
        "the golden examples, `promote` moves the label; `rollback` moves it back.", "",
        f"| seconds | {' | '.join(steps)} |", f"| --- |{' --- |' * len(steps)}",
    ]  # fmt: skip
    middle = [f"{statistics.median(run[step] for run in results.releases):.2f}" for step in steps]
    worst = [f"{max(run[step] for run in results.releases):.2f}" for step in steps]
    lines += [f"| median | {' | '.join(middle)} |", f"| slowest | {' | '.join(worst)} |", ""]
    by_command = [f"`{command}` {seconds:.2f} s" for command, seconds in results.commands.items()]
    return [
        *lines,
        *_prose(f"By `trainyard models`, once, with the start of its process: {', '.join(by_command)}."),
    ]


@dataclass(frozen=True)
class Goal:
    """A figure that was wanted, and what was found; `reached` None where it was not measured."""

    what: str
    wanted: str
    found: str
    reached: bool | None

    def row(self) -> str:
        verdict = {True: "reached", False: "**not reached**", None: "not measured"}[self.reached]
        return f"| {self.what} | {self.wanted} | {self.found} | {verdict} |"


def goals(results: Results) -> list[Goal]:
    found = []
    cells = [cell for cell in results.cells() if " | 1 | " in cell]
    for other, ours in (("MLflow: REST", "ours: REST"), ("MLflow: REST", "ours: gRPC")):
        ratios = {cell: results.ratio(ours, other, cell) for cell in cells}
        found.append(
            _least(
                f"{ours.replace('ours: ', 'ours, ')}, to MLflow in requests/s, 1 example a request", 5, ratios
            )
        )
    for ours in ("ours: gRPC", "ours, batching: gRPC"):
        ratios = {cell: results.ratio(ours, "no-op: gRPC", cell) for cell in cells if cell == "mlp | 1 | 16"}
        title = ours.replace("ours: gRPC", "ours").replace("ours, batching: gRPC", "ours with batching")
        found.append(
            _least(
                f"{title}, to the gRPC ceiling in requests/s, 1 example, 16 clients", 0.6, ratios, "{:.0%}"
            )
        )
    for ours in ("ours: gRPC", "ours, batching: gRPC", "ours: REST"):
        ratios = {cell: results.tail(ours, cell) for cell in cells}
        found.append(_most(f"{TITLES[ours].replace('*', '')}: p99 to p50, 1 example", 3, ratios))
    if results.swaps:
        ratio = statistics.median(run["swap_p99"] / run["p99"] for run in results.swaps)
        what = "p99 under load with a version swap, to without"
        found.append(Goal(what, "at most 1.20", f"{ratio:.2f} (median of the windows)", ratio <= 1.2))
        errors = sum(run["errors"] for run in results.swaps)
        found.append(Goal("requests lost in swaps", "0", str(errors), errors == 0))
    if results.releases:
        deploys = [sum(v for k, v in run.items() if k != "rollback") for run in results.releases]
        backs = [run["rollback"] for run in results.releases]
        by_command = results.commands
        for what, times, limit in (
            ("deploy with verification by `trainyard models create`", [by_command["create"]], 10),
            ("rollback by `trainyard models rollback`", [by_command["rollback"]], 5),
            ("deploy with verification, 10 MB", deploys, 10),
            ("rollback, 10 MB", backs, 5),
        ):
            found.append(Goal(what, f"under {limit} s", f"{max(times):.2f} s at most", max(times) < limit))
    return found


def _least(what: str, wanted: float, ratios: Mapping[str, float | None], form: str = "{:.1f} times") -> Goal:
    known = {cell: ratio for cell, ratio in ratios.items() if ratio is not None}
    shown = f"at least {form.format(wanted)}"
    if not known:
        return Goal(what, shown, "", None)
    worst = min(known, key=lambda cell: known[cell])
    return Goal(what, shown, _range(known, worst, form), known[worst] >= wanted)


def _most(what: str, wanted: float, ratios: Mapping[str, float | None]) -> Goal:
    known = {cell: ratio for cell, ratio in ratios.items() if ratio is not None}
    if not known:
        return Goal(what, f"under {wanted:g} times", "", None)
    worst = max(known, key=lambda cell: known[cell])
    return Goal(what, f"under {wanted:g} times", _range(known, worst, "{:.1f} times"), known[worst] < wanted)


def _range(known: Mapping[str, float], worst: str, form: str) -> str:
    """The median of the cells, and the worst one with its name."""
    if len(known) == 1:
        return form.format(known[worst])
    model, _, clients = worst.split(" | ")
    middle = form.format(statistics.median(known.values()))
    return f"{middle}; worst {form.format(known[worst])} ({model.upper()}, {clients} clients)"


def _goals(results: Results, options: argparse.Namespace) -> list[str]:
    rows = [goal.row() for goal in goals(results)]
    return ["", "## Goals", "", "| | wanted | found | |", "| --- | --- | --- | --- |", *rows]


def _bounds(results: Results) -> list[str]:
    """What bounds: shares of the CPU time of a request, worked out from the medians."""
    said = []
    cell = "mlp | 1 | 16"
    ours, floor = (results.middle(name, cell, "cpu") for name in ("ours: gRPC", "no-op: gRPC"))
    call = results.middle("session", "mlp | 1 | 1", "cpu")
    if ours and floor and call:
        pool = results.middle("ours, pool: gRPC", cell, "cpu")
        before = f" ({_us(pool)} with grpcio's own thread pool)" if pool else ""
        said.append(
            f"- **gRPC, small model**: a request takes {_us(ours)} CPU us at 16 clients{before}; the no-op server, "
            f"which has that pool, takes {_us(floor)}, and TensorFlow's call alone {_us(call)}. The rest is gRPC's "
            "core, messages, arrays, checks and metrics, most of it under the interpreter's one lock: more cores help "
            "larger models, not more small requests."
        )
    big, call = (
        results.middle("ours: gRPC", "cnn | 32 | 4", "cpu"),
        results.middle("session", "cnn | 32 | 1", "cpu"),
    )
    if big and call:
        said.append(
            f"- **gRPC, large requests**: 32 examples for the CNN take {_us(big)} CPU us, of which the call of the "
            f"model alone is {_us(call)} ({min(1.0, call / big):.0%})."
        )
    rest, grpc = (results.middle(name, "mlp | 32 | 4", "cpu") for name in ("ours: REST", "ours: gRPC"))
    if rest and grpc:
        said.append(
            f"- **REST**: a request of 32 x 784 decimal numbers takes {_us(rest)} CPU us, over gRPC {_us(grpc)}: the "
            "difference is mostly reading digits. Clients that send many numbers should use gRPC."
        )
    plain, many = (results.middle(name, cell, "cpu") for name in ("ours: gRPC", "ours, batching: gRPC"))
    if plain and many:
        said.append(
            f"- **Batching**: a small request at 16 clients takes {_us(many)} CPU us with it and {_us(plain)} without: "
            "it saves calls of TensorFlow and costs hand-overs between threads."
        )
    if results.swaps:
        seconds = statistics.median(run["available_s"] for run in results.swaps)
        said.append(
            f"- **Swaps**: loading and warming up takes about {seconds:.2f} s on the cores that answer requests. p99 "
            "is that of whole windows: where other programs run beside, it says more about them than about the swap."
        )
    return ["", "## What bounds it", "", *(line for item in said for line in _prose(item))] if said else []


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or "unknown"
