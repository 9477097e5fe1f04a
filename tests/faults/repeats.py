"""How many steps a job made twice, from the chief's log and the record's attempts."""

from __future__ import annotations

import re

from trainers.job.record import JobRecord

__all__ = ["begins", "repeated_steps"]

_BEGIN = re.compile(r"^chief-0 trains \S+ from step (\d+) to .*, process (\d+)$", re.MULTILINE)


def begins(log: str) -> dict[int, int]:
    """The step that each of the chief's processes began at, by the number of its attempt."""
    return {int(attempt): int(step) for step, attempt in _BEGIN.findall(log)}


def repeated_steps(record: JobRecord, log: str) -> list[int]:
    """The steps made again after each restart of the chief, as far as heartbeats had told of them.

    A process that died before it began has made none: the next one makes up for those before.
    """
    begun = begins(log)
    repeated, reached = [], 0
    for attempt in record.attempts("chief", 0):
        if attempt.number in begun:
            repeated.append(max(0, reached - begun[attempt.number]))
            reached = 0
        reached = max(reached, attempt.last_step or 0)
    return repeated[1:]
