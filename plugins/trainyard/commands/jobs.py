"""jobs list, show, watch: training jobs, read from their records in the storage root."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainers.job.errors import ConfigError
from trainers.job.record import JobRecord
from trainyard.commands.platform import open_platform
from trainyard.platform.progress import duration, training_line

__all__ = ["NoSuchJob", "list_jobs", "show_job", "watch_job"]


class NoSuchJob(ConfigError):
    """No job, or more than one, has this name."""

    code = "job.unknown"


def list_jobs(arguments: argparse.Namespace, console: Console) -> int:
    """All jobs, the newest first."""
    folders = _folders(open_platform().storage)
    if not folders:
        console.print("no jobs yet")
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "state", "step", "when"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for folder in folders:
        record = JobRecord(folder)
        outcome = record.outcome()
        step = outcome.step if outcome else max((b.step or 0 for b in record.heartbeats()), default=None)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / "plan.json").stat().st_mtime))
        table.add_row(_name(folder), str(record.state), "" if step is None else str(step), when)
    console.print(table)
    return 0


def show_job(arguments: argparse.Namespace, console: Console) -> int:
    """One job: its plan, what its replicas did, how it ended."""
    folder = _find(open_platform().storage, arguments.job)
    record = JobRecord.open(folder)
    console.print(f"{_name(folder)}: {record.state}", style="bold", markup=False)
    console.print(record.plan().describe(), markup=False, soft_wrap=True)
    for attempt in record.attempts():
        ended = f"after {duration(attempt.ended - attempt.started)}" if attempt.ended else "running"
        code = f", exit code {attempt.exit_code}" if attempt.exit_code else ""
        why = f", {attempt.failure_class}: {attempt.reason}" if attempt.failure_class else ""
        line = f"  {attempt.role}-{attempt.index} process {attempt.number}: {ended}{code}{why}"
        console.print(line, markup=False, soft_wrap=True)
    outcome = record.outcome()
    if outcome is None:
        for beat in record.heartbeats():
            console.print(f"  {beat.replica}: {training_line(beat)}", markup=False)
    elif outcome.failure:
        console.print(outcome.failure.card(_name(folder)), markup=False, soft_wrap=True)
    else:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items())
        console.print(f"  {outcome.step} steps; {metrics}", markup=False)
    console.print(f"  folder: {folder}", markup=False, soft_wrap=True)
    return 0


def watch_job(arguments: argparse.Namespace, console: Console) -> int:
    """One job while it trains, a line whenever there is news; 0 when it succeeded."""
    record = JobRecord.open(_find(open_platform().storage, arguments.job))
    told = ""
    while (outcome := record.outcome()) is None:
        beats = [beat for beat in record.heartbeats() if beat.step is not None]
        line = (
            training_line(max(beats, key=lambda b: (b.role == "chief", b.step or 0)))
            if beats
            else str(record.state)
        )
        if line != told:
            console.print(line, markup=False)
            told = line
        time.sleep(1.0)
    console.print(
        f"{outcome.state} after {outcome.step} steps" if outcome.step is not None else str(outcome.state)
    )
    if outcome.failure:
        console.print(outcome.failure.card(), markup=False, soft_wrap=True)
    return 0 if outcome.failure is None else 1


def _folders(storage: Path) -> list[Path]:
    plans = sorted((storage / "jobs").glob("*/*/plan.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    return [plan.parent for plan in plans]


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _find(storage: Path, text: str) -> Path:
    """The one job whose name is or holds this text; the newest for "latest"."""
    folders = _folders(storage)
    exact = [folder for folder in folders if _name(folder) == text]
    found = exact or (
        folders[:1] if text == "latest" else [folder for folder in folders if text in _name(folder)]
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise NoSuchJob(f"no job is called {text!r}", hint="`trainyard jobs list` shows all jobs")
    names = ", ".join(map(_name, found[:5]))
    raise NoSuchJob(f"{text!r} could be {len(found)} jobs: {names}", hint="give more of the name")
