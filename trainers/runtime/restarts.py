"""How often a replica may be started again: failures count until the job has made progress beyond them.

A failure is forgiven once the job has saved a checkpoint of a later step than the one it happened at: a job of a
week is not ended by its sixth killed trainer, while one that fails at the same step again and again is, after as
many restarts as its class is allowed. Running out of memory is never forgiven: its one retry has more memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainers.job.failures import FailureClass
from trainers.job.files import read_json
from trainers.job.record import Attempt, JobRecord

__all__ = ["SAVED_STEP", "back_off_of", "counted", "saved_step"]

SAVED_STEP = "saved_step.json"
"""In the job's folder: {"step": N} of the newest checkpoint, as a command has said it."""

_RAPID = 10.0  # seconds: a trainer that lives shorter has not got anywhere
_NEWEST = re.compile(r'^model_checkpoint_path: ".*?-(\d+)"$', re.MULTILINE)


def saved_step(record: JobRecord) -> int:
    """The step of the newest checkpoint, 0 when there is none; from the file by which TensorFlow finds it.

    Of a command of the user's own what it last said of itself.
    """
    said = read_json(Path(record.folder) / SAVED_STEP)
    if said is not None:
        return int(said["step"])
    path = Path(record.folder) / "checkpoints" / "checkpoint"
    try:
        found = _NEWEST.search(path.read_text(errors="replace"))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def counted(attempts: Sequence[Attempt], saved: int, failure_class: FailureClass | None = None) -> int:
    """How many of a replica's failures, of one class or of all, count against their cap."""
    return sum(
        a.failure_class is not None
        and failure_class in (None, a.failure_class)
        and (a.failure_class == FailureClass.OOM.value or (a.last_step or 0) >= saved)
        for a in attempts
    )


def back_off_of(attempts: Sequence[Attempt], saved: int, *, first: float, most: float) -> float:
    """Seconds before the next start: doubled with each failure that counts, and each that came at once."""
    rapid = 0
    for attempt in reversed(attempts):
        if attempt.failure_class is None or (attempt.ended or attempt.started) - attempt.started > _RAPID:
            break
        rapid += 1
    times = max(rapid, counted(attempts, saved)) - 1
    return min(first * 2.0 ** max(times, 0), most)
