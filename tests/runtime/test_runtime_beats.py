"""Every field of a heartbeat is there and right; what passive workers have done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.clock import Clock
from trainers.job.record import Heartbeat, JobRecord
from trainers.runtime.heartbeat import Progress, Pulse
from trainers.runtime.worker_steps import WorkerSteps


def test_every_field(jobs: Any) -> None:
    record = JobRecord.open(jobs.plan().job.output)
    clock = Clock()
    progress = Progress(500, 64, clock=clock)
    progress.begin_at(100)
    progress.enter("training")
    for _ in range(40):  # 40 steps of a second, a quarter of it waiting
        clock.now += 1.0
        progress.advance(1, 0.5, waited=0.25, busy=1.0)
    base = Heartbeat("chief", 0, generation=2, attempt=3, pid=4711)
    Pulse(record, progress, base).beat()
    beat = record.heartbeat("chief", 0)
    assert beat is not None
    assert (beat.phase, beat.generation, beat.attempt, beat.pid) == ("training", 2, 3, 4711)
    assert (beat.step, beat.target, beat.loss) == (140, 500, 0.5)
    assert beat.examples_per_s == pytest.approx(64.0)
    assert beat.input_wait == pytest.approx(0.25)
    assert beat.eta_s == pytest.approx(360.0)
    assert beat.at > 1e9
    assert not (record.folder / "workers.json").exists()


def test_a_saving_chief_is_not_taken_for_a_slow_one() -> None:
    clock = Clock()
    progress = Progress(100, 10, clock=clock)
    progress.enter("training")
    clock.now += 1.0
    progress.advance(10, 0.5)
    progress.enter("saving")
    clock.now += 60.0
    progress.enter("training")
    clock.now += 1.0
    progress.advance(10, 0.5)
    assert progress.values()["examples_per_s"] == pytest.approx(100.0)


def test_what_workers_have_done(jobs: Any) -> None:
    record = JobRecord.open(jobs.plan().job.output)
    clock = Clock()
    progress = Progress(500, 32, clock=clock)
    progress.workers.batch_size = 32
    pulse = Pulse(record, progress, Heartbeat("chief", 0))
    progress.workers.gave("worker-0", 1)
    progress.workers.gave("worker-1", 1)
    pulse.beat()
    for _ in range(30):
        clock.now += 1.0
        progress.workers.gave("worker-0", 2)
        progress.workers.gave("worker-1", 1)
        pulse.beat()
    found = json.loads((record.folder / "workers.json").read_text())
    assert found["worker-0"] == {"steps": 61, "examples_per_s": pytest.approx(64.0)}
    assert found["worker-1"] == {"steps": 31, "examples_per_s": pytest.approx(32.0)}
    for _ in range(30):  # worker-1 is gone
        clock.now += 1.0
        progress.workers.gave("worker-0", 2)
        pulse.beat()
    found = json.loads((record.folder / "workers.json").read_text())
    assert found["worker-1"]["steps"] == 31
    assert found["worker-1"]["examples_per_s"] < 0.5


def test_counts_that_are_told_as_a_whole() -> None:
    clock = Clock()
    workers = WorkerSteps(clock=clock)
    workers.batch_size = 10
    workers.has_given("worker-0", 5)
    assert workers.values() == {"worker-0": {"steps": 5, "examples_per_s": None}}
    clock.now += 2.0
    workers.has_given("worker-0", 9)
    assert workers.values() == {"worker-0": {"steps": 9, "examples_per_s": 20.0}}
