"""How many steps a call makes, when checkpoints are due, and what a model is given."""

from __future__ import annotations

from tests.runtime.clock import Clock
from trainers.runtime.loop import CheckpointEvery
from trainers.runtime.steps import StepSize, model_inputs


def test_steps_a_call_follow_the_time_of_a_step() -> None:
    size = StepSize(seconds=0.25, most=50)
    assert size.value == 1
    for _ in range(5):
        size.measured(0.01)
    assert size.value == 25
    size.measured(0.49)
    assert size.value == 1
    for _ in range(20):
        size.measured(1e-9)
    assert size.value == 50


def test_checkpoints_are_due_by_steps_or_by_time() -> None:
    clock = Clock()
    by_steps = CheckpointEvery(100, clock=clock)
    assert [by_steps.due(step) for step in (0, 99, 100, 101)] == [False, False, True, True]
    assert (by_steps.room(0), by_steps.room(40), by_steps.room(100), by_steps.most) == (100, 60, 100, 25)
    by_steps.saved(105)
    assert (by_steps.due(199), by_steps.due(200)) == (False, True)
    assert by_steps.due(300)


def test_checkpoints_by_time_take_a_fiftieth_of_it() -> None:
    clock = Clock()
    by_time = CheckpointEvery(None, clock=clock)
    assert by_time.room(1) > 10**8
    for cost, pause in ((0.0, 5.0), (0.2, 10.0), (3.0, 150.0), (60.0, 600.0)):
        by_time.saved(1, cost=cost)
        clock.now += pause - 0.1
        assert not by_time.due(10_000), cost
        clock.now += 0.2
        assert by_time.due(10_000), cost


def test_inputs_come_in_the_structure_of_the_model() -> None:
    import keras

    features = {"a": 1, "b": 2, "c": 3}
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    out = keras.layers.Add()([a, b])
    assert model_inputs(keras.Model([b, a], out), features) == [2, 1]
    assert model_inputs(keras.Model({"a": a, "b": b}, out), features) == {"a": 1, "b": 2}
    assert model_inputs(keras.Model(a, keras.layers.Dense(1)(a)), features) == 1
    assert model_inputs(lambda x: x, features) == features
    assert model_inputs(keras.Model(a, keras.layers.Dense(1)(a)), 5) == 5
