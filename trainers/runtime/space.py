"""A disk that is full: training goes on without new checkpoints, and the last one waits for room."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

from trainers.job.checks import check
from trainers.job.errors import InfraError, InvalidSpec

__all__ = ["ENV_PATIENCE", "DiskFull", "is_full", "no_room", "room_patience"]

ENV_PATIENCE = "TRAINYARD_ROOM_PATIENCE"  # seconds that the last checkpoint waits for room

_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# TensorFlow hands on the words of strerror(3) alone.
_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


class DiskFull(InfraError):
    """A checkpoint could not be written for want of space."""

    code = "runtime.disk_full"


def is_full(error: BaseException) -> bool:
    """Whether an error of Python or TensorFlow means that there is no room for a file."""
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    return type(error).__module__.partition(".")[0] == "tensorflow" and any(w in str(error) for w in _WORDS)


def room_patience() -> float:
    """Seconds that the last checkpoint of a job waits for room on a full disk: 60 unless the environment says."""
    text = os.environ.get(ENV_PATIENCE, "60")
    try:
        seconds = float(text)
    except ValueError as e:
        raise InvalidSpec(ENV_PATIENCE, "be a number of seconds", text) from e
    check(math.isfinite(seconds) and seconds >= 0, ENV_PATIENCE, "be seconds of 0 or more", text)
    return seconds


def no_room(folder: Path | str, step: int, last: int | None) -> DiskFull:
    """The error for a checkpoint of `step` that found no room; the one of `last` is kept."""
    kept = f"the checkpoint of step {last} is kept" if last is not None else "there is no checkpoint yet"
    return DiskFull(
        f"no room for the checkpoint of step {step} in {folder}; {kept}",
        hint="free space there, then start the job again: it goes on from its last checkpoint",
    )
