"""A real process, killed with SIGKILL wherever it happens to be, and two of them at once."""

import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.job.failures import EXIT_CODES, FailureClass
from trainers.records.manifest import Manifest

KILLS = 5


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(5)
    rows = 40_000
    data = {f"x{i:02d}": rng.normal(size=rows).astype("f4") for i in range(20)}
    data |= {"id": np.arange(rows), "y": rng.integers(0, 2, rows)}
    data["name"] = pa.array([f"name {i % 97}" for i in range(rows)])
    pq.write_table(pa.table(data), tmp_path / "raw.parquet", row_group_size=rows // 8)
    return tmp_path / "raw.parquet"


def start(source, output, log):
    spec = {"source": str(source), "output": str(output), "name": "k", "label": "y", "key": "id", "shards": 4}
    environment = {**os.environ, "TRAINYARD_TERMINATION_LOG": str(log)}
    return subprocess.Popen(
        [sys.executable, "-m", "trainers.records", "--spec", json.dumps(spec)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process, log):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return json.loads(log.read_text())["result"], out


def content(path):
    return {key: value for key, value in Manifest.load(path).to_dict().items() if key != "created"}


def test_killed_anywhere_it_ends_the_same(source, tmp_path):
    log = tmp_path / "termination.json"
    whole, out = finish(start(source, tmp_path / "whole", log), log)
    lines = out.splitlines()
    assert len([line for line in lines if line.startswith("unit") and "written" in line]) == 4

    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    output = tmp_path / "killed"
    for kill in range(KILLS):
        process = start(source, output, log)
        # Spread over the run: behind each line it says in turn, and a little later.
        for _ in range(kill % 3 + 1):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        process.wait()
        process.stdout.close()
        manifests = list(output.glob("*/manifest.json"))
        for path in manifests:  # a manifest is there only when everything is
            Manifest.load(path).verify()
    result, out = finish(start(source, output, log), log)
    assert result["digest"] == whole["digest"]
    assert content(result["manifest"]) == content(whole["manifest"])
    Manifest.load(result["manifest"]).verify()
    (folder,) = output.iterdir()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    again, out = finish(start(source, output, log), log)
    assert again == {**result, "reused": True}
    assert "nothing to do" in out


def test_two_processes_at_once(source, tmp_path):
    logs = [tmp_path / "a.json", tmp_path / "b.json"]
    processes = [start(source, tmp_path / "out", log) for log in logs]
    results = [finish(process, log)[0] for process, log in zip(processes, logs, strict=True)]
    assert results[0]["digest"] == results[1]["digest"]
    assert sorted(result["reused"] for result in results) == [False, True]
    Manifest.load(results[0]["manifest"]).verify()
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_bad_data_ends_with_its_class(tmp_path):
    (tmp_path / "raw").mkdir()
    log = tmp_path / "termination.json"
    process = start(tmp_path / "raw", tmp_path / "out", log)
    process.communicate(timeout=120)
    assert process.returncode == EXIT_CODES[FailureClass.DATA]
    failure = json.loads(log.read_text())["failure"]
    assert failure["code"] == "records.empty_source"
    assert failure["class"] == "DATA"


def test_it_starts_fast_and_without_tensorflow(tmp_path):
    code = """
import sys
import trainers.records.build, trainers.records.images, trainers.records.tables, trainers.records.read
heavy = {"tensorflow", "keras", "pandas", "mlflow", "airflow"} & set(sys.modules)
assert not heavy, heavy
import time
print(time.process_time())
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert float(out) < 1.5  # CPU seconds
