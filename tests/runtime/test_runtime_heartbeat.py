"""Progress, the pulse that writes it, and the spool for MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.clock import Clock
from trainers.job.record import Heartbeat, JobRecord
from trainers.runtime.heartbeat import Progress, Pulse
from trainers.runtime.tracking import Spool, spool_path


def test_progress_works_out_rate_eta_and_the_share_of_waiting() -> None:
    clock = Clock()
    progress = Progress(100, 64, clock=clock)
    progress.begin_at(20)
    assert progress.values()["eta_s"] is None
    progress.enter("training")
    for _ in range(4):
        clock.now += 1.0
        progress.advance(10, 0.5, waited=0.25, busy=1.0)
    values = progress.values()
    assert (values["step"], values["target"], values["loss"]) == (60, 100, 0.5)
    assert values["examples_per_s"] == 640.0
    assert values["eta_s"] == 4.0
    assert values["input_wait"] == 0.25
    assert progress.trained_steps == 40


def test_a_pulse_goes_on_without_its_disk(jobs: Any, caplog: pytest.LogCaptureFixture) -> None:
    record = JobRecord.open(jobs.plan().job.output)
    spool = Spool(record.folder, clock=lambda: 12.0)
    progress = Progress(10, 1)
    pulse = Pulse(record, progress, Heartbeat("chief", 0, pid=1), spool=spool, every=0.01)
    pulse.start()
    progress.advance(3, 0.25)
    pulse.stop()
    beat = record.heartbeat("chief", 0)
    assert beat is not None
    assert (beat.step, beat.loss, beat.pid) == (3, 0.25, 1)
    lines = [json.loads(line) for line in spool.path.read_text().splitlines()]
    assert {"metric": "loss", "value": 0.25, "step": 3, "at": 12000} in lines
    (record.folder / "heartbeats").rename(record.folder / "away")
    (record.folder / "heartbeats").write_text("in the way")
    pulse.beat()
    assert "could not write the heartbeat" in caplog.text


def test_the_spool_mends_a_line_that_was_cut(tmp_path: Path) -> None:
    spool_path(tmp_path).parent.mkdir()
    spool_path(tmp_path).write_text('{"metric": "lo')
    spool = Spool(tmp_path)
    spool.metrics({"loss": float("nan"), "rate": 2, "none": None}, step=4)
    spool.params({"long": "x" * 9000})
    Spool(tmp_path).tags({"a": 1})
    cut, rate, long, tag = spool.path.read_text().splitlines()
    assert cut == '{"metric": "lo'
    assert json.loads(rate)["metric"] == "rate"
    assert len(json.loads(long)["value"]) == 5000
    assert json.loads(tag) == {"tag": "a", "value": "1"}
