"""What was counted of which log files: one JSON file a part, which is both the statistics and the proof.

    parts/<hour of the files, YYYYmmddTHH>-<16 hex digits of their names>.json      {"files", "hour", "counts", ...}

A part appears by one rename. A file that any part names was counted, and no other was: a run that is killed has
counted the parts that are there, and the next counts the rest, late files too.
"""

from __future__ import annotations

import calendar
import dataclasses
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, write_json

__all__ = ["LogFile", "Parts", "hour_of", "log_files"]

_NAME = re.compile(r"(\d{8}T\d{2})\d{4}-[^/]*\.tfrecord")
MOST_FILES = 200  # of a part: what a run that is killed has to count again


@dataclasses.dataclass(frozen=True)
class LogFile:
    """One closed file of a request log, and the hour (UTC) in which it was begun."""

    path: Path
    hour: str

    @property
    def time(self) -> float:
        """The beginning of its hour, seconds since 1970."""
        return hour_time(self.hour)


def hour_time(hour: str) -> float:
    """Seconds since 1970 of "20260101T07"."""
    return float(calendar.timegm(time.strptime(hour, "%Y%m%dT%H")))


def hour_of(seconds: float) -> str:
    """The hour of a moment, UTC."""
    return time.strftime("%Y%m%dT%H", time.gmtime(seconds))


def log_files(folder: Path) -> list[LogFile]:
    """The closed files of a version, by name; open ones are dot files, others are none of a request log's."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            found.append(LogFile(path, match[1]))
    return found


class Parts:
    """The parts of one version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.json")):
            found = read_json(path)
            if found:
                self.all[path.stem] = found

    def counted(self) -> set[str]:
        """Names of all files that were counted."""
        return {name for part in self.all.values() for name in part["files"]}

    def todo(self, files: Sequence[LogFile]) -> list[list[LogFile]]:
        """The files that were not, by hours, at most MOST_FILES at once."""
        counted = self.counted()
        by_hour: dict[str, list[LogFile]] = {}
        for file in files:
            if file.path.name not in counted:
                by_hour.setdefault(file.hour, []).append(file)
        return [
            listed[at : at + MOST_FILES]
            for _, listed in sorted(by_hour.items())
            for at in range(0, len(listed), MOST_FILES)
        ]

    def add(self, files: Sequence[LogFile], facts: Mapping[str, Any]) -> None:
        """Say that some files of one hour were counted, with what was found."""
        names = [file.path.name for file in files]
        key = f"{files[0].hour}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:16]}"
        part = {"files": names, "hour": files[0].hour, **facts}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{key}.json", part)
        self.all[key] = part

    def window(self, begin: float) -> dict[str, dict[str, Any]]:
        """The parts of the hours from a moment on."""
        return {key: part for key, part in self.all.items() if hour_time(part["hour"]) >= begin}
