"""Learning rate schedules, against Keras's own where it has the same."""

from __future__ import annotations

from typing import Any

import pytest

from trainers.runtime.schedules import make_schedule

STEPS = (0, 1, 4, 5, 9, 10, 11, 20, 55, 99, 100, 150)


def rates(schedule: dict[str, Any]) -> list[float]:
    made = make_schedule(0.5, schedule, steps=100)
    return [float(made(step)) for step in STEPS]


def test_keras_says_the_same() -> None:
    import keras

    schedules = keras.optimizers.schedules
    theirs = schedules.CosineDecay(0.5, 100, alpha=0.1)
    ours = rates({"name": "cosine", "final_factor": 0.1})
    assert ours == pytest.approx([float(theirs(step)) for step in STEPS], rel=1e-5)
    decay = schedules.ExponentialDecay(0.5, 10, 0.5, staircase=True)
    ours = rates({"name": "exponential", "decay_steps": 10, "decay_rate": 0.5, "staircase": True})
    assert ours == pytest.approx([float(decay(step)) for step in STEPS], rel=1e-5)
    pieces = schedules.PiecewiseConstantDecay([9, 54], [0.5, 0.05, 0.0])
    ours = rates({"name": "piecewise", "boundaries": [10, 55], "factors": [1.0, 0.1, 0.0]})
    assert ours == pytest.approx([float(pieces(step)) for step in STEPS], rel=1e-5)


def test_warm_up_rises_and_what_follows_counts_from_its_end() -> None:
    assert rates({"name": "constant", "warmup_steps": 10})[:7] == pytest.approx(
        [0.05, 0.1, 0.25, 0.3, 0.5, 0.5, 0.5]
    )
    cosine = rates({"name": "cosine", "warmup_steps": 10})
    assert cosine[5] == pytest.approx(0.5)
    assert cosine[8] == pytest.approx(0.25)  # half way from 10 to 100
    assert cosine[-2:] == pytest.approx([0.0, 0.0], abs=1e-7)


def test_a_schedule_is_a_configuration() -> None:
    made = make_schedule(0.5, {"name": "constant"}, steps=10)
    assert made.get_config() == {"learning_rate": 0.5, "schedule": {"name": "constant"}, "steps": 10}
