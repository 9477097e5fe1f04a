"""Workers that are stopped, and parameter servers that step together: who holds up whom, and who is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.test_faults_gang import LIMIT, accuracy, assert_arrived
from trainers.runtime.stragglers import read_stragglers

pytestmark = pytest.mark.slow

SYNC = {"kind": "parameter_server", "sync": True}


def test_a_stopped_worker_is_named_and_its_steps_are_made_by_others(gang: Callable) -> None:
    run = gang(workers=2, ps=1, steps=1500)
    run.start()
    run.until_step(100)
    pid = run.trainer_pid("worker", 1)
    os.kill(pid, signal.SIGSTOP)
    named = run.until(lambda: read_stragglers(run.record.folder))
    assert list(named) == ["worker-1"]
    assert named["worker-1"].reason == "silent"
    assert_arrived(run, run.wait(LIMIT), 1500)
    assert "straggler worker-1" in run.log("chief-0")
    assert "handed out again" in run.log("chief-0")
    assert len(run.record.attempts("chief", 0)) == 1


def test_backup_workers_hide_a_stopped_worker(gang: Callable, digits_manifest: Path) -> None:
    run = gang({**SYNC, "backup_workers": 1}, workers=3, ps=2, steps=1200)
    run.start()
    run.until_step(100)
    pid = run.trainer_pid("worker", 1)
    os.kill(pid, signal.SIGSTOP)
    named = run.until(lambda: read_stragglers(run.record.folder))
    assert list(named) == ["worker-1"]
    at = run.record.heartbeat("chief", 0).step
    run.until_step(at + 100)  # it goes on while the worker is stopped
    assert len(run.record.attempts("worker", 1)) == 1
    os.kill(pid, signal.SIGCONT)
    run.until(lambda: not read_stragglers(run.record.folder))
    assert_arrived(run, run.wait(LIMIT), 1200)
    outcome = run.record.outcome()
    assert len(run.record.attempts("chief", 0)) == 1
    assert outcome.metrics["gradients_used"] >= 2 * 1200
    assert outcome.metrics["gradients_dropped"] > 0
    assert accuracy(run.record.folder, digits_manifest) > 0.95


def test_a_killed_worker_is_missed_by_nobody_while_there_is_a_spare_one(gang: Callable) -> None:
    run = gang({**SYNC, "backup_workers": 1}, workers=3, ps=1, steps=1000)
    run.start()
    run.until_step(60)
    run.kill_trainer("worker", 0)
    run.until(lambda: len(run.record.attempts("worker", 0)) == 2)
    assert_arrived(run, run.wait(LIMIT), 1000)
    assert len(run.record.attempts("chief", 0)) == run.record.generation().number == 1


def test_without_a_spare_worker_all_begin_again_with_a_killed_one(gang: Callable) -> None:
    run = gang(SYNC, workers=2, ps=1, steps=600, checkpoint_every=50)
    run.start()
    run.until_step(60)
    run.kill_trainer("worker", 0)
    assert_arrived(run, run.wait(LIMIT), 600)
    assert run.record.generation().by == "worker-0"
    assert run.record.generation().number == 2
    start = [line for line in run.log("chief-0").splitlines() if "from step" in line][-1]
    assert int(start.split("from step ")[1].split()[0]) >= 50


def test_a_killed_chief_and_a_killed_server_of_a_synchronous_job(gang: Callable) -> None:
    run = gang(SYNC, workers=2, ps=1, steps=500, checkpoint_every=50)
    run.start()
    for generation, role in ((2, "chief"), (3, "ps")):
        run.until_step(60 * (generation - 1))
        run.kill_trainer(role)
        run.until(lambda generation=generation: run.record.generation().number == generation)
    assert_arrived(run, run.wait(LIMIT), 500)
    starts = [line for line in run.log("chief-0").splitlines() if "from step" in line]
    resumed = [int(line.split("from step ")[1].split()[0]) for line in starts]
    assert resumed == sorted(resumed)
    assert resumed[-1] >= 100
