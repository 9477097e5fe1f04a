"""Several processes write what one does; killed anywhere, the next run ends the same and nothing is left."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.job.failures import EXIT_CODES, FailureClass
from trainers.records import workers
from trainers.records.errors import SourceUnreadable, TooManyBadRows, WorkerLost
from trainers.records.manifest import Manifest

SHARDS = 6


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(5)
    rows = 60_000
    data = {f"x{i:02d}": rng.normal(size=rows).astype("f4") for i in range(20)}
    data |= {"id": np.arange(rows), "y": rng.integers(0, 2, rows)}
    data["name"] = pa.array([None if i % 50 == 0 else f"name {i % 97}" for i in range(rows)])
    pq.write_table(pa.table(data), tmp_path / "raw.parquet", row_group_size=rows // 12)
    return tmp_path / "raw.parquet"


def content(manifest):
    return {key: value for key, value in manifest.to_dict().items() if key != "created"}


def start(source, output, log, **options):
    spec = {"source": str(source), "output": str(output), "name": "k", "label": "y", "key": "id"}
    spec |= {"shards": SHARDS, "processes": 2, **options}
    return subprocess.Popen(
        [sys.executable, "-m", "trainers.records", "--spec", json.dumps(spec)],
        env={**os.environ, "TRAINYARD_TERMINATION_LOG": str(log)},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process, log):
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return json.loads(log.read_text())["result"], out


def writers():
    """Processes of ours that write units; other tests' children are none."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found += [child] if "trainers.records.workers" in child.cmdline() else []
    return found


def gone(children):
    """Whether none of some processes runs any more, soon."""
    return not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_the_number_of_processes_changes_nothing(layout, source, run, said):
    found = []
    for processes in (1, 3):
        manifest = run(
            source,
            key="id",
            shards=SHARDS,
            layout=layout,
            processes=processes,
            name="n",
            statistics=layout == "rows",
        )
        found.append(content(manifest))
        manifest.path.unlink()
    assert found[0] == found[1]
    assert f"{SHARDS} units by 3 processes" in said
    assert sum("rows written" in line for line in said) == 2 * SHARDS
    assert not writers()


def test_killed_anywhere_it_ends_the_same_and_leaves_nobody(source, tmp_path):
    log = tmp_path / "termination.json"
    whole, out = finish(start(source, tmp_path / "whole", log), log)
    assert "6 units by 2 processes" in out
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    output = tmp_path / "killed"
    for kill in range(4):
        process = start(source, output, log)
        line = ""
        while "processes" not in line and process.poll() is None:
            line = process.stdout.readline()
        for _ in range(kill):  # later each time
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.5))
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have come to its end by now
            children = psutil.Process(process.pid).children(recursive=True)
        victim = rng.choice(children) if children and kill % 2 else process
        victim.kill()
        process.communicate(timeout=60)
        assert gone(children)
        finished = {path.name for path in output.glob("*/.unit-*.json")}
        for path in output.glob("*/manifest.json"):
            Manifest.load(path).verify()
    result, out = finish(start(source, output, log), log)
    assert out.count("finished by an earlier run") == len(finished) or "nothing to do" in out
    assert result["digest"] == whole["digest"]
    assert content(Manifest.load(result["manifest"])) == content(Manifest.load(whole["manifest"]))
    Manifest.load(result["manifest"]).verify()
    (folder,), (other,) = output.iterdir(), (tmp_path / "whole").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in other.iterdir())


def test_finished_units_are_not_written_again(source, run, said, tmp_path):
    options = {"key": "id", "shards": SHARDS, "name": "n"}
    manifest = run(source, processes=1, **options)
    written = {shard.file: (manifest.folder / shard.file).stat().st_mtime_ns for shard in manifest.shards}
    # As if all but the last unit were done: the records of units go when a dataset is published.
    manifest.path.unlink()

    class Stop(Exception):
        pass

    def stop(line):
        said.append(line)
        if "unit" in line and "rows written" in line and sum("rows written" in x for x in said) == SHARDS + 3:
            raise Stop

    with pytest.raises(Stop):
        run(source, processes=2, progress=stop, **options)
    assert not writers()
    done = {path.name for path in manifest.folder.glob(".unit-*.json")}
    assert 3 <= len(done) <= 5
    times = {path.name: path.stat().st_mtime_ns for path in manifest.folder.glob("*.tfrecord")}
    kept = {f"{s}-{int(name[6:11]):05d}-of-{SHARDS:05d}.tfrecord" for name in done for s in ("train", "eval")}
    again = run(source, processes=2, **options)
    assert again.digest == manifest.digest
    assert sum("finished by an earlier run" in line for line in said) == len(done)
    for name in kept:
        assert (manifest.folder / name).stat().st_mtime_ns == times[name] != written[name]


def test_a_lost_worker_is_infrastructures(source, tmp_path):
    log = tmp_path / "termination.json"
    process = start(source, tmp_path / "out", log)
    while "processes" not in process.stdout.readline():
        pass
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.01)  # they are being started
    victim, *others = children
    victim.kill()
    process.communicate(timeout=60)
    assert process.returncode == EXIT_CODES[FailureClass.INFRA]
    failure = json.loads(log.read_text())["failure"]
    assert failure["code"] == "records.worker_lost"
    assert "was killed by signal 9" in json.dumps(failure)
    assert gone(others)


def test_errors_of_data_come_through_as_themselves(source, run, tmp_path):
    data = bytearray(source.read_bytes())
    data[4:60] = b"\xff" * 56  # the first page's header
    source.write_bytes(data)
    with pytest.raises(SourceUnreadable) as caught:
        run(source, key="id", shards=SHARDS, processes=2)
    assert caught.value.file == str(source)
    assert "can't be read" in str(caught.value)
    assert not list((tmp_path / "out").rglob("*.tfrecord"))
    pq.write_table(
        pa.table({"y": pa.array([None] * 40, pa.int64()), "x": range(40)}), source, row_group_size=10
    )
    with pytest.raises(TooManyBadRows, match="40 of 40 rows are bad"):
        run(source, shards=4, processes=2)
    assert not writers()


def test_an_error_that_is_nobodys_brings_its_traceback():
    told = {"type": ["builtins", "ZeroDivisionError"], "args": [], "fields": {}, "traceback": "line 7"}
    error = workers._error(told)
    assert isinstance(error, WorkerLost)
    assert "line 7" in str(error)
    told = {"type": ["os", "system"], "args": [], "fields": {}, "traceback": "line 8"}
    assert isinstance(workers._error(told), WorkerLost)


@pytest.mark.parametrize(
    ("wanted", "size", "units", "found"),
    [(None, 1000, 8, 1), (None, workers.LARGE, 1, 1), (3, 10, 8, 3), (3, 10, 2, 2), (1, workers.LARGE, 8, 1)],
)
def test_how_many_processes(wanted, size, units, found):
    assert workers.processes_for(wanted, size, units) == found
    assert workers.processes_for(None, workers.LARGE, 10_000) == workers.cores()


def test_a_containers_quota_counts(tmp_path):
    everything = workers.cores(tmp_path)
    assert everything >= 1
    for text, most in (
        ("max 100000", everything),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("broken", everything),
    ):
        (tmp_path / "cpu.max").write_text(text)
        assert workers.cores(tmp_path) == most
