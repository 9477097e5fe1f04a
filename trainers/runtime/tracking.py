"""The spool: what MLflow shall know of a job, as lines in its folder; writing one never waits for a network.

    {"param": "learning_rate", "value": "0.001"}
    {"tag": "trainyard.strategy", "value": "local"}
    {"metric": "loss", "value": 0.25, "step": 400, "at": 1700000000000}

`trainers.runtime.deliver` sends it on. A spool lives as long as its job, over all restarts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Spool", "spool_path"]

_LONGEST = 5000  # characters of a value; MLflow takes 6,000 of a param and 8,000 of a tag


def spool_path(folder: Path | str) -> Path:
    """The spool of the job in `folder`."""
    return Path(folder) / "tracking" / "spool.jsonl"


class Spool:
    """Appends to a job's spool; one writer at a time, the chief."""

    def __init__(self, folder: Path | str, *, clock: Callable[[], float] = time.time) -> None:
        self.path = spool_path(folder)
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._mend()

    def _mend(self) -> None:
        """End a line that a killed writer left half written, so that the next one is whole."""
        with self.path.open("ab+") as f:
            if f.tell() > 0:
                f.seek(-1, 2)
                if f.read(1) != b"\n":
                    f.write(b"\n")

    def params(self, values: Mapping[str, Any]) -> None:
        """Hyperparameters, as text."""
        self._append([{"param": key, "value": str(value)[:_LONGEST]} for key, value in values.items()])

    def tags(self, values: Mapping[str, Any]) -> None:
        """Facts about the run, as text."""
        self._append([{"tag": key, "value": str(value)[:_LONGEST]} for key, value in values.items()])

    def metrics(self, values: Mapping[str, float | int | str | None], *, step: int) -> None:
        """Figures at a step; those that are missing or no number are left out."""
        at = int(self._clock() * 1000)
        self._append(
            [
                {"metric": key, "value": float(value), "step": step, "at": at}
                for key, value in values.items()
                if isinstance(value, (int, float)) and math.isfinite(value)
            ]
        )

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if lines:
            with self.path.open("a") as f:
                f.write("".join(json.dumps(line) + "\n" for line in lines))
