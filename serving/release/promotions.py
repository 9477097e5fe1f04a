"""The promotion log: one JSON object a line, appended and synced, never rewritten."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid

__all__ = ["PROMOTE", "ROLLBACK", "Promotion", "PromotionLog"]

log = logging.getLogger(__name__)

PROMOTE, ROLLBACK = "promote", "rollback"


@dataclass(frozen=True)
class Promotion:
    """One change of champion: which version, when (UTC, ISO 8601), by whom, what, and why.

    `gate` holds the gate's verdict with its numbers, `previous` the champion before.
    """

    version: int
    when: str
    by: str
    what: str
    why: str
    gate: Mapping[str, Any] | None = None
    mlflow_version: str | None = None
    previous: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise ConfigInvalid(f"version must be a whole number over 0, got {self.version!r}")
        if self.what not in (PROMOTE, ROLLBACK):
            raise ConfigInvalid(f"what must be {PROMOTE} or {ROLLBACK}, got {self.what!r}")
        if not self.by.strip():
            raise ConfigInvalid("by must name who changes the champion, got nothing")


class PromotionLog:
    """The log of one model, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Promotion]:
        """All entries, the oldest first; a line cut short by a crash is left out with a warning."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        found = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(Promotion(**json.loads(line)))
            except (ValueError, TypeError):
                log.warning("line %d of %s is not a promotion, left out", number, self.path)
        return found

    def append(self, entry: Promotion) -> None:
        """Add an entry durably."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(entry), sort_keys=True).encode() + b"\n"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # the line before was cut short: keep it apart
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)

    def champions(self) -> list[int]:
        """Versions that were champion and would be again by rollbacks; the champion is the last.

        A rollback takes the versions it leaves behind off, so that two rollbacks go back two releases.
        """
        stack: list[int] = []
        for entry in self.entries():
            if entry.what == ROLLBACK and entry.version in stack:
                while stack[-1] != entry.version:
                    stack.pop()
            else:
                if entry.version in stack:
                    stack.remove(entry.version)
                stack.append(entry.version)
        return stack
