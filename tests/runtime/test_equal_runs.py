"""The same seed and data give the same loss curve, to the bit: two runs, and one that was killed on its way.

Real launchers and trainers, each run a process of its own, with dropout, shuffling and moving averages.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.job.record import JobState
from trainers.runtime.curve import LossCurve, curve_path, read_curve
from trainers.runtime.local_gang import LocalGang
from trainers.runtime.restore import load_trained

# Several processes that import TensorFlow, on a machine that may be busy.
pytestmark = pytest.mark.timeout(1200)

STEPS = 120

DROPOUT = """
import time
import keras
from trainers.models.digits import loss, optimizer

def build_model(hparams):
    image = keras.Input((8, 8, 1), name="image")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(64, activation="relu")(x))
    return keras.Model(image, keras.layers.Dense(10)(keras.layers.Dropout(0.3)(x)))
"""


def test_one_seed_gives_one_loss_curve_also_through_a_kill(
    digits_jobs: Any, write_module: Callable[[str, str], str], tmp_path: Path
) -> None:
    trainer = write_module("with_dropout", DROPOUT)
    settings = {
        "trainer": trainer,
        "steps": STEPS,
        "loss_every": 1,
        "checkpoint_every": 25,
        "batch_size": 100,
    }
    settings |= {"ema_momentum": 0.9, "learning_rate_schedule": {"name": "cosine", "warmup_steps": 10}}
    env = {"PYTHONPATH": f"{tmp_path / 'modules'}:{os.environ.get('PYTHONPATH', '')}"}
    plans = {name: digits_jobs.plan(name, **settings) for name in ("first", "second", "killed")}
    plans["other"] = digits_jobs.plan("other", **{**settings, "seed": 2, "steps": 3})
    gangs = {name: LocalGang(plan, env=env) for name, plan in plans.items()}
    try:
        gangs["killed"].start()
        pid = kill_when(gangs["killed"], 30)
        for name in ("first", "second", "other"):
            gangs[name].start()
        results = {name: gang.wait(600) for name, gang in gangs.items()}
    finally:
        for gang in gangs.values():
            gang.stop()
    for name, result in results.items():
        assert result.outcome is not None, gangs[name].log("chief-0")
        assert result.outcome.state is JobState.SUCCEEDED, gangs[name].log("chief-0")
    again = gangs["killed"].record.heartbeat("chief", 0)
    assert again is not None
    assert again.pid != pid  # it was another process that came to the end
    curves = {name: read_curve(plan.job.output) for name, plan in plans.items()}
    assert [step for step, _ in curves["first"]] == list(range(1, STEPS + 1))
    assert curves["first"] == curves["second"]
    assert curves["first"] == curves["killed"]
    assert curves["first"][:3] != curves["other"]
    losses = [loss for _, loss in curves["first"]]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    first, killed = (load_trained(plans[name].job.output) for name in ("first", "killed"))
    for ours, theirs in zip(first.model.variables, killed.model.variables, strict=True):
        assert np.array_equal(ours, theirs), ours.path


def kill_when(gang: LocalGang, step: int) -> int:
    """Kill the chief's trainer at a step behind `step`; its process id."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        curve = read_curve(gang.plan.job.output)
        if curve and curve[-1][0] > step:
            beat = gang.record.heartbeat("chief", 0)
            if beat is not None and beat.pid and beat.step > 0:
                os.kill(beat.pid, signal.SIGKILL)
                return beat.pid
        gang.poll()
        time.sleep(0.005)
    raise AssertionError(gang.log("chief-0"))


def test_steps_that_are_repeated_replace_their_losses(tmp_path: Path) -> None:
    assert read_curve(tmp_path) == []
    curve = LossCurve(tmp_path)
    for step, loss in ((1, 0.1), (2, 1 / 3), (3, float("nan")), (4, 0.25)):
        curve.note(step, loss)
    assert read_curve(tmp_path) == [(1, 0.1), (2, 1 / 3), (4, 0.25)]
    with curve_path(tmp_path).open("a") as file:
        file.write('{"step": 5, "lo')
    again = LossCurve(tmp_path)
    again.begin_at(2)
    again.note(3, 0.5)
    assert read_curve(tmp_path) == [(1, 0.1), (2, 1 / 3), (3, 0.5)]


@pytest.mark.parametrize(("done", "room"), [(0, 10), (7, 3), (10, 10), (28, 2)])
def test_a_call_ends_where_a_loss_is_due(done: int, room: int) -> None:
    from trainers.runtime.loop import CheckpointEvery

    assert CheckpointEvery(30, loss_every=10).room(done) == room
    assert CheckpointEvery(None, loss_every=10).room(done) == room
    assert CheckpointEvery(400, loss_every=10).most == 10
    assert CheckpointEvery(None).room(done) > 10**8
