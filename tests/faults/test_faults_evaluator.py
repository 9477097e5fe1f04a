"""A real gang with an evaluator that is killed: training does not notice, and the last checkpoint is evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainers.job.observations import evaluations, warnings
from trainers.job.record import JobState
from trainers.runtime.summaries import summary_folder

pytestmark = pytest.mark.slow

LIMIT = 240.0  # seconds; a guard against hanging, not a time that is asked for


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def test_a_killed_evaluator_beside_parameter_servers(gang: Callable) -> None:
    run = gang(
        workers=1,
        ps=1,
        steps=4000,
        checkpoint_every=200,
        summary_every=500,
        histogram_every=2000,
        evaluator=True,
    )
    run.start()
    run.until(lambda: evaluations(run.record.folder))
    first = run.trainer_pid("evaluator")
    killed_at = run.until_step(1)
    run.kill_trainer("evaluator")
    run.until(lambda: run.trainer_pid("evaluator") != first)
    result = run.wait(LIMIT)
    assert result.outcome is not None, run.log("chief-0")
    assert (result.outcome.state, result.outcome.step) == (JobState.SUCCEEDED, 4000)
    assert set(result.exit_codes.values()) == {0}, result.exit_codes
    assert killed_at < 4000
    # Training went on in its first life.
    for role in ("chief", "worker", "ps"):
        assert len(run.record.attempts(role, 0)) == 1
    assert run.record.generation().number == 1
    assert [a.failure_class for a in run.record.attempts("evaluator", 0)] == ["INFRA", None]
    found = evaluations(run.record.folder)
    assert [e.step for e in found] == sorted({e.step for e in found})
    assert found[-1].step == 4000
    assert found[-1].metrics["accuracy"] > 0.95
    assert all(e.step % 200 < 200 and e.examples == 364 for e in found)
    # The chief's event files, with the weights as they are on the servers, and the evaluator's own of both lives.
    train = read(summary_folder(run.record.folder, "train"))
    assert set(train.Tags()["scalars"]) == {"loss", "examples_per_s", "input_wait_share", "learning_rate"}
    assert {event.step // 500 for event in train.Scalars("loss")} == set(range(1, 9))
    assert [event.step // 2000 for event in train.Histograms(train.Tags()["histograms"][0])] == [1, 2]
    assert len(train.Tags()["histograms"]) == 8
    assert train.Tags()["graph"]
    written = {
        event.step: event.value for event in read(summary_folder(run.record.folder, "eval")).Scalars("loss")
    }
    assert written == pytest.approx({e.step: e.metrics["loss"] for e in found})
    # What the chief knows of its worker, who is passive; in one life of the chief it has done all.
    share = json.loads((run.record.folder / "workers.json").read_text())
    assert list(share) == ["worker-0"]
    assert share["worker-0"]["steps"] == 4000
    assert share["worker-0"]["examples_per_s"] > 0
    assert warnings(run.record.folder) == []
    assert run.leftovers() == []
