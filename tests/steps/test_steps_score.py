"""Batch scoring: the released SavedModel's own answers, each row once, whatever is killed; bad rows aside."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers import score
from trainers.job.errors import DataError, InvalidSpec
from trainers.records.errors import TooManyBadRows
from trainers.records.manifest import Manifest
from trainers.records.read import RecordsDataset


def scores(result: dict[str, Any]) -> pa.Table:
    manifest = json.loads(Path(result["manifest"]).read_text())
    folder = Path(result["manifest"]).parent
    tables = [pq.read_table(folder / part["file"]) for part in manifest["parts"]]
    return pa.concat_tables([table for table in tables if table.num_rows])


@pytest.fixture(scope="module")
def digits_spec(exported: Path, digits: Manifest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("released")
    shutil.copytree(exported, root / "models" / "digits" / "7")
    return {
        "name": "digits",
        "model": str(root / "models" / "digits" / "7"),
        "source": str(digits.path),
        "columns": ["label"],
    }


def test_records_are_scored_as_evaluation_and_servers_do(
    digits_spec: dict[str, Any], digits: Manifest, exported: Path, tmp_path: Path
) -> None:
    import tensorflow as tf

    result = score.main({**digits_spec, "split": "eval", "output": str(tmp_path)})
    table = scores(result)
    assert result["rows"] == table.num_rows == digits.counts["eval"]
    assert not result["reused"]
    records = RecordsDataset.open(digits.path)
    batch = next(iter(records.dataset("eval", digits.counts["eval"])))
    answers = tf.saved_model.load(str(exported)).signatures["serving_default"](image=batch["image"])
    assert table["label"].to_pylist() == batch["label"].numpy().tolist()
    assert table["classes"].to_pylist() == answers["classes"].numpy().tolist()
    probabilities = np.array(table["probabilities"].to_pylist(), np.float32)
    np.testing.assert_allclose(probabilities, answers["probabilities"].numpy(), rtol=1e-4, atol=1e-5)
    assert set(table["model_version"].to_pylist()) == {7}
    keys = list(zip(table["source_file"].to_pylist(), table["source_row"].to_pylist(), strict=True))
    assert len(set(keys)) == len(keys)
    again = score.main({**digits_spec, "split": "eval", "output": str(tmp_path)})
    assert again == {**result, "reused": True}


def test_slices_leave_nothing_out_and_make_the_files_of_one_process(
    digits_spec: dict[str, Any], digits: Manifest, tmp_path: Path
) -> None:
    whole = score.main({**digits_spec, "output": str(tmp_path / "whole")})
    plan = score.main({**digits_spec, "output": str(tmp_path / "sliced"), "step": "plan", "slices": 3})
    assert plan["slices"] == 3
    steps = [{"step": "score", "plan": plan["plan"], "slice": i, "slices": 3} for i in range(3)]
    score.main(steps[2])
    with pytest.raises(score.PartsMissing, match="parts are not scored"):
        score.main({"step": "publish", "plan": plan["plan"]})
    done = [score.main(step) for step in (steps[0], steps[1], steps[1])]
    assert done[2]["parts"] == 0, "what is there is not scored again"
    sliced = score.main({"step": "publish", "plan": plan["plan"]})
    assert sliced["rows"] == whole["rows"] == sum(digits.counts.values())
    assert sliced["digest"] == whole["digest"]


def test_a_process_that_is_killed_goes_on(digits_spec: dict[str, Any], tmp_path: Path) -> None:
    spec = {**digits_spec, "output": str(tmp_path / "killed"), "batch_rows": 8}
    command = [sys.executable, "-m", "trainers.score", "--spec", json.dumps(spec)]
    for least in (1, 3):
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 180
        while len(list((tmp_path / "killed").glob("*/.parts/*.json"))) < least and process.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    result = score.main(spec)
    whole = score.main({**digits_spec, "output": str(tmp_path / "whole"), "batch_rows": 8})
    assert result["digest"] == whole["digest"]
    assert [p.name for p in Path(result["manifest"]).parent.iterdir() if p.name.endswith(".tmp")] == []


@pytest.fixture
def houses_spec(houses: Manifest, tmp_path: Path) -> dict[str, Any]:
    """Version 1 of a model that takes rooms and city, by names and by Examples; price = 10 rooms + length of city."""
    import tensorflow as tf

    class Price(tf.Module):
        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.float32, name="rooms"),
                tf.TensorSpec([None], tf.string, name="city"),
            ]
        )
        def named(self, rooms: tf.Tensor, city: tf.Tensor) -> dict[str, tf.Tensor]:
            tf.debugging.assert_less(rooms, 1000.0, message="too large")
            return {"predictions": 10.0 * rooms + tf.cast(tf.strings.length(city), tf.float32)}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
        def examples(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
            spec = {
                "rooms": tf.io.FixedLenFeature([], tf.float32),
                "city": tf.io.FixedLenFeature([], tf.string),
            }
            return self.named(**tf.io.parse_example(examples, spec))

    folder = tmp_path / "models" / "houses" / "1"
    model = Price()
    tf.saved_model.save(
        model, str(folder), signatures={"serving_default": model.named, "examples": model.examples}
    )
    takes = {"rooms": {"dtype": "float32", "shape": [None]}, "city": {"dtype": "string", "shape": [None]}}
    signatures = {
        "serving_default": {"inputs": takes, "outputs": {}},
        "examples": {"inputs": {"examples": {"dtype": "string", "shape": [None]}}, "outputs": {}},
    }
    info = {"digest": "d", "records_digest": houses.digest, "signatures": signatures}
    (folder / "export.json").write_text(json.dumps(info))
    return {
        "name": "houses",
        "model": str(folder),
        "records": str(houses.folder.parent.parent),
        "output": str(tmp_path / "scores"),
        "columns": ["id"],
    }


def _csv(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["id,rooms,city", *rows]) + "\n")
    return path


def test_tables_go_through_the_signature_of_examples(houses_spec: dict[str, Any], tmp_path: Path) -> None:
    for month in (1, 2, 3):
        _csv(tmp_path / "in" / f"{month}.csv", *(f"{month}-{i},{i},Oslo" for i in range(100)))
    spec = {**houses_spec, "source": str(tmp_path / "in" / "*.csv"), "shards": 3}
    result = score.main(spec)
    table = scores(result)
    assert result["rows"] == 300
    assert table["id"].to_pylist() == [f"{month}-{i}" for month in (1, 2, 3) for i in range(100)]
    assert table["predictions"].to_pylist() == [10.0 * i + 4 for _ in range(3) for i in range(100)]
    assert table.column_names == ["source_file", "source_row", "id", "predictions", "model_version"]
    # The same without the dataset: columns go to the inputs of their names.
    plain = score.main({**spec, "records": "", "output": str(tmp_path / "plain")})
    assert scores(plain).equals(table)
    assert not score.main({**spec, "prefix": "price_"})["reused"]


def test_rows_that_can_not_be_scored_are_set_aside(houses_spec: dict[str, Any], tmp_path: Path) -> None:
    rows = [f"{i},{i},Oslo" for i in range(50)]
    rows[3], rows[10], rows[20] = "3,,Oslo", "10,1e6,Oslo", "20,5,"
    source = _csv(tmp_path / "in" / "a.csv", *rows)
    spec = {**houses_spec, "source": str(source), "quarantine_threshold": 0.1}
    result = score.main(spec)
    bad = pq.read_table(Path(result["manifest"]).with_name("quarantine.parquet")).to_pylist()
    assert result["rows"] + len(bad) == 50
    assert result["quarantined"] == len(bad)
    by_row = {row["row"]: row for row in bad}
    assert {4, 11} <= set(by_row)
    assert by_row[4]["column"] == "rooms"
    assert "too large" in by_row[11]["reason"]
    assert not {str(r) for r in (3, 10)} & {str(i) for i in scores(result)["id"].to_pylist()}
    with pytest.raises(TooManyBadRows) as caught:
        score.main({**spec, "quarantine_threshold": 0.01})
    assert caught.value.failure_class == "DATA"
    assert not list((tmp_path / "scores").glob("*/manifest.json"))[1:], "nothing was published"


def test_what_does_not_fit_is_said(houses_spec: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "in" / "a.csv"
    source.parent.mkdir()
    source.write_text("id,rooms\n1,2\n")
    spec = {**houses_spec, "source": str(source)}
    with pytest.raises(DataError, match="city"):
        score.main(spec)
    with pytest.raises(DataError, match="the columns to be passed through are colour"):
        score.main({**spec, "columns": ["colour"]})
    with pytest.raises(DataError, match="no released version"):
        score.main({**spec, "model": str(tmp_path / "models" / "houses" / "9")})
    for change, text in (
        ({"shards": 0}, "shards"),
        ({"split": "all of it"}, "split"),
        ({"x": 1}, "no fields but"),
    ):
        with pytest.raises(InvalidSpec, match=text):
            score.main({**spec, **change})
