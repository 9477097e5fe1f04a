"""The trainer process: forked, started anew, and what it says when it fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def test_a_warm_interpreter_forks_the_trainer(jobs: Any, tmp_path: Path) -> None:
    """The fork runs no operation: it finds no such module, and says so."""
    from trainers.runtime.process import end_group, start_trainer

    plan = jobs.plan(trainer="no.such.module")
    said = tmp_path / "said.json"
    env = {**os.environ, **plan.replicas[0].env, "TRAINYARD_TERMINATION_LOG": str(said)}
    child = start_trainer({**env, "TRAINYARD_LAUNCHER_PID": str(os.getpid())})
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == 83, os.read(child.output, 10_000).decode()
    assert end_group(child) == 83
    os.close(child.output)
    assert "no.such.module" in said.read_text()


def test_a_cold_interpreter_starts_the_trainer_anew(
    jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.runtime import process

    monkeypatch.setattr(process, "MODULE", "trainers.job.no_such_module")
    monkeypatch.delitem(sys.modules, "tensorflow")
    child = process.start_trainer(dict(os.environ))
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == 1
    assert b"No module named trainers.job.no_such_module" in os.read(child.output, 4096)
    os.close(child.output)
    child.signal(15)  # it is gone: nothing happens


def test_the_trainer_says_how_it_failed(
    jobs: Any, termination_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.job import termination
    from trainers.runtime import trainer

    plan = jobs.plan(trainer="no.such.module")
    for key, value in plan.replicas[0].env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("TRAINYARD_LAUNCHER_PID", raising=False)
    root = trainer.logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        assert trainer.main() == 83
    finally:
        root.handlers[:], root.level = before, level
    said = termination.parse(termination_log.read_text())
    assert said is not None
    assert said.failure is not None
    assert said.failure.reason == "there is no trainer module 'no.such.module'"
    assert (Path(plan.job.output) / "stacks" / "chief-0-0001.txt").exists()
