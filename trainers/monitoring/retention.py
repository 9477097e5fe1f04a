"""Removing what is old: log files that were counted, and after them parts and reports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.monitoring.parts import Parts, hour_time, log_files

if TYPE_CHECKING:
    from trainers.monitor import Options

__all__ = ["remove_old"]


def remove_old(options: Options) -> dict[str, Any]:
    """Remove what is older than `keep_days`; {"files", "bytes", "parts", "reports", "dry_run"}.

    Log files that were never counted stay, whatever their age. A part goes after all of its files, since it is
    what says that they were counted.
    """
    before = options.time - options.keep_days * 86_400
    removed = {"files": 0, "bytes": 0, "parts": 0, "reports": 0}
    place = Path(options.output) / options.name
    for folder in sorted(place.iterdir()):
        if not folder.name.isdigit():
            continue
        logs = Path(options.logs) / options.name / folder.name
        parts = Parts(folder / "parts")
        counted = parts.counted()
        for file in log_files(logs):
            if file.time < before and file.path.name in counted:
                removed["files"] += 1
                removed["bytes"] += file.path.stat().st_size
                if not options.dry_run:
                    file.path.unlink()
        for key, part in parts.all.items():
            left = [name for name in part["files"] if (logs / name).exists()]
            if hour_time(part["hour"]) < before and (options.dry_run or not left):
                removed["parts"] += 1
                if not options.dry_run:
                    (folder / "parts" / f"{key}.json").unlink()
        for report in sorted((folder / "reports").glob("*")):
            if report.stat().st_mtime < before:
                removed["reports"] += 1
                if not options.dry_run:
                    shutil.rmtree(report)
    return {**removed, "dry_run": options.dry_run}
