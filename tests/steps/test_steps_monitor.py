"""Logged requests against training statistics: both signatures, each file once whatever is killed, drift or none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers import monitor
from trainers.job.errors import InvalidSpec
from trainers.job.files import read_json, read_json_lines
from trainers.monitoring.parts import Parts, log_files
from trainers.records.manifest import Manifest
from trainers.records.read import RecordsDataset

NOW = 1_767_268_800.0  # 2026-01-01T12:00Z


@pytest.fixture(scope="module")
def rows(digits: Manifest) -> tuple[np.ndarray, list[bytes], np.ndarray]:
    """Held-out digits: images, serialised Examples without their label, labels."""
    import tensorflow as tf

    records = RecordsDataset.open(digits.path)
    paths = [str(digits.folder / shard.file) for shard in digits.split("eval")]
    raw = [r.numpy() for r in tf.data.TFRecordDataset(paths)]
    parsed = records.parse(tf.constant(raw))
    examples = []
    for record in raw:
        example = tf.train.Example.FromString(record)
        del example.features.feature["label"]
        examples.append(example.SerializeToString())
    return parsed["image"].numpy(), examples, parsed["label"].numpy()


@pytest.fixture(scope="module")
def model(exported: Path) -> Any:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(exported))

    def ask(images: np.ndarray) -> dict[str, np.ndarray]:
        answers = loaded.signatures["serving_default"](image=tf.constant(images))
        return {name: value.numpy() for name, value in answers.items()}

    return ask


class Place:
    """A storage root with version 3 of `digits` released, and a request log that a test writes."""

    def __init__(self, root: Path, exported: Path, digits: Manifest, ask: Any) -> None:
        self.root, self._ask = root, ask
        self.logs = root / "requests" / "digits" / "3"
        self.logs.mkdir(parents=True)
        shutil.copytree(exported, root / "models" / "digits" / "3")
        self.spec = {
            "name": "digits",
            "logs": str(root / "requests"),
            "models": str(root / "models"),
            "records": str(digits.folder.parent.parent),
            "output": str(root / "monitoring"),
            "min_rows": 100,
            "now": NOW,
        }

    def write(
        self,
        images: np.ndarray | None = None,
        examples: list[bytes] | None = None,
        *,
        stamp: str = "20260101T110000",
        batch: int = 32,
    ) -> Path:
        """A closed log file of Predict requests and their answers."""
        import tensorflow as tf
        from tensorflow_serving.apis import prediction_log_pb2

        path = self.logs / f"{stamp}-{os.getpid()}-{len(list(self.logs.iterdir()))}.tfrecord"
        data = images if images is not None else examples
        assert data is not None
        with tf.io.TFRecordWriter(str(path)) as writer:
            for at in range(0, len(data), batch):
                log = prediction_log_pb2.PredictionLog()
                log.log_metadata.model_spec.name = "digits"
                request, response = log.predict_log.request, log.predict_log.response
                chunk = data[at : at + batch]
                if examples is None:
                    request.inputs["image"].CopyFrom(tf.make_tensor_proto(chunk))
                    for name, value in self._ask(chunk).items():
                        response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
                else:
                    request.model_spec.signature_name = "examples"
                    request.inputs["examples"].CopyFrom(tf.make_tensor_proto(chunk))
                writer.write(log.SerializeToString())
        return path

    def run(self, **more: Any) -> dict[str, Any]:
        result = monitor.main({**self.spec, **more})
        assert len(json.dumps(result)) < 4000
        return result

    def parts(self) -> dict[str, dict[str, Any]]:
        return Parts(self.root / "monitoring" / "digits" / "3" / "parts").all


@pytest.fixture
def place(tmp_path: Path, exported: Path, digits: Manifest, model: Any) -> Place:
    return Place(tmp_path, exported, digits, model)


def test_requests_like_the_training_data_are_no_drift_by_either_signature(place: Place, rows: Any) -> None:
    images, examples, _ = rows
    place.write(images)
    by_tensor = place.run()
    assert by_tensor["verdict"] == "pass", by_tensor
    assert (by_tensor["rows"], by_tensor["new_files"], by_tensor["alarm"]) == (len(images), 1, False)
    assert by_tensor["versions"] == {"3": "pass"}
    (first,) = place.parts().values()
    place.write(examples=examples, stamp="20260101T103000")
    assert place.run()["rows"] == 2 * len(images)
    second = next(part for key, part in place.parts().items() if key.startswith("20260101T10"))
    assert second["features"] == first["features"], "the same rows, whichever way they were asked"
    drift = read_json(Path(by_tensor["report"]).with_name("drift.json"))
    told = {m["feature"] for m in drift["measures"]}
    assert told == {
        "image",
        "prediction: classes",
        "prediction: max of logits",
        "prediction: max of probabilities",
    }
    page = Path(by_tensor["report"]).read_text()
    assert "digits version 3: requests" in page
    assert "<script" not in page


def test_drift_is_announced_once_and_again_by_a_second_try(place: Place, rows: Any) -> None:
    images = rows[0]
    place.write(255 - images)
    found = place.run(run="first")
    assert found["verdict"] == "warn"
    assert found["alarm"]
    assert "image" in found["drifted"]
    assert "Jensen-Shannon" in found["why"]
    assert place.run(run="first")["alarm"], "its first try may not have lived to say so"
    again = place.run(run="second")
    assert (again["alarm"], again["new_files"], again["verdict"]) == (False, 0, "warn")
    place.write(255 - images[:50])
    assert not place.run(run="third")["alarm"], "the same drift within quiet_hours"
    assert place.run(run="fourth", now=NOW + 23 * 3600, quiet_hours=20)["alarm"]
    assert len(read_json_lines(place.root / "monitoring" / "digits" / "alarms.jsonl")) == 2
    assert place.run(run="fifth", alarm="fail")["alarm"] is False
    strict = {"image": {"js": {"fail": 0.1}}}
    failed = place.run(run="sixth", alarm="fail", thresholds=strict, quiet_hours=0, now=NOW + 23 * 3600 + 60)
    assert (failed["verdict"], failed["alarm"], failed["drifted"]) == ("fail", True, ["image"])


def test_answers_that_have_moved_are_drift_of_predictions(place: Place, rows: Any) -> None:
    images, _, labels = rows
    ones = np.concatenate([images[labels == 1]] * 10)
    place.write(ones)
    found = place.run()
    assert "prediction: classes" in found["drifted"], found


def test_too_few_or_none_are_unknown(place: Place, rows: Any, tmp_path: Path) -> None:
    nothing = place.run()
    assert (nothing["verdict"], nothing["why"]) == ("unknown", "no request in the last 24 hours")
    place.write(rows[0][:40])
    few = place.run()
    assert few["verdict"] == "unknown"
    assert few["why"] == "40 rows are too few to tell, 100 are wanted"
    assert not few["alarm"]
    later = place.run(now=NOW + 3 * 86400)
    assert later["verdict"] == "unknown"
    assert place.run(name="nobody")["why"] == "no request was logged"
    # Records that are gone: unknown, and the files are counted once they are back.
    place.write(rows[0])
    gone = place.run(records=str(tmp_path / "nowhere"))
    assert gone["verdict"] == "unknown"
    assert "are not there to compare with" in gone["why"]
    assert place.run()["new_files"] == 1


def test_late_open_damaged_and_foreign_files(place: Place, rows: Any) -> None:
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    images, examples, _ = rows
    first = place.write(images)
    assert place.run()["new_files"] == 1
    late = place.write(images[:50], stamp="20260101T080000")
    hidden = place.write(images)
    hidden.rename(hidden.with_name(f".{hidden.name}"))
    (place.logs / "notes.txt").write_text("no log")
    damaged = place.write(images[:64], stamp="20260101T090000", batch=16)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    odd = place.logs / "20260101T093000-1-1.tfrecord"
    log = prediction_log_pb2.PredictionLog()
    for example in examples[:7]:
        log.classify_log.request.input.example_list.examples.add().ParseFromString(example)
    other = prediction_log_pb2.PredictionLog()
    other.predict_log.request.inputs["image"].CopyFrom(tf.make_tensor_proto(np.zeros((3, 5), np.float32)))
    with tf.io.TFRecordWriter(str(odd)) as writer:
        for record in (log, other, prediction_log_pb2.PredictionLog()):
            writer.write(record.SerializeToString())
        writer.write(b"\xff\xff no message")
    found = place.run()
    assert found["new_files"] == 3
    assert found["rows"] == len(images) + 50 + 48 + 7
    assert found["odd_requests"] == 4
    counted = [name for part in place.parts().values() for name in part["files"]]
    assert sorted(counted) == sorted(p.name for p in (first, late, damaged, odd))
    reasons = " ".join(r for part in place.parts().values() for r in part["counts"]["reasons"])
    for text in ("is damaged", "image is float32 [5]", "without features", "no PredictionLog"):
        assert text in reasons
    assert place.run()["new_files"] == 0


def test_a_run_that_is_killed_counts_each_file_once(
    place: Place, rows: Any, tmp_path: Path, exported: Path, digits: Manifest, model: Any
) -> None:
    for hour in range(12):
        place.write(rows[0][hour * 20 : hour * 20 + 40], stamp=f"20260101T{hour:02d}0000", batch=1)
    command = [sys.executable, "-m", "trainers.monitor", "--spec", json.dumps(place.spec)]
    for kill_after in (1, 4):
        with (tmp_path / "log").open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 120
        while len(place.parts()) < kill_after and process.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(place.parts()) >= kill_after
    end = place.run()
    counted = [name for part in place.parts().values() for name in part["files"]]
    assert sorted(counted) == [file.path.name for file in log_files(place.logs)]
    assert len(set(counted)) == len(counted) == 12
    whole = Place(tmp_path / "whole", exported, digits, model)
    for path in place.logs.iterdir():
        shutil.copy(path, whole.logs)
    once = whole.run()
    same = ("verdict", "drifted", "rows", "window")
    assert {k: end.get(k) for k in same} == {k: once.get(k) for k in same}


def test_old_files_go_once_they_were_counted(place: Place, rows: Any) -> None:
    old = place.write(rows[0], stamp="20251201T000000")
    new = place.write(rows[0])
    dry = place.run(keep_days=7, dry_run=True)["removed"]
    assert dry == {"files": 1, "bytes": old.stat().st_size, "parts": 1, "reports": 0, "dry_run": True}
    assert old.exists()
    done = place.run(keep_days=7)["removed"]
    assert (done["files"], done["parts"]) == (1, 1)
    assert not old.exists()
    assert new.exists()
    assert len(place.parts()) == 1
    uncounted = place.write(rows[0], stamp="20251201T000000")
    place.run(keep_days=7, records="/nowhere")
    assert uncounted.exists(), "what was never counted stays"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alarm": "loud"}, "alarm must be warn or fail"),
        ({"hours": "many"}, "hours must be a number"),
        ({"min_rows": 0}, "min_rows must be a number of 1 or more"),
        ({"thresholds": {"image": {"size": {"warn": 1}}}}, "image must be some of js"),
        ({"thresholds": {"js": {"warn": -1}}}, "0 or more"),
        ({"colour": 1}, "have no fields but"),
        ({"name": "../x"}, "name must be a model's name"),
        ({"logs": ""}, "have logs"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], text: str) -> None:
    spec = {"name": "m", "logs": "l", "models": "m", "records": "r", "output": "o", **change}
    with pytest.raises(InvalidSpec, match=text):
        monitor.Options.parse(spec)


def test_rows_from_a_template_are_numbers() -> None:
    spec: dict[str, Callable[..., Any] | str] = {
        "name": "m",
        "logs": "l",
        "models": "m",
        "records": "r",
        "output": "o",
    }
    assert monitor.Options.parse({**spec, "min_rows": "5", "hours": "24.0"}).min_rows == 5
