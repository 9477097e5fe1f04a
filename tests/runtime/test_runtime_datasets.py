"""The data that a trainer module makes: what the loop refuses, and what it says when there is no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainers.job.errors import ConfigError, DataError
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.blame import blame
from trainers.runtime.context import context_of
from trainers.runtime.datasets import NoData, UnusableDataset, make_dataset, model_features, open_records
from trainers.runtime.module import load_module
from trainers.runtime.run import train

MODULE = """
import keras
import tensorflow as tf

def build_model(hparams):
    x = keras.Input((2,), name="x")
    return keras.Model(x, keras.layers.Dense(1)(x))

def loss(hparams):
    return keras.losses.MeanSquaredError()

def make_dataset(records, ctx):
    x, y = tf.ones([40, 2]), tf.ones([40, 1])
    return {expression}
"""


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("[x, y]", r"make_dataset of odd must return a tf\.data\.Dataset, got list"),
        ("None", "must return a tf.data.Dataset, got NoneType"),
        (
            "tf.data.Dataset.from_tensor_slices(x).batch(4)",
            r"must give batches of \(features, label\) or .*, got TensorSpec",
        ),
        ("tf.data.Dataset.from_tensor_slices({'x': x}).batch(4)", "got dict"),
        ("tf.data.Dataset.from_tensor_slices((x, y, y, y)).batch(4)", "got a tuple of 4"),
        (
            "tf.data.Dataset.from_tensor_slices((x, y[:, 0]))",
            "must give batches, got single examples .float32 without a dimension",
        ),
    ],
)
def test_what_is_no_training_data_is_refused(
    jobs: Any, write_module: Callable[[str, str], str], expression: str, message: str
) -> None:
    plan = jobs.plan(trainer=write_module("odd", MODULE.replace("{expression}", expression)))
    with pytest.raises(UnusableDataset, match=message) as refused:
        train(JobRecord.open(plan.job.output), plan, plan.replica(RoleKind.CHIEF, 0))
    assert isinstance(refused.value, ConfigError)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(100, drop_remainder=True)",
            "gave a dataset without a batch",
        ),
        (
            "tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: y[0] > 2.0).batch(4)",
            r"ended before step 30 of the job \(after step 0\)",
        ),
        ("tf.data.Dataset.from_tensor_slices((x, y)).batch(4)", "ended before step 30 of the job"),
    ],
)
def test_data_that_ends_before_the_job_says_what_to_do(
    jobs: Any, write_module: Callable[[str, str], str], expression: str, message: str
) -> None:
    plan = jobs.plan(steps=30, trainer=write_module("short", MODULE.replace("{expression}", expression)))
    with pytest.raises(NoData, match=message) as ended:
        train(JobRecord.open(plan.job.output), plan, plan.replica(RoleKind.CHIEF, 0))
    assert isinstance(ended.value, DataError)
    assert ".repeat()" in ended.value.hint
    assert blame(ended.value).failure_class.value == "DATA"


def test_a_restart_reads_on_where_it_was(digits_jobs: Any) -> None:
    import dataclasses

    import numpy as np

    job = digits_jobs.plan(steps=100, batch_size=100).job
    records = open_records(job)
    module = load_module("trainers.models.digits")
    ctx = context_of(job, RoleKind.CHIEF, 0)
    model = module.build_model({})
    assert model_features(model, records) == ["image"]
    begun = list(make_dataset(module, model, records, ctx).take(40))
    later = dataclasses.replace(ctx, start_step=33)
    again = list(make_dataset(module, model, records, later).take(7))
    for (_, ours), (_, theirs) in zip(again, begun[33:], strict=True):
        assert np.array_equal(ours, theirs)
