"""A dataset written in slices, by real processes: the same bytes as one process writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.job.errors import ConfigError
from trainers.job.failures import EXIT_CODES, FailureClass
from trainers.records.__main__ import main
from trainers.records.errors import InvalidOption, TooManyBadRows, UnitsMissing
from trainers.records.manifest import Manifest


@pytest.fixture
def source(tmp_path):
    """Four files of two row groups; one row in a thousand has no label."""
    rng = np.random.default_rng(3)
    for month in range(1, 5):
        rows = 3000
        label = [None if i % 1000 == 7 else i % 5 for i in range(rows)]
        table = pa.table(
            {
                "id": np.arange(rows) + month * rows,
                "x": rng.normal(size=rows),
                "s": [f"v{i % 13}" for i in range(rows)],
                "y": label,
            }
        )
        path = tmp_path / "raw" / f"2013-{month:02d}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table, path, row_group_size=rows // 2)
    return tmp_path / "raw"


def spec_of(source, output, **more):
    return {
        "source": str(source),
        "output": str(output),
        "name": "s",
        "label": "y",
        "key": "id",
        "shards": 8,
        **more,
    }


def content(manifest):
    return {key: value for key, value in Manifest.load(manifest).to_dict().items() if key != "created"}


def step(spec, *, kill_after=None, **environment):
    """A real pod's process: its result, or its exit code where it failed or was killed."""
    log = spec.pop("log")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainers.records", "--spec", json.dumps(spec)],
        env={**os.environ, "TRAINYARD_TERMINATION_LOG": str(log), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if kill_after is not None:
        for line in process.stdout:
            if line.startswith(kill_after):
                break
        process.kill()
    process.communicate(timeout=300)
    return json.loads(log.read_text()) if process.returncode == 0 else process.returncode


def test_slices_by_any_pods_in_any_order_are_one_dataset(source, tmp_path):
    whole = main(spec_of(source, tmp_path / "whole"))
    log = tmp_path / "log.json"
    planned = main({"step": "plan", "slices": 3, **spec_of(source, tmp_path / "sliced")})
    assert planned["slices"] == 3
    assert not planned["reused"]
    plan = planned["plan"]
    assert json.loads(Path(plan).read_text())["titles"][0] == "2013-01.parquet and 2 more"

    # Out of order; slice 2 is killed by SIGKILL when its first unit is done, then runs again as a pod of an
    # Indexed Job; slice 0 runs twice, at the same time.
    killed = step({"step": "encode", "plan": plan, "slice": 2, "log": log}, kill_after="unit 3/8")
    assert killed == -9
    with pytest.raises(UnitsMissing, match=r"3 of 3 slices.*slice 0 .2013-01.parquet and 2 more"):
        main({"step": "publish", "plan": plan})
    first = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainers.records",
                "--spec",
                f'{{"step":"encode","plan":"{plan}","slice":0}}',
            ],
            stdout=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    again = step({"step": "encode", "plan": plan, "log": log}, JOB_COMPLETION_INDEX="2")
    assert (again["result"]["slice"], again["result"]["units"]) == (2, 2)
    assert [process.wait(timeout=300) for process in first] == [0, 0]
    with pytest.raises(UnitsMissing, match=r"1 of 3 slices.*slice 1 "):
        main({"step": "publish", "plan": plan})
    assert main({"step": "encode", "plan": plan, "slice": 1})["units"] == 3

    published = main({"step": "publish", "plan": plan})
    assert published["digest"] == whole["digest"]
    assert published["reused"] is False
    assert content(published["manifest"]) == content(whole["manifest"])
    Manifest.load(published["manifest"]).verify()
    (folder,) = (path for path in (tmp_path / "sliced").iterdir())
    assert {p.name for p in folder.iterdir() if p.name.startswith(".")} == set(), "nothing is left over"
    assert Manifest.load(published["manifest"]).quarantined == 12
    assert (folder / "quarantine.parquet").exists()

    # All steps again do nothing, in any order.
    assert main({"step": "publish", "plan": plan}) == {**published, "reused": True}
    assert main({"step": "encode", "plan": plan, "slice": 1})["units"] == 0
    assert main({"step": "plan", "slices": 3, **spec_of(source, tmp_path / "sliced")}) == {
        "plan": plan,
        "slices": 0,
        "reused": True,
    }


def test_no_more_slices_than_units(source, tmp_path):
    planned = main({"step": "plan", "slices": 50, **spec_of(source, tmp_path / "out", shards=2)})
    assert planned["slices"] == 2


def test_too_many_bad_rows_publish_nothing_and_leave_only_the_quarantine(source, tmp_path):
    spec = spec_of(source, tmp_path / "out", quarantine_threshold=0.0001)
    plan = main({"step": "plan", "slices": 2, **spec})["plan"]
    for index in range(2):
        main({"step": "encode", "plan": plan, "slice": index})
    with pytest.raises(TooManyBadRows):
        main({"step": "publish", "plan": plan})
    (folder,) = (tmp_path / "out").iterdir()
    assert [path.name for path in folder.iterdir()] == ["quarantine.parquet"]


def test_a_changed_source_or_schema_is_no_longer_the_plans(source, tmp_path):
    from trainers.records.errors import SourceChanged

    plan = main({"step": "plan", "slices": 2, **spec_of(source, tmp_path / "out")})["plan"]
    path = source / "2013-01.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises((SourceChanged, ConfigError)):
        main({"step": "encode", "plan": plan, "slice": 0})
    assert not list((tmp_path / "out").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"step": "mix"}, ConfigError, "step must be one of plan, encode, publish"),
        ({"step": "encode"}, ConfigError, "lacks plan"),
        ({"step": "encode", "plan": "PLAN"}, ConfigError, "names no slice, and JOB_COMPLETION_INDEX is ''"),
        ({"step": "encode", "plan": "PLAN", "slice": 2}, InvalidOption, "one of the plan's 2"),
        ({"step": "encode", "plan": "PLAN", "slice": -1}, InvalidOption, "one of the plan's 2"),
        ({"step": "encode", "plan": "/nowhere/.plan.json", "slice": 0}, Exception, "nowhere"),
        ({"step": "publish", "plan": "/nowhere/.plan.json"}, Exception, "neither a plan nor a dataset"),
        ({"step": "publish", "plan": "PLAN", "more": 1}, ConfigError, "unknown keys more"),
    ],
)
def test_what_steps_refuse(source, tmp_path, monkeypatch, spec, error, words):
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    if spec.get("plan") == "PLAN":
        spec = {
            **spec,
            "plan": main({"step": "plan", "slices": 2, **spec_of(source, tmp_path / "out")})["plan"],
        }
    with pytest.raises(error, match=words):
        main(spec)


def test_a_missing_slice_fails_the_pod_with_class_data(source, tmp_path):
    plan = main({"step": "plan", "slices": 2, **spec_of(source, tmp_path / "out")})["plan"]
    code = step({"step": "publish", "plan": plan, "log": tmp_path / "log.json"})
    assert code == EXIT_CODES[FailureClass.DATA]
    failure = json.loads((tmp_path / "log.json").read_text())["failure"]
    assert failure["code"] == "records.missing_units"
    assert "slice 0 (2013-01.parquet" in failure["reason"]
