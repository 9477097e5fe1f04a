"""jobs list, show, plan, logs, watch: training jobs, read from their records in the storage root."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainers.job.errors import ConfigError
from trainers.job.observations import evaluations, warnings
from trainers.job.record import JobRecord, JobState, Outcome
from trainers.job.replica_log import read_logs, replicas_with_logs
from trainers.job.times import time_split
from trainyard.commands.platform import open_platform
from trainyard.platform.job_view import (
    JobNow,
    LiveJobs,
    PlainJobs,
    evaluation_line,
    job_table,
    time_line,
    watch,
)
from trainyard.platform.progress import duration, training_line

__all__ = ["NoSuchJob", "list_jobs", "logs_job", "plan_job", "show_job", "watch_job"]


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
        figures = [f"{name} {value:.4f}" for name, value in outcome.metrics.items()]
        steps = [] if outcome.step is None else [f"{outcome.step} steps"]
        console.print(f"  {'; '.join([*steps, *filter(None, [', '.join(figures)])])}", markup=False)
    split = time_line(time_split(record))
    if split:
        console.print(f"  time: {split}", markup=False)
    for evaluation in evaluations(folder)[-1:]:
        console.print(f"  {evaluation_line(evaluation)}", markup=False)
    for warning in warnings(folder):
        console.print(f"  warning: {warning.by}: {warning.text}", markup=False, soft_wrap=True)
    console.print(f"  folder: {folder}", markup=False, soft_wrap=True)
    return 0


def plan_job(arguments: argparse.Namespace, console: Console) -> int:
    """A job's plan: a line a replica, or the whole as JSON."""
    plan = JobRecord.open(_find(open_platform().storage, arguments.job)).plan()
    if arguments.json:
        console.print(json.dumps(plan.to_dict(), indent=1), markup=False, soft_wrap=True)
    else:
        console.print(plan.describe(), markup=False, soft_wrap=True)
    return 0


def logs_job(arguments: argparse.Namespace, console: Console) -> int:
    """What a job's replicas printed, in order of time, "[worker-1] ..." a line.

    With `--follow` it goes on until the job is over.
    """
    record = JobRecord.open(_find(open_platform().storage, arguments.job))
    known = [replica.replica for replica in record.plan().replicas]
    wanted = arguments.replica or known
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise NoSuchJob(
            f"{_name(record.folder)} has no replica {', '.join(unknown)}", hint=f"it has {', '.join(known)}"
        )
    if not arguments.follow and not set(wanted) & set(replicas_with_logs(record.folder)):
        console.print("nothing was printed yet")
        return 0
    lines = read_logs(
        record.folder,
        wanted,
        tail=arguments.tail,
        is_over=(lambda: record.outcome() is not None) if arguments.follow else None,
    )
    for when, replica, text in lines:
        stamp = f"{when} " if arguments.timestamps else ""
        console.out(f"{stamp}[{replica}] {text}", highlight=False)
    return 0


def watch_job(arguments: argparse.Namespace, console: Console) -> int:
    """Jobs while they train, the newest by default: a table on a terminal, lines elsewhere; 0 when all succeeded.

    With `--once` it shows how they stand now, and says 0 unless one has failed.
    """
    storage = open_platform().storage
    folders = list(dict.fromkeys(_find(storage, text) for text in arguments.job or ["latest"]))
    records = {_name(folder): JobRecord.open(folder) for folder in folders}
    if arguments.once:
        if not console.is_terminal:
            console.width = max(console.width, 140)  # a file cuts no lines
        for name, record in records.items():
            console.print(job_table(JobNow.of(name, record), console.width))
        ends = [record.outcome() for record in records.values()]
    else:
        watcher = LiveJobs(console) if console.is_terminal else PlainJobs(console)
        ends = list(watch(records, watcher, sleep=time.sleep))
        for name, outcome in zip(records, ends, strict=True):
            _print_end(name if len(records) > 1 else "", outcome, console)
    return int(any(outcome is not None and outcome.state is not JobState.SUCCEEDED for outcome in ends))


def _print_end(name: str, outcome: Outcome, console: Console) -> None:
    after = f" after {outcome.step} steps" if outcome.step is not None else ""
    console.print(f"{name + ': ' if name else ''}{outcome.state}{after}", markup=False)
    if outcome.failure:
        console.print(outcome.failure.card(name), markup=False, soft_wrap=True)


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
    if not found and text == "latest":
        raise NoSuchJob("there are no jobs yet", hint="`trainyard run` starts a pipeline")
    if not found:
        raise NoSuchJob(f"no job is called {text!r}", hint="`trainyard jobs list` shows all jobs")
    names = ", ".join(map(_name, found[:5]))
    raise NoSuchJob(f"{text!r} could be {len(found)} jobs: {names}", hint="give more of the name")
