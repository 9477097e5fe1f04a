"""tracking status, deliver: what MLflow has not been told of jobs yet, and telling it now."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console

from trainers.job.errors import ConfigError
from trainers.job.files import read_json
from trainers.runtime.deliver import ENV_URI, Undelivered, deliver, undelivered
from trainers.runtime.spooled import Position, batches
from trainers.runtime.tracking import REFUSED, RUN
from trainyard.commands.platform import open_platform

__all__ = ["NoTracking", "deliver_now", "show_status"]


class NoTracking(ConfigError):
    """There is no MLflow to tell."""

    code = "tracking.none"


def show_status(arguments: argparse.Namespace, console: Console) -> int:
    """Every job whose spool MLflow has not got whole, and lines that it has refused."""
    storage = open_platform().storage
    rows = [row for row in map(_status, _jobs(storage)) if row["lines"] or row["end"] or row["refused"]]
    if arguments.json:
        console.print_json(json.dumps(rows))
        return 0
    if not rows:
        console.print("MLflow has been told everything")
    for row in rows:
        told = [f"{row['lines']:,} lines wait"] if row["lines"] else []
        told += ["how it ended waits"] if row["end"] else []
        told += (
            [f"{row['refused']} lines were refused, see {row['folder']}/tracking/{REFUSED}"]
            if row["refused"]
            else []
        )
        console.print(f"{row['job']}: {', '.join(told)}", markup=False, soft_wrap=True)
    return 0


def deliver_now(arguments: argparse.Namespace, console: Console) -> int:
    """Send what waits, of all jobs or of one; 1 when something still waits."""
    platform = open_platform()
    uri = os.environ.get(ENV_URI) or platform.urls.get("mlflow", "")
    if not uri:
        raise NoTracking(
            f"{ENV_URI} is not set, and no platform is up here",
            hint="make up starts one; or set the variable",
        )
    failed = 0
    jobs = [folder for folder in _jobs(platform.storage) if undelivered(folder)]
    if arguments.job:
        jobs = [folder for folder in jobs if arguments.job in _name(folder)]
    for folder in jobs:
        try:
            sent = deliver(folder, environ={**os.environ, ENV_URI: uri})
        except Undelivered as e:
            failed += 1
            console.print(f"{_name(folder)}: {e.message}", style="yellow", markup=False, soft_wrap=True)
        else:
            url = (read_json(folder / RUN) or {}).get("url", "")
            console.print(
                f"{_name(folder)}: {sent:,} lines sent {url}".rstrip(), markup=False, soft_wrap=True
            )
    if not jobs:
        console.print("nothing waits")
    return 1 if failed else 0


def _jobs(storage: Path) -> list[Path]:
    """Jobs that track something, the oldest first."""
    found = [path.parent for path in (storage / "jobs").glob("*/*/tracking")]
    return sorted(found, key=lambda folder: (folder / "tracking").stat().st_mtime)


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _status(folder: Path) -> dict[str, object]:
    position = Position.load(folder)
    lines = sum(batch.spooled for batch in batches(folder, position))
    refused = folder / "tracking" / REFUSED
    return {
        "job": _name(folder),
        "folder": str(folder),
        "lines": lines,
        "end": not lines and undelivered(folder),
        "refused": len(refused.read_bytes().splitlines()) if refused.exists() else 0,
        "run_id": (read_json(folder / RUN) or {}).get("run_id", ""),
    }
