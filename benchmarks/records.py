"""How fast raw data become TFRecords and are read again: ours, the usual ways, and the limits, side by side.

    .venv/bin/python benchmarks/records.py [--rows 200000] [--rounds 5] [--only PATTERN] [--no-peers]
                                           [--markdown benchmarks/records.md]

A table of 30 float, 10 int64 and 5 short string columns as Parquet and CSV, 60,000 images of 28 x 28 as .npy, and
10,000 JPEG files. Each road runs once a round, all roads by turns, so that a slow moment of the machine meets all of
them; the figures are medians of the rounds. A road's process has imported and run once what it needs before anything
is measured. tfx-bsl and Beam run in an environment of their own, which is made at the first run (see
benchmarks/peers/make_tfx.py); where it can't be made, the page says so.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from peers import make_tfx
from records_bounds import bounds

HERE = Path(__file__).resolve().parent
DIGITS, JPEGS, DISTINCT = 60_000, 10_000, 64

# Road -> what it is, for people; in the order of the page. A title begins a table.
TABLES: dict[str, dict[str, str]] = {
    "Parquet to TFRecords": {
        "Parquet: read only": "limit: read the Parquet, write nothing",
        "disk: write only": "limit: write bytes, 150 MB",
        "Parquet: encoder, native": "**ours: encoder in C**, one file",
        "Parquet: encoder, numpy": "**ours: encoder in numpy**, one file",
        "Parquet: prepare, native, no statistics": "ours: prepare, C, without statistics",
        "Parquet: prepare, numpy, no statistics": "ours: prepare, numpy, without statistics",
        "Parquet: prepare, native": "ours: prepare, C, with statistics",
        "Parquet: prepare, native, 2 processes": "ours: the same by 2 processes",
        "Parquet: prepare, blocks, no statistics": "ours: prepare, blocks, without statistics",
        "Parquet: prepare, blocks": "ours: prepare, blocks, with statistics",
        "Parquet: tfx-bsl": "tfx-bsl's C++ encoder, TFRecordWriter",
        "Parquet: Beam + tfx-bsl": "Beam DirectRunner with tfx-bsl's encoder",
        "Parquet: Python tf.train.Example": "Python `tf.train.Example`, TFRecordWriter",
    },
    "CSV to TFRecords": {
        "CSV: read only": "limit: read the CSV, write nothing",
        "CSV: encoder, native": "**ours: encoder in C**, one file",
        "CSV: encoder, numpy": "**ours: encoder in numpy**, one file",
        "CSV: prepare, native": "ours: prepare, C, with statistics",
        "CSV: tfx-bsl": "tfx-bsl's C++ encoder, TFRecordWriter",
        "CSV: Python tf.train.Example": "Python `tf.train.Example`, TFRecordWriter",
    },
    "Images of 28 x 28 (.npy) to TFRecords": {
        "28x28: read only": "limit: read the arrays, write nothing",
        "28x28: encoder, native": "**ours: encoder in C**, one file",
        "28x28: encoder, numpy": "**ours: encoder in numpy**, one file",
        "28x28: tfx-bsl": "tfx-bsl's C++ encoder, TFRecordWriter",
        "28x28: Python tf.train.Example": "Python `tf.train.Example`, TFRecordWriter",
    },
    "JPEG files to TFRecords": {
        "JPEG: read only": "limit: read the files, write nothing",
        "JPEG: prepare, encoded": "**ours: prepare**, files checked and hashed",
        "JPEG: prepare, encoded, 2 processes": "ours: the same by 2 processes",
        "JPEG: Python tf.train.Example": "Python `tf.train.Example`, TFRecordWriter, nothing checked",
    },
    "Reading the table's records, 4 epochs in batches of 1,024": {
        "read: TFRecordDataset alone": "limit of rows: TFRecordDataset, nothing parsed",
        "read: blocks": "**ours: blocks**",
        "read: rows, batch then parse": "ours: rows, batch then parse",
        "read: rows, parsed one by one": "the usual: parse_single_example, then batch",
        "read: blocks, shuffled": "**ours: blocks, shuffled**",
        "read: rows, shuffled": "ours: rows, shuffled",
    },
}
TENSORFLOW = ("read: ", "Python")  # roads of a process that has TensorFlow

GOALS = (
    ("numpy at 3.5 times tfx-bsl, from Parquet", "Parquet: encoder, numpy", "Parquet: tfx-bsl", 3.5),
    ("native at 10 times tfx-bsl, from Parquet", "Parquet: encoder, native", "Parquet: tfx-bsl", 10),
    (
        "statistics at most double the cost",
        "Parquet: prepare, native",
        "Parquet: prepare, native, no statistics",
        0.5,
    ),
    ("blocks at 7 times batch-then-parse of rows", "read: blocks", "read: rows, batch then parse", 7),
)


def make_inputs(folder: Path, rows: int) -> None:
    """The raw data, and the table's two layouts for reading."""
    from PIL import Image

    from trainers.records.build import prepare

    rng = np.random.default_rng(0)
    data: dict[str, Any] = {f"f{i:02d}": rng.normal(size=rows).astype("f4") for i in range(30)}
    data |= {f"i{i:02d}": rng.integers(0, 10 ** (1 + i % 6), rows) for i in range(9)}
    data["i09"] = np.arange(rows)
    for i in range(5):
        data[f"s{i:02d}"] = pa.array([f"v{v}" for v in rng.integers(0, 10 ** (i + 1), rows)])
    table = pa.table(data)
    pq.write_table(table, folder / "table.parquet", row_group_size=max(1, rows // 8))
    pyarrow.csv.write_csv(table, folder / "table.csv")
    np.save(folder / "digits.npy", rng.integers(0, 256, (DIGITS, 784), dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(0, 10, DIGITS))
    pictures = []
    for i in range(DISTINCT):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        path = folder / f"{i}.jpg"
        coarse.resize((224, 224), Image.Resampling.BICUBIC).save(path, quality=90)
        pictures.append(path.read_bytes())
        path.unlink()
    for i in range(10):
        (folder / "jpeg" / str(i)).mkdir(parents=True)
    for i in range(min(JPEGS, rows)):
        (folder / "jpeg" / str(i % 10) / f"{i:05d}.jpg").write_bytes(pictures[i % DISTINCT])
    for layout in ("rows", "blocks"):
        prepare(
            folder / "table.parquet", folder / layout, name="b", label="i00", key="i09", eval_fraction=0.0,
            shards=4, layout=layout, statistics=False, processes=1, progress=lambda line: None,
        )  # fmt: skip


class Process:
    """A process that does roads, one at a time."""

    def __init__(self, command: Sequence[str], inputs: Path, out: Path) -> None:
        self._inputs, self._out = str(inputs), str(out)
        self._process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, road: str) -> dict[str, Any]:
        try:
            asked = {"road": road, "inputs": self._inputs, "out": self._out}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "its process ended"}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(
    roads: Sequence[str], processes: Mapping[str, Process | str], rounds: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]] | str]:
    """Runs of each road, or why there are none."""
    found: dict[str, list[dict[str, Any]] | str] = {}
    for number in range(rounds + 1):  # the first warms up
        for road in roads:
            process = processes[kind_of(road)]
            if isinstance(process, str):
                found[road] = process
                continue
            if isinstance(found.get(road), str):
                continue
            answer = process.run(road)
            if "error" in answer:
                found[road] = answer["error"].strip().splitlines()[-1][:200]
                say(f"{road}: {found[road]}")
            elif number:
                found.setdefault(road, []).append(answer)
        say(f"round {number} of {rounds}")
    return found


def kind_of(road: str) -> str:
    if "tfx-bsl" in road:
        return "tfx"
    return "tensorflow" if any(word in road for word in TENSORFLOW) else "ours"


# ---- the page


def median(runs: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(value(run) for run in runs)


def rate(runs: Sequence[Mapping[str, Any]]) -> float:
    """Rows a CPU second."""
    return median(runs, lambda run: run["rows"] / run["cpu"])


def row(title: str, runs: list[dict[str, Any]] | str) -> str:
    if isinstance(runs, str):
        return f"| {title} | not measured: {runs} | | | | |"
    written = runs[0]["bytes"]
    megabytes = f"{median(runs, lambda r: r['bytes'] / r['cpu']) / 1e6:,.0f}" if written else ""
    if not runs[0]["rows"]:
        return f"| {title} | | | {megabytes} | | |"
    rates = [run["rows"] / run["cpu"] for run in runs]
    return (
        f"| {title} | {rate(runs):,.0f} | {median(runs, lambda r: r['cpu'] / r['rows']) * 1e6:.2f} | {megabytes} "
        f"| {median(runs, lambda r: r['rows'] / r['wall']):,.0f} | {min(rates):,.0f} - {max(rates):,.0f} |"
    )


def page(found: Mapping[str, Any], options: argparse.Namespace, versions: str) -> str:
    memory = psutil.virtual_memory().total / 2**30
    lines = [
        "# Records: from raw data to TFRecords and back",
        "",
        f"Set-up: {os.cpu_count()} cores ({cpu_model()}), {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {versions}, {dt.date.today()}.",
        f"The table has {options.rows:,} rows of 30 float32, 10 int64 and 5 short string columns; each figure is the "
        f"median of {options.rounds} interleaved rounds.",
        "Command: `.venv/bin/python benchmarks/records.py --markdown benchmarks/records.md`. CPU seconds are of all",
        "processes and threads of a road. Trust ratios more than figures, and run it again on yours.",
        "",
        "*encoder* reads, encodes and writes one file, which is what the peers' roads do. *prepare* does all that a",
        "dataset needs besides: it hashes the input, checks every row, splits by key, hashes what it writes, syncs it",
        "to the disk and publishes a manifest. Every road writes new files, which are removed outside the measurement;",
        "ours and the peers read by the same options.",
    ]
    for title, roads in TABLES.items():
        present = [road for road in roads if road in found]
        if not present:
            continue
        lines += ["", f"## {title}", ""]
        lines += ["| | rows/CPU-s | CPU us a row | MB/CPU-s | rows/s (clock) | least and most rows/CPU-s |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [row(roads[road], found[road]) for road in present]
    lines += ["", "## Goals", "", "| goal | wanted | found |", "| --- | --- | --- |"]
    for goal, ours, theirs, wanted in GOALS:
        runs = [found.get(ours), found.get(theirs)]
        if all(isinstance(r, list) and r for r in runs):
            lines.append(f"| {goal} | {wanted:g} | {rate(runs[0]) / rate(runs[1]):.2f} |")
        elif any(isinstance(r, str) for r in runs):
            lines.append(f"| {goal} | {wanted:g} | not measured |")
    lines += bounds(found, median)
    raw = {
        road: [{key: round(value, 4) for key, value in run.items()} for run in runs]
        for road, runs in found.items()
        if isinstance(runs, list)
    }
    lines += ["", "<details><summary>raw numbers</summary>", "", "```json"]
    lines += ["{", ",\n".join(f' "{road}": {json.dumps(runs)}' for road, runs in raw.items()), "}", "```", ""]
    return "\n".join([*lines, "</details>"]) + "\n"


def cpu_model() -> str:
    """What the machine says its CPU is."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="roads whose names match this pattern")
    parser.add_argument("--no-peers", action="store_true", help="leave out tfx-bsl and Beam, and say so")
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    options = parser.parse_args()
    roads = [road for roads in TABLES.values() for road in roads if re.search(options.only, road)]

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    processes: dict[str, Process | str] = {}
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        inputs, out = Path(name) / "inputs", Path(name) / "out"
        inputs.mkdir()
        say("making the inputs")
        make_inputs(inputs, options.rows)
        try:
            for kind in ("ours", "tensorflow"):
                processes[kind] = Process([sys.executable, HERE / "records_roads.py"], inputs, out / kind)
            processes["tfx"] = "left out by --no-peers"
            if not options.no_peers and any(kind_of(road) == "tfx" for road in roads):
                say("looking for tfx-bsl's environment, or making it")
                python, problem = make_tfx.make()
                script = HERE / "peers" / "tfx_records.py"
                processes["tfx"] = Process([python, script], inputs, out / "tfx") if python else problem
            found = measure(roads, processes, options.rounds, say)
        finally:
            for process in processes.values():
                if isinstance(process, Process):
                    process.close()
        shutil.rmtree(out, ignore_errors=True)
    names = ("pyarrow", "numpy", "tensorflow")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in names)
    text = page(found, options, versions)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
