"""Many settings at once in real gangs: processes, sockets, a chief that is killed on its way."""

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
from trainers.runtime.local_gang import LocalGang
from trainers.runtime.restore import load_trained

pytestmark = pytest.mark.timeout(1200)

# A dense layer of 64 x 2048 weights (512 KB) is cut over two parameter servers.
WIDE = """
import keras
from trainers.models.digits import loss, optimizer

def build_model(hparams):
    image = keras.Input((8, 8, 1), name="image")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(2048, activation="relu")(x))
    return keras.Model(image, keras.layers.Dense(10)(x))
"""

GANGS: dict[str, dict[str, Any]] = {
    "parameter_server": {"workers": 2, "ps": 2, "mixed_precision": "float16"},
    "multi_worker": {"workers": 1, "mixed_precision": "bfloat16", "jit_compile": True},
}


@pytest.mark.parametrize("strategy", GANGS)
def test_settings_hold_in_a_gang_whose_chief_is_killed(
    digits_jobs: Any, write_module: Callable[[str, str], str], tmp_path: Path, strategy: str
) -> None:
    import tensorflow as tf

    plan = digits_jobs.plan(
        strategy,
        strategy=strategy,
        trainer=write_module("wide_with_dropout", WIDE),
        steps=400,
        checkpoint_every=50,
        loss_every=10,
        learning_rate=0.003,
        learning_rate_schedule={"name": "cosine", "warmup_steps": 20},
        gradient_clip_norm=1.0,
        ema_momentum=0.95,
        **GANGS[strategy],
    )
    env = {"PYTHONPATH": f"{tmp_path / 'modules'}:{os.environ.get('PYTHONPATH', '')}"}
    folder = Path(plan.job.output)
    with LocalGang(plan, env=env, retries=1) as gang:
        gang.start()
        killed = kill_after_a_checkpoint(gang, folder)
        result = gang.wait(900)
    assert result.outcome is not None, gang.log("chief-0")
    assert (result.outcome.state, result.outcome.step) == (JobState.SUCCEEDED, 400), gang.log("chief-0")
    beat = gang.record.heartbeat("chief", 0)
    assert beat is not None
    assert beat.pid != killed
    assert result.outcome.metrics["loss"] < 0.6
    trained = load_trained(folder)
    assert trained.step == 400
    checkpoint = tf.train.load_checkpoint(str(folder / "checkpoints"))
    for number, variable in enumerate(trained.model.variables):
        where = f"{number:04d}/.ATTRIBUTES/VARIABLE_VALUE"
        kind = "average" if variable.trainable else "model"
        assert np.array_equal(variable, checkpoint.get_tensor(f"{kind}/{where}")), variable.path
        if variable.trainable:  # not far from the weights that they follow, nor the same
            weight, average = checkpoint.get_tensor(f"model/{where}"), np.asarray(variable)
            assert not np.array_equal(weight, average), variable.path
            assert np.abs(weight - average).mean() < 0.1, variable.path


def kill_after_a_checkpoint(gang: LocalGang, folder: Path) -> int:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        gang.poll()
        beat = gang.record.heartbeat("chief", 0)
        if beat is not None and beat.pid and (folder / "checkpoints" / "checkpoint").exists():
            os.kill(beat.pid, signal.SIGKILL)
            return beat.pid
        time.sleep(0.01)
    raise AssertionError(gang.log("chief-0"))
