"""Evaluation of real jobs on real records, beside champions whole, strange and broken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from serving.release.gate import Thresholds, decide
from trainers import evaluate
from trainers.evaluation.scoring import LabelOutOfRange
from trainers.job import labels, termination
from trainers.job.errors import ConfigError, DataError, InvalidSpec
from trainers.records.build import prepare


def read(result):
    return json.loads(Path(result["evaluation"]).read_text())


def test_digits(job, digits):
    result = evaluate.main(
        {"job": str(job), "manifest": str(digits.path), "champion": None, "min_examples": 100}
    )
    assert result["evaluation"] == str(job / "evaluation.json")
    assert result["examples"] == digits.counts["eval"] > 300
    assert result["champion"] is None
    assert result["metrics"]["accuracy"] > 0.85
    document = read(result)
    assert document["metrics"] == result["metrics"]
    assert document["records"]["digest"] == digits.digest
    assert document["step"] == 120
    assert document["enough_examples"] is True
    confusion = np.array(document["confusion"])
    assert confusion.shape == (10, 10)
    assert confusion.trace() / confusion.sum() == pytest.approx(result["metrics"]["accuracy"], abs=1e-6)
    interval = document["intervals"]["accuracy"]
    assert interval["low"] < result["metrics"]["accuracy"] < interval["high"]
    assert set(document["seconds"]) == {"import", "load", "evaluate"}


def test_the_gate_reads_it(job, exported):
    champion = {"version": 3, "path": str(exported)}
    result = evaluate.main({"job": str(job), "champion": champion})
    verdict = decide(result, Thresholds(min_accuracy=0.5, max_drop=0.01, min_examples=100))
    assert verdict.outcome == "pass"
    assert verdict.numbers["champion_version"] == 3
    assert verdict.numbers["drop"] == pytest.approx(0, abs=1e-6)


def test_a_champion_is_asked_the_very_same(job, exported):
    result = evaluate.main({"job": str(job), "champion": {"version": 3, "path": str(exported)}})
    assert result["champion"]["version"] == 3
    assert result["champion"]["metrics"] == pytest.approx(result["metrics"], abs=1e-5)
    document = read(result)["champion"]
    assert document["confusion"] == read(result)["confusion"]
    assert document["difference"]["accuracy"]["value"] == 0
    assert len(json.dumps(result)) < termination.LIMIT / 2


@pytest.mark.parametrize("batch_size", [7, 64, 512])
def test_the_batch_size_changes_nothing(job, digits, exported, batch_size):
    from trainers.records.read import RecordsDataset
    from trainers.runtime.restore import load_trained

    records, trained = RecordsDataset.open(digits.path), load_trained(job)
    champion = {"version": 1, "path": str(exported)}
    whole = evaluate.evaluate(trained, records, batch_size=4096)
    batched = evaluate.evaluate(trained, records, champion, batch_size=batch_size)
    assert batched["confusion"] == whole["confusion"] == batched["champion"]["confusion"]
    assert batched["metrics"] == pytest.approx(whole["metrics"], rel=1e-4)


# ---- champions that can't be compared with


class Other(tf.Module):
    """A SavedModel of another make."""

    def __init__(self, outputs, name="image", shape=(None, 8, 8, 1), dtype=tf.uint8):
        super().__init__()
        self._outputs = outputs
        self.serve = tf.function(self._serve, input_signature=[tf.TensorSpec(shape, dtype, name=name)])

    def _serve(self, image):
        return self._outputs(tf.shape(image)[0])

    def save(self, folder):
        tf.saved_model.save(self, str(folder), signatures=self.serve)
        return folder


def always_three(names, classes=10):
    return lambda n: {name: tf.one_hot(tf.fill([n], 3), classes) for name in names}


def truncated(folder, exported):
    shutil.copytree(exported, folder)
    data = next((folder / "variables").glob("*.data-*"))
    data.write_bytes(data.read_bytes()[:100])


def garbage(folder, exported):
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"no protobuf")


BROKEN = [
    (lambda folder, exported: None, "there is no SavedModel in"),
    (garbage, "can't be loaded"),
    (truncated, "can't be loaded"),
    (lambda f, e: tf.saved_model.save(tf.Module(), str(f)), "has no signature serving_default"),
    (
        lambda f, e: Other(always_three(["logits"]), name="pixels").save(f),
        "it takes pixels, which the records",
    ),
    (
        lambda f, e: Other(always_three(["logits"]), shape=(None, 28, 28, 1)).save(f),
        "it refuses these records",
    ),
    (lambda f, e: Other(always_three(["a", "b"])).save(f), "without logits or probabilities"),
    (
        lambda f, e: Other(always_three(["logits"], classes=5)).save(f),
        "the model gives 5 scores a row for 10 CLASSES",
    ),
]


@pytest.mark.parametrize(("make", "error"), BROKEN, ids=[row[1][:30] for row in BROKEN])
def test_a_champion_that_cannot_be_asked_is_said(job, exported, tmp_path, make, error, caplog):
    make(tmp_path / "champion", exported)
    result = evaluate.main({"job": str(job), "champion": {"version": 2, "path": str(tmp_path / "champion")}})
    assert result["champion"]["version"] == 2
    assert error in result["champion"]["error"]
    assert "metrics" not in result["champion"]
    assert result["metrics"]["accuracy"] > 0.85
    assert "champion version 2 can't be compared with" in caplog.text
    assert decide(result, Thresholds(min_accuracy=0.5, min_examples=100)).outcome == "unknown"


def test_a_champion_that_gives_only_probabilities(job, tmp_path, digits):
    folder = Other(always_three(["probabilities"])).save(tmp_path / "champion")
    result = evaluate.main({"job": str(job), "champion": {"version": 2, "path": str(folder)}})
    threes = read(result)["per_class"][3]["examples"]
    assert result["champion"]["metrics"]["accuracy"] == pytest.approx(threes / digits.counts["eval"])
    difference = read(result)["champion"]["difference"]["accuracy"]
    assert difference["low"] > 0.5


# ---- other trainers


def test_a_regression(houses_job, houses):
    result = evaluate.main({"job": str(houses_job)})
    assert result["metrics"]["mae"] == pytest.approx(0.5, abs=1e-5)
    assert result["metrics"]["rmse"] == pytest.approx(0.5, abs=1e-5)
    assert result["metrics"]["loss"] == pytest.approx(0.25, abs=1e-5)
    assert result["metrics"]["mape"] > 0
    document = read(result)
    assert document["task"] == "regression"
    assert document["classes"] is None
    assert "confusion" not in document


BINARY = """
    import keras
    def build_model(hparams):
        image = keras.Input((8, 8, 1), name="image")
        x = keras.layers.Flatten()(image)
        return keras.Model(image, keras.layers.Dense(1, activation="sigmoid")(x))
    def loss(hparams):
        return keras.losses.BinaryCrossentropy()
    def make_eval_dataset(records, split, batch_size):
        import tensorflow as tf
        return records.dataset(split, batch_size).map(
            lambda b: ({"image": b["image"]}, tf.cast(b["label"] >= 5, tf.int64)[:, None]))
"""


def test_two_classes_by_one_probability_with_labels_of_the_trainers_own(trainer, digits):
    result = evaluate.main({"job": str(trainer(BINARY, digits))})
    document = read(result)
    assert np.array(document["confusion"]).shape == (2, 2)
    assert 0 <= result["metrics"]["accuracy"] <= 1
    assert result["metrics"]["loss"] > 0


SUBCLASSED = """
    import keras
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(10)
        def call(self, features):
            image = keras.ops.cast(features["image"], "float32")
            return {"logits": self.dense(keras.ops.reshape(image, (-1, 64)) / 255)}
    def build_model(hparams):
        import tensorflow as tf
        net = Net()
        net({"image": tf.zeros((1, 8, 8, 1), tf.uint8)})
        return net
    def loss(hparams):
        import tensorflow as tf
        return lambda label, output: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(label, output["logits"]))
    CLASSES = list(range(10))
"""


def test_a_model_without_named_inputs_and_a_loss_that_is_a_function(trainer, digits):
    result = evaluate.main({"job": str(trainer(SUBCLASSED, digits))})
    document = read(result)
    assert result["metrics"]["loss"] > 0
    assert "accuracy" in document["intervals"]
    assert "loss" not in document["intervals"], "a mean of a batch is no example's"
    assert document["classes"] == [str(n) for n in range(10)]


FIVE = """
    import keras
    def build_model(hparams):
        image = keras.Input((8, 8, 1), name="image")
        return keras.Model(image, keras.layers.Dense(5)(keras.layers.Flatten()(image)))
    def loss(hparams):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""


def test_a_label_that_is_no_class_of_the_model(trainer, digits):
    with pytest.raises(LabelOutOfRange, match="none of the model's 5 classes") as info:
        evaluate.main({"job": str(trainer(FIVE, digits))})
    assert isinstance(info.value, DataError)


def test_nothing_held_out_is_no_metrics(job, tmp_path, digits):
    raw = Path(digits.sources[0].removeprefix("file://"))
    everything = prepare(
        raw, tmp_path / "records", name="digits", label="label", eval_fraction=0.0, progress=lambda line: None
    )
    result = evaluate.main({"job": str(job), "manifest": str(everything.path), "min_examples": 1})
    assert (result["metrics"], result["examples"]) == ({}, 0)
    assert read(result)["enough_examples"] is False
    assert decide(result, Thresholds()).outcome == "unknown"


# ---- what is refused


REFUSED = [
    ({}, "job"),
    ({"job": 7}, "job"),
    ({"job": "x", "manifest": 7}, "manifest"),
    ({"job": "x", "champion": {"version": 1}}, "champion"),
    ({"job": "x", "champion": "/models/1"}, "champion"),
    ({"job": "x", "min_examples": -1}, "min_examples"),
    ({"job": "x", "min_examples": True}, "min_examples"),
    ({"job": "x", "records": "m"}, "spec"),
]


@pytest.mark.parametrize(("spec", "field"), REFUSED)
def test_refused(spec, field):
    with pytest.raises(InvalidSpec) as info:
        evaluate.main(spec)
    assert info.value.field == field


def test_no_job_there(tmp_path):
    with pytest.raises(ConfigError, match="no job in"):
        evaluate.main({"job": str(tmp_path)})


def test_a_corrupt_shard_is_named(job, digits, tmp_path):
    shutil.copytree(digits.folder, tmp_path / "records")
    shard = tmp_path / "records" / digits.split("eval")[0].file
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    with pytest.raises(DataError, match=shard.name):
        evaluate.main({"job": str(job), "manifest": str(tmp_path / "records")})


def test_as_a_process(job, digits, tmp_path):
    spec = {"job": str(job), "manifest": str(digits.path), "champion": {"version": 1, "path": "/nowhere"}}
    env = {**os.environ, labels.ENV_TERMINATION_LOG: str(tmp_path / "log")}
    run = subprocess.run(
        [sys.executable, "-m", "trainers.evaluate", "--spec", json.dumps(spec)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    message = termination.parse((tmp_path / "log").read_text())
    assert message.result["examples"] == digits.counts["eval"]
    assert "there is no SavedModel in /nowhere" in message.result["champion"]["error"]
    assert (job / "evaluation.json").is_file()
