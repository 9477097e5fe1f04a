"""What a command of strategy `custom` may say while it runs, and when it is done: two small files.

    from trainers.job import reporting

    reporting.progress(step, target=1000, loss=0.3)                # as often as you like
    reporting.result({"accuracy": 0.93}, step=1000)                # before it exits with 0

A command in another language writes the files itself, JSON with the same fields:

    $TRAINYARD_PROGRESS   {"step": 7, "target": 1000, "loss": 0.3, "examples_per_s": 810.0, "saved_step": 5}
    $TRAINYARD_RESULT     {"step": 1000, "metrics": {"accuracy": 0.93}}

All fields may be left out, and to touch the first file is a sign of life, too. From the first one on its launcher wants
to see another within `budgets.stall`, else it ends the command (class STALLED); without any it never does.
`saved_step` is that of the newest checkpoint: failures before it don't count against the restarts any more. Without
these variables, as when run by hand, nothing is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job import labels
from trainers.job.checks import is_number, is_whole

__all__ = ["FIGURES", "progress", "read_progress", "read_result", "result"]

FIGURES = ("step", "target", "loss", "examples_per_s", "saved_step")
_COUNTS = ("step", "target", "saved_step")


def progress(
    step: int | None = None,
    *,
    target: int | None = None,
    loss: float | None = None,
    examples_per_s: float | None = None,
    saved_step: int | None = None,
) -> None:
    """Give a sign of life, with the figures that are known; `step` counts finished steps."""
    given = (step, target, loss, examples_per_s, saved_step)
    _write(
        labels.ENV_PROGRESS,
        {name: value for name, value in zip(FIGURES, given, strict=True) if value is not None},
    )


def result(metrics: Mapping[str, float] | None = None, *, step: int | None = None) -> None:
    """Say what came out of the job; the chief's counts, once its command exits with 0."""
    _write(labels.ENV_RESULT, {"metrics": dict(metrics or {}), "step": step})


def _write(variable: str, value: Mapping[str, Any]) -> None:
    path = os.environ.get(variable)
    if not path:
        return
    # Whole, but not synced: it is of no use to anybody after a power cut, and training may come here a hundred times a
    # second.
    temp = Path(f"{path}.{os.getpid()}.tmp")
    temp.write_text(json.dumps(value))
    temp.replace(path)


def read_progress(path: Path) -> dict[str, Any]:
    """The figures of a progress file that are numbers; {} for a file that was only touched, or is half written."""
    data = _read(path)
    return {
        name: data[name] for name in FIGURES if (is_whole if name in _COUNTS else is_number)(data.get(name))
    }


def read_result(path: Path) -> tuple[int | None, dict[str, float]]:
    """Step and metrics of a result file, those that are numbers; (None, {}) where there is none."""
    data = _read(path)
    metrics = data.get("metrics")
    found = metrics.items() if isinstance(metrics, dict) else ()
    step = data.get("step")
    return step if is_whole(step) else None, {str(k): float(v) for k, v in found if is_number(v)}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
