"""The promotion log: one JSON object a line, appended and synced, never rewritten."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid
from serving.files import fsync_path

__all__ = ["DELETE", "PROMOTE", "REJECT", "ROLLBACK", "Promotion", "PromotionLog"]

log = logging.getLogger(__name__)

PROMOTE, ROLLBACK, REJECT, DELETE = "promote", "rollback", "reject", "delete"


@dataclass(frozen=True)
class Promotion:
    """One decision: which version, when (UTC, ISO 8601), by whom, what, and why.

    `promote` and `rollback` change the champion; `reject` says that a canary was taken back, and changes nothing.
    `gate` and `canary` hold the verdicts with their numbers, `previous` is the champion before.
    """

    version: int
    when: str
    by: str
    what: str
    why: str
    gate: Mapping[str, Any] | None = None
    mlflow_version: str | None = None
    previous: int | None = None
    canary: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise ConfigInvalid(f"version must be a whole number over 0, got {self.version!r}")
        if self.what not in (PROMOTE, ROLLBACK, REJECT, DELETE):
            raise ConfigInvalid(
                f"what must be {PROMOTE}, {ROLLBACK}, {REJECT} or {DELETE}, got {self.what!r}"
            )
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
        """Add an entry durably; a line that a crash or a full disk cut short is taken off first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(entry), sort_keys=True).encode() + b"\n"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o664)  # less the process's mask
        try:
            start = self._whole(handle)
            written = os.pwrite(handle, line, start)
            if written != len(line):
                os.ftruncate(handle, start)
                raise OSError(errno.ENOSPC, "the promotion log could not be written whole", str(self.path))
            os.fsync(handle)
        finally:
            os.close(handle)
        fsync_path(self.path.parent)

    def _whole(self, handle: int) -> int:
        """Size of the log's whole lines, in bytes; what comes after the last of them is cut off."""
        content = os.pread(handle, os.fstat(handle).st_size, 0)
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning("the end of %s was cut short and is removed: %r", self.path, content[whole:][:200])
            os.ftruncate(handle, whole)
        return whole

    def champions(self) -> list[int]:
        """Versions that were champion and would be again by rollbacks; the champion is the last.

        A rollback takes the versions it leaves behind off, so that two rollbacks go back two releases. A model
        that was deleted has none.
        """
        stack: list[int] = []
        for entry in self.entries():
            if entry.what == REJECT:
                continue
            if entry.what == DELETE:
                stack.clear()
            elif entry.what == ROLLBACK and entry.version in stack:
                while stack[-1] != entry.version:
                    stack.pop()
            else:
                if entry.version in stack:
                    stack.remove(entry.version)
                stack.append(entry.version)
        return stack
