"""The loss curve of a job: loss.jsonl in its folder, a line each `loss_every` steps.

    {"step": 40, "loss": 0.6931471824645996}

The loss is the mean over the steps since the line before, to the last bit as it was computed. Steps that are
repeated after a restart replace those that were there.
"""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

from trainers.job.files import read_json_lines, write_bytes

__all__ = ["LossCurve", "curve_path", "read_curve"]


def curve_path(job_folder: Path | str) -> Path:
    """Where the loss curve of a job is."""
    return Path(job_folder) / "loss.jsonl"


def read_curve(job_folder: Path | str) -> list[tuple[int, float]]:
    """The loss curve as (step, loss); [] when none was asked for."""
    lines = read_json_lines(curve_path(job_folder))
    return [(int(line["step"]), float(line["loss"])) for line in lines]


class LossCurve:
    """Writes a job's loss curve; for many threads at once."""

    def __init__(self, job_folder: Path | str) -> None:
        self._folder = Path(job_folder)
        self._lock = threading.Lock()

    def begin_at(self, step: int) -> None:
        """Keep what is known up to `step`, since training goes on from there."""
        with self._lock:
            kept = [_line(at, loss) for at, loss in read_curve(self._folder) if at <= step]
            write_bytes(curve_path(self._folder), "".join(kept).encode())

    def note(self, step: int, loss: float) -> None:
        """Add the mean loss of the steps up to `step`."""
        if not math.isfinite(loss):
            return
        with self._lock, curve_path(self._folder).open("a") as file:
            file.write(_line(step, loss))


def _line(step: int, loss: float) -> str:
    return json.dumps({"step": step, "loss": loss}) + "\n"
