"""The lines of a role group's replicas into its task's log while the task is deferred: `[worker-7] ...`, each once.

They come from the replicas' logs in the job's folder (`trainers.job.replica_log`), where the triggerer sees that:
without a request, however many replicas there are. A triggerer that comes after one that was killed goes on from what
that one has written into the task's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainers.job.replica_log import LogTail
from trainyard.triggers.follow import Row, Tell, follow_files
from trainyard.triggers.pod_log import Fresh, Place, lines_out

__all__ = ["GroupLog"]


class GroupLog:
    """Tells what `replicas` print into `folder` from `since` on (ISO 8601, UTC); `places` is how far each was told."""

    def __init__(
        self,
        folder: Path,
        replicas: Iterable[str],
        *,
        since: str = "",
        places: Mapping[str, Place] | None = None,
        tell: Tell | None = None,
    ) -> None:
        known = places or {}
        self._tails = {name: LogTail(folder, name) for name in replicas}
        self._fresh = {name: Fresh(known.get(name, Place()), not_before=since) for name in self._tails}
        self._tell = tell or _to_task

    async def follow(self, ended: asyncio.Event) -> None:
        """Tell lines as they come, until the group has `ended` and all that was written is told."""
        await follow_files(self._read, self._tell, ended)

    def _read(self, first: bool) -> list[Row]:
        """What is new of all, in order of time; one replica's files after the other, which may be large at first."""
        rows: list[Row] = []
        for name, tail in self._tails.items():
            lines = ((stamp, text) for stamp, _, text in (tail.old() if first else tail.new()))
            rows += [(stamp, f"[{name}] {text}") for stamp, text in self._fresh[name].of(lines)]
        return sorted(rows, key=lambda row: row[0])


def _to_task(stamp: str, text: str) -> None:
    lines_out.info(text, timestamp=stamp)
