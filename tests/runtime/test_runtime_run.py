"""Runs of the loop in this process: strategy local, on the digits."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.job.plan import Plan
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import RoleKind
from trainers.runtime import run as run_module
from trainers.runtime.checkpoints import (
    Checkpoints,
    NotFinite,
    StaleCheckpoint,
    restore_newest,
    saved_variables,
)
from trainers.runtime.loop import LeftEarly
from trainers.runtime.restore import Untrained, load_trained
from trainers.runtime.run import train
from trainers.runtime.tracking import spool_path


def train_plan(plan: Plan) -> JobRecord:
    """Run a plan's chief here."""
    record = JobRecord.open(plan.job.output)
    train(record, plan, plan.replica(RoleKind.CHIEF, 0))
    return record


def weights(folder: Path | str) -> list[np.ndarray]:
    return [np.asarray(v) for v in load_trained(folder).model.trainable_variables]


def accuracy(folder: Path | str, manifest: Path) -> float:
    from trainers.records.read import Dataset

    trained = load_trained(folder)
    (batch,) = Dataset.open(manifest).dataset("eval", 1000)
    predicted = np.argmax(trained.model(batch["image"]), axis=-1)
    return float(np.mean(predicted == batch["label"].numpy()))


def spooled(folder: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in spool_path(folder).read_text().splitlines()]


@pytest.fixture(scope="module")
def quick_pulse() -> Any:
    """Beats often enough that a short run has several."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        run_module, "Pulse", lambda *args, **kwargs: PULSE(*args, **{**kwargs, "every": 0.05, "idle": 0.1})
    )
    yield
    patch.undo()


PULSE = run_module.Pulse


def test_digits_are_learnt(digits_jobs: Any, digits_manifest: Path, quick_pulse: None) -> None:
    plan = digits_jobs.plan(steps=400, checkpoint_every=150, learning_rate=0.003)
    record = train_plan(plan)
    outcome = record.outcome()
    assert outcome is not None
    assert (outcome.state, outcome.step) == (JobState.SUCCEEDED, 400)
    assert outcome.metrics["steps"] == 400
    assert outcome.metrics["examples_per_s"] > 0
    assert outcome.metrics["loss"] < 0.2
    assert {"queue", "start", "init", "train", "checkpoint", "restarts"} == set(outcome.seconds)
    asked = record.generation().at
    assert sum(outcome.seconds.values()) == pytest.approx(outcome.at - asked, abs=0.2)
    assert outcome.seconds["train"] > 0
    assert outcome.seconds["checkpoint"] > 0
    assert accuracy(record.folder, digits_manifest) > 0.95
    names = sorted(path.name for path in (record.folder / "checkpoints").glob("*.index"))
    assert names == ["step-150.index", "step-300.index", "step-400.index"]
    beat = record.heartbeat("chief", 0)
    assert beat is not None
    assert (beat.phase, beat.step, beat.target, beat.eta_s) == ("ended", 400, 400, 0.0)
    assert beat.input_wait is not None
    lines = spooled(record.folder)
    assert {"param": "learning_rate", "value": "0.003"} in lines
    assert {"param": "strategy", "value": "local"} in lines
    losses = [line["value"] for line in lines if line.get("metric") == "loss"]
    assert losses[-1] == pytest.approx(outcome.metrics["loss"])
    tags = {line["tag"] for line in lines if "tag" in line}
    assert {"trainyard.records_digest", "trainyard.folder", "trainyard.code_version"} <= tags


def test_the_same_seed_gives_the_same_weights_to_the_bit(digits_jobs: Any) -> None:
    first, second, other = (
        train_plan(digits_jobs.plan(name, steps=60, seed=seed)).folder
        for name, seed in (("first", 5), ("second", 5), ("other", 6))
    )
    assert all(np.array_equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(weights(first), weights(other), strict=True))


def test_a_run_that_is_asked_to_leave_goes_on_where_it_was(digits_jobs: Any) -> None:
    plan = digits_jobs.plan(steps=300, checkpoint_every=1000)
    record = JobRecord.open(plan.job.output)
    me = plan.replica(RoleKind.CHIEF, 0)
    run = run_module._Run(record, plan, me)

    def stop_soon() -> None:
        while run.progress.step < 20:
            time.sleep(0.01)
        run.stop.set()

    thread = threading.Thread(target=stop_soon)
    thread.start()
    with pytest.raises(LeftEarly, match="asked to leave at step") as left:
        run.train(None)
    thread.join()
    assert left.value.failure_class.value == "PREEMPTED"
    saved = load_trained(record.folder).step
    assert 20 <= saved < 300
    assert record.outcome() is None
    assert record.state is JobState.RUNNING
    again = run_module._Run(record, plan, me)
    step, metrics = again.train(None)
    assert step == 300
    assert again.progress.trained_steps == 300 - saved
    assert load_trained(record.folder).step == 300
    assert metrics["steps"] == 300


def test_a_finished_run_that_could_not_say_so_only_says_so(digits_jobs: Any) -> None:
    plan = digits_jobs.plan(steps=30)
    record = train_plan(plan)
    (record.folder / "outcome.json").unlink()
    again = run_module._Run(record, plan, plan.replica(RoleKind.CHIEF, 0))
    assert again.train(None) == (30, {"steps": 30.0})


def test_a_loss_that_is_no_number_keeps_the_last_good_checkpoint(
    digits_jobs: Any, write_module: Callable[[str, str], str]
) -> None:
    name = write_module(
        "explodes",
        """
        import keras
        from trainers.models.digits import build_model, loss

        def optimizer(hparams, learning_rate):
            return keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([40], [0.01, 1e30]))
        """,
    )
    plan = digits_jobs.plan(steps=200, checkpoint_every=10, trainer=name)
    with pytest.raises(NotFinite, match=r"(loss|weights) became NaN or infinite by step") as raised:
        train_plan(plan)
    assert raised.value.failure_class.value == "USER"
    good = weights(plan.job.output)
    assert all(np.isfinite(w).all() for w in good)
    assert 0 < load_trained(plan.job.output).step <= 50


def test_a_broken_checkpoint_falls_back_to_the_one_before(
    digits_jobs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plan = digits_jobs.plan(steps=60, checkpoint_every=20)
    record = train_plan(plan)
    data = next((record.folder / "checkpoints").glob("step-60.data*"))
    data.write_bytes(data.read_bytes()[:100])
    assert load_trained(record.folder).step == 40
    assert "step-60 is broken, taking the one before" in caplog.text
    (record.folder / "checkpoints" / "step-40.index").write_bytes(b"")
    assert load_trained(record.folder).step == 20


def test_a_checkpoint_of_another_model_is_refused(
    digits_jobs: Any, write_module: Callable[[str, str], str]
) -> None:
    import keras
    import tensorflow as tf

    plan = digits_jobs.plan(steps=20)
    record = train_plan(plan)
    image = keras.Input((8, 8, 1), name="image")
    other = keras.Model(image, keras.layers.Dense(3)(keras.layers.Flatten()(image)))
    with pytest.raises(StaleCheckpoint, match="does not fit the model"):
        restore_newest(tf.train.Checkpoint(model=saved_variables(other)), record.folder / "checkpoints")


def test_there_is_nothing_to_load_before_training(digits_jobs: Any) -> None:
    with pytest.raises(Untrained, match="has no checkpoint"):
        load_trained(digits_jobs.plan().job.output)


def test_weights_can_come_from_another_job(digits_jobs: Any) -> None:
    import dataclasses

    source = train_plan(digits_jobs.plan("source", steps=100)).folder
    plan = digits_jobs.plan("warm", steps=1, learning_rate=1e-9)
    warm = dataclasses.replace(plan, job=dataclasses.replace(plan.job, warm_start=str(source)))
    record = train_plan(warm)
    pairs = zip(weights(source), weights(record.folder), strict=True)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_a_module_with_its_own_data_and_several_outputs(
    digits_jobs: Any, write_module: Callable[[str, str], str]
) -> None:
    name = write_module(
        "own_data",
        """
        import keras
        import tensorflow as tf

        SEEN = []

        def build_model(hparams):
            a = keras.Input((2,), name="a")
            b = keras.Input((1,), name="b")
            x = keras.layers.Concatenate()([a, b])
            dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-6))
            return keras.Model([a, b], {"logits": dense(x), "extra": x})

        def loss(hparams):
            return keras.losses.MeanSquaredError()

        def make_dataset(records, ctx):
            SEEN.append((records.label, ctx.global_batch, ctx.learning_rate, ctx.shard, ctx.shuffle_seed()))
            def row(i):
                a = tf.random.stateless_normal((4, 2), [i, 0])
                b = tf.random.stateless_normal((4, 1), [i, 1])
                if i % 2 == 0:                      # AutoGraph works in the user's own functions
                    b = b * 2.0
                return {"a": a, "b": b, "unused": b}, a[:, :1] + 3.0 * b, tf.ones([4])
            return tf.data.Dataset.counter().map(row)
        """,
    )
    plan = digits_jobs.plan(steps=400, learning_rate=0.05, batch_size=4, seed=3, trainer=name)
    record = train_plan(plan)
    import importlib

    assert importlib.import_module(name).SEEN == [("label", 4, 0.05, (0, 1), 3)]
    kernel = weights(record.folder)[0].ravel()
    assert np.allclose(kernel, [1.0, 0.0, 3.0], atol=0.05)
    assert math.isfinite((record.outcome() or pytest.fail("no outcome")).metrics["loss"])


def test_a_plain_module_trains(digits_jobs: Any, write_module: Callable[[str, str], str]) -> None:
    name = write_module(
        "plain",
        """
        import keras
        import tensorflow as tf

        class Linear(tf.Module):
            def __init__(self):
                super().__init__()
                self.w = tf.Variable(tf.zeros([64, 10]), name="w")
                self.b = tf.Variable(tf.zeros([10]), name="b")

            def __call__(self, features):
                return tf.reshape(tf.cast(features["image"], tf.float32), [-1, 64]) / 255.0 @ self.w + self.b

        def build_model(hparams):
            return Linear()

        def loss(hparams):
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        """,
    )
    plan = digits_jobs.plan(steps=200, learning_rate=0.05, trainer=name)
    record = train_plan(plan)
    outcome = record.outcome()
    assert outcome is not None
    assert outcome.metrics["loss"] < 0.5


def test_mirrored_on_one_device_is_local(digits_jobs: Any) -> None:
    local = train_plan(digits_jobs.plan("local", steps=20)).folder
    mirrored = train_plan(digits_jobs.plan("mirrored", strategy="mirrored", steps=20)).folder
    pairs = zip(weights(local), weights(mirrored), strict=True)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_checkpoints_hold_the_optimizer_too(digits_jobs: Any) -> None:
    import keras

    plan = digits_jobs.plan(steps=50)
    record = train_plan(plan)
    model = load_trained(record.folder).model
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    assert Checkpoints(record.folder, model, optimizer).restore() == 50
    assert int(optimizer.iterations) == 50
