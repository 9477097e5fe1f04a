"""What users may build: Keras models of all kinds and plain modules, from training to an exported model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.building import UnusableSetting
from trainers.runtime.module import UnusableTrainer
from trainers.runtime.restore import load_trained
from trainers.runtime.run import train

LINEAR = """
import keras
import tensorflow as tf

CLASSES = [str(digit) for digit in range(10)]

class Linear(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = None
        self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)

    def __call__(self, features):
        x = tf.reshape(tf.cast(features["image"], tf.float32), [-1, 64]) / 255.0
        if self.w is None:
            self.w = tf.Variable(tf.zeros([x.shape[-1], 10]), name="w")
        self.calls.assign_add(1)
        return {"logits": x @ self.w, "mean": tf.reduce_mean(x, axis=1)}

def build_model(hparams):
    return Linear()

def loss(hparams):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def metrics(hparams):
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
"""


def train_plan(plan: Any) -> Path:
    record = JobRecord.open(plan.job.output)
    train(record, plan, plan.replica(RoleKind.CHIEF, 0))
    return record.folder


def test_a_plain_module_comes_from_training_to_serving(
    digits_jobs: Any, digits_manifest: Path, write_module: Callable[[str, str], str]
) -> None:
    import tensorflow as tf

    from trainers import evaluate, export

    name = write_module("linear", LINEAR)
    settings = {"trainer": name, "learning_rate": 0.05, "ema_momentum": 0.9, "gradient_clip_norm": 1.0}
    half = digits_jobs.plan(steps=100, **settings)
    folder = train_plan(half)
    # The same job goes on to twice the steps: from its checkpoint, in a new model.
    (folder / "outcome.json").unlink()
    whole = dataclasses.replace(half, job=dataclasses.replace(half.job, args={**half.job.args, "steps": 200}))
    train(JobRecord.open(folder), whole, whole.replica(RoleKind.CHIEF, 0))
    trained = load_trained(folder)
    assert trained.step == 200
    assert isinstance(trained.model, tf.Module)
    assert int(trained.model.calls) >= 200
    spec = {"job": str(folder), "manifest": str(digits_manifest), "champion": None}
    assert evaluate.main(spec)["metrics"]["accuracy"] > 0.85
    exported = export.main({"job": str(folder), "manifest": str(digits_manifest)})
    served = tf.saved_model.load(exported["export"]).signatures["serving_default"]
    answer = served(image=tf.zeros([2, 8, 8, 1], tf.uint8))
    assert set(answer) == {"logits", "mean", "probabilities", "classes"}


def test_averages_are_what_is_evaluated_and_exported(digits_jobs: Any) -> None:
    import tensorflow as tf

    plan = digits_jobs.plan(steps=60, learning_rate=0.01, ema_momentum=0.99)
    folder = train_plan(plan)
    checkpoint = tf.train.load_checkpoint(str(folder / "checkpoints"))
    model = load_trained(folder).model
    kept = [n for n in checkpoint.get_variable_to_shape_map() if n.startswith("average/")]
    assert len(kept) == len(model.trainable_variables)
    number = next(i for i, v in enumerate(model.variables) if v is model.trainable_variables[0])
    raw, average = (
        checkpoint.get_tensor(f"{kind}/{number:04d}/.ATTRIBUTES/VARIABLE_VALUE")
        for kind in ("model", "average")
    )
    assert np.array_equal(model.trainable_variables[0], average)
    assert not np.allclose(raw, average, atol=1e-4)
    # Another job that starts from it takes what was evaluated, too.
    warm = digits_jobs.plan("warm", steps=1, learning_rate=1e-9, ema_momentum=0.5)
    warm = dataclasses.replace(warm, job=dataclasses.replace(warm.job, warm_start=str(folder)))
    begun = load_trained(train_plan(warm)).model
    assert np.allclose(begun.trainable_variables[0], average, atol=1e-6)


def test_a_model_in_mixed_precision_is_served_in_float32(digits_jobs: Any) -> None:
    import keras

    folder = train_plan(digits_jobs.plan(steps=30, mixed_precision="bfloat16", jit_compile=True))
    assert keras.config.dtype_policy().name == "float32"
    model = load_trained(folder).model
    assert model.compute_dtype == "float32"
    assert str(model(np.zeros([1, 8, 8, 1])).dtype) == "<dtype: 'float32'>"


REFUSED = {
    "def build_model(hparams): return 3": (
        UnusableTrainer,
        {},
        r"must return a keras\.Model or a tf\.Module, got int",
    ),
    "def build_model(hparams): return tf.Module()": (
        UnusableTrainer,
        {},
        "returns a Module that has no __call__",
    ),
    "def build_model(hparams): return Empty()": (UnusableTrainer, {}, "a model without trainable variables"),
    "def build_model(hparams): return Module()": (
        UnusableSetting,
        {"mixed_precision": "bfloat16"},
        "mixed_precision bfloat16 works on Keras layers, and build_model of odd returns a Module",
    ),
    "def build_model(hparams): return Module()\ndef optimizer(hparams, rate): return 'adam'": (
        UnusableTrainer,
        {},
        "optimizer of odd must return a keras optimizer, got str",
    ),
    "def build_model(hparams): return Module()\n"
    "def optimizer(hparams, rate): return keras.optimizers.SGD(rate, clipnorm=1.0)": (
        UnusableSetting,
        {"gradient_clip_value": 1.0},
        "gradient_clip_value is given, and optimizer of odd sets clipnorm itself",
    ),
}

ODD = """
import keras
import tensorflow as tf

class Empty(tf.Module):
    def __call__(self, features):
        return features["image"]

class Module(Empty):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([1.0])

def loss(hparams):
    return keras.losses.MeanSquaredError()
"""


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(
    digits_jobs: Any, write_module: Callable[[str, str], str], text: str
) -> None:
    error, args, message = REFUSED[text]
    plan = digits_jobs.plan(trainer=write_module("odd", ODD + text), **args)
    with pytest.raises(error, match=message):
        train_plan(plan)


WORDS = """
import keras
import tensorflow as tf

def build_model(hparams):
    words = keras.Input((None,), dtype="string", name="words")
    colour = keras.Input((), dtype="string", name="colour")
    ids = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])
    bag = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(4, 8)(ids(words)))
    one = keras.layers.Embedding(4, 2)(ids(colour))
    out = keras.layers.Dense(1)(keras.layers.Concatenate()([bag, one]))
    return keras.Model([words, colour], out)

def loss(hparams):
    return keras.losses.MeanSquaredError()

def make_dataset(records, ctx):
    text = tf.constant([["red", "green"], ["blue", ""], ["green", "green"], ["red", "other"]])
    colour = tf.constant(["red", "blue", "green", "red"])
    value = tf.constant([[1.0], [0.0], [2.0], [3.0]])
    data = tf.data.Dataset.from_tensor_slices(({"words": text, "colour": colour}, value))
    return data.repeat().batch(ctx.batch_size, drop_remainder=True)
"""


@pytest.mark.parametrize("strategy", ["local", "mirrored"])
def test_text_goes_through_layers_of_the_model(
    digits_jobs: Any, write_module: Callable[[str, str], str], strategy: str
) -> None:
    plan = digits_jobs.plan(
        steps=150, strategy=strategy, batch_size=4, learning_rate=0.05, trainer=write_module("text", WORDS)
    )
    folder = train_plan(plan)
    outcome = JobRecord.open(folder).outcome()
    assert outcome is not None
    assert outcome.metrics["loss"] < 0.2


def test_text_does_not_compile(digits_jobs: Any, write_module: Callable[[str, str], str]) -> None:
    plan = digits_jobs.plan(steps=5, batch_size=4, jit_compile=True, trainer=write_module("text", WORDS))
    with pytest.raises(UnusableSetting, match="jit_compile: XLA can't compile the model: "):
        train_plan(plan)


def test_the_example_of_the_docs_trains(digits_jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "examples"))
    schedule = {"name": "cosine", "warmup_steps": 20}
    plan = digits_jobs.plan(
        steps=150, trainer="shifted_digits", learning_rate=0.05, learning_rate_schedule=schedule
    )
    outcome = JobRecord.open(train_plan(plan)).outcome()
    assert outcome is not None
    assert outcome.metrics["loss"] < 1.0
