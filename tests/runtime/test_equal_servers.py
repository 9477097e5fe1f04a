"""Fifty steps of two workers that step together on two parameter servers are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.equal_cases import CASES, GLOBAL_BATCH, STEPS
from trainers.job.record import JobState
from trainers.runtime.curve import read_curve
from trainers.runtime.local_gang import LocalGang
from trainers.runtime.restore import load_trained

pytestmark = pytest.mark.timeout(1200)

MODULE = """
import keras
from tests.runtime.equal_cases import functional as build_model, make_dataset, optimizer as by_name

optimizer = by_name("momentum")

def loss(hparams):
    return keras.losses.MeanSquaredError()
"""


def test_synchronous_servers_do_what_one_process_does(
    jobs: Any, write_module: Callable[[str, str], str], tmp_path: Path
) -> None:
    import numpy as np

    settings = {**CASES["clip_norm_cosine_ema"][2], "steps": STEPS, "loss_every": 1}
    settings["trainer"] = write_module("equal_module", MODULE)
    sync = {"kind": "parameter_server", "sync": True}
    plans = {
        "local": jobs.plan("local", batch_size=GLOBAL_BATCH, **settings),
        "sync": jobs.plan("sync", strategy=sync, workers=2, ps=2, batch_size=GLOBAL_BATCH // 2, **settings),
    }
    repo = Path(__file__).parents[2]
    env = {"PYTHONPATH": f"{tmp_path / 'modules'}:{repo}:{os.environ.get('PYTHONPATH', '')}"}
    for plan in plans.values():
        with LocalGang(plan, env=env) as gang:
            gang.start()
            outcome = gang.wait(500).outcome
            assert outcome is not None, gang.log("chief-0")
            assert outcome.state is JobState.SUCCEEDED, gang.log("chief-0")
    local, both = (read_curve(plan.job.output) for plan in plans.values())
    assert [step for step, _ in both] == list(range(1, STEPS + 1))
    assert [loss for _, loss in both] == pytest.approx([loss for _, loss in local], rel=2e-5)
    ours, theirs = (load_trained(plan.job.output).model.trainable_variables for plan in plans.values())
    for a, b in zip(ours, theirs, strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6), a.path
