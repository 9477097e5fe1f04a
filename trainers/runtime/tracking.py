"""The spools: what MLflow shall know of a job, as lines in its folder; writing one never waits for a network.

    tracking/spool.jsonl             the chief's: params, tags, figures of training
    tracking/system-REPLICA.jsonl    each replica's use of processor, memory and disk
    tracking/gate.jsonl              the gate's verdict

    {"param": "learning_rate", "value": "0.001"}
    {"tag": "trainyard.strategy", "value": "local"}
    {"metric": "loss", "value": 0.25, "step": 400, "at": 1700000000000}

Each file has one writer at a time, so that no two wait for each other. `trainers.runtime.deliver` sends them on.
Spools live as long as their job, over all restarts. Standard library only: Airflow's tasks write some.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.job.files import create_json, read_json

__all__ = ["REFUSED", "RUN", "Spool", "run_key", "spool_path", "spools"]

RUN = "tracking/run.json"
"""Where a job's folder holds its run: {"run_id", "experiment_id", "tracking_uri", "url"}."""

REFUSED = "refused.jsonl"
"""Beside the spools: lines that MLflow has refused for good, with its words."""

_LONGEST = 5000  # characters of a value; MLflow takes 6,000 of a param and 8,000 of a tag


def spool_path(folder: Path | str, name: str = "spool") -> Path:
    """A spool of the job in `folder`."""
    return Path(folder) / "tracking" / f"{name}.jsonl"


def spools(folder: Path | str) -> list[Path]:
    """All spools of a job, the chief's first."""
    first = spool_path(folder)
    found = [path for path in first.parent.glob("*.jsonl") if path.name != REFUSED]
    return sorted(found, key=lambda path: (path != first, path.name))


def run_key(folder: Path | str) -> tuple[str, bool]:
    """What a job's run is found by where its id was lost, and whether this call has made it.

    Written before MLflow is asked for a run: a run whose maker died before it could note the id is found again by
    its tag `trainyard.key`, and not made twice.
    """
    path = Path(folder) / "tracking" / "key.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = not path.exists() and create_json(path, {"key": secrets.token_hex(16)})
    return str((read_json(path) or {})["key"]), made


class Spool:
    """Appends to one of a job's spools; one writer at a time."""

    def __init__(
        self, folder: Path | str, name: str = "spool", *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = spool_path(folder, name)
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
