"""What of a job's spools MLflow has not got yet, and the note of how far it has.

The note, tracking/position.json, is written before and after each batch: `sending` names the batch whose fate is not
known while it is there. Who finds it there asks MLflow what it holds before sending that batch again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, write_json
from trainers.job.observations import evaluations_path
from trainers.runtime.tracking import spools

__all__ = ["Batch", "Line", "Position", "batches", "pending"]

# What one request of MLflow takes: of each kind, and of all together.
_MOST = {"metric": 1000, "param": 100, "tag": 100}
_MOST_OF_ALL = 1000

_EVALUATIONS = "evaluations"


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing to tell: a metric {"key", "value", "timestamp", "step"}, a param or a tag {"key", "value"}."""

    kind: str
    value: Mapping[str, Any]

    @property
    def identity(self) -> tuple[float, int, int]:
        """What tells a metric from others of its key, as Tracker.history gives it."""
        return (float(self.value["value"]), int(self.value["timestamp"]), int(self.value["step"]))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lines of one file, the bytes [begin, end) of it; `spooled` is how many lines of the file they are."""

    source: str
    begin: int
    end: int
    lines: tuple[Line, ...]
    spooled: int


@dataclasses.dataclass
class Position:
    """How far MLflow has what the spools hold: bytes a file; for run `run_id`, which was last told `status`."""

    path: Path
    run_id: str = ""
    reached: dict[str, int] = dataclasses.field(default_factory=dict)
    sending: Mapping[str, Any] | None = None
    status: str = "RUNNING"

    @classmethod
    def load(cls, folder: Path) -> Position:
        """The note of the job in `folder`; that of an earlier version is understood."""
        path = folder / "tracking" / "position.json"
        data = read_json(path) or {}
        reached = dict(data.get("reached", {}))
        if "bytes" in data:
            reached = {"spool.jsonl": int(data["bytes"]), _EVALUATIONS: int(data.get("evaluations", 0))}
        return cls(
            path, data.get("run_id", ""), reached, data.get("sending"), data.get("status") or "RUNNING"
        )

    def save(self) -> None:
        """Write it, whole and durable."""
        data = {"run_id": self.run_id, "reached": self.reached, "sending": self.sending}
        write_json(self.path, {**data, "status": self.status})

    def begin(self, batch: Batch) -> bool:
        """Note that a batch is about to be sent; whether some of it may have been sent before."""
        old = self.sending or {}
        doubtful = old.get("source") == batch.source and batch.begin < int(old.get("end", 0))
        end = max(batch.end, int(old["end"])) if doubtful else batch.end
        self.sending = {"source": batch.source, "end": end}
        self.save()
        return doubtful

    def done(self, batch: Batch) -> None:
        """Note that MLflow has a batch."""
        self.reached[batch.source] = batch.end
        if self.sending and int(self.sending["end"]) <= batch.end:
            self.sending = None
        self.save()


def pending(folder: Path, position: Position) -> bool:
    """Whether there is a whole line more than MLflow has got."""
    return any(b"\n" in _beyond(path, position.reached.get(name, 0)) for name, path in _sources(folder))


def batches(folder: Path, position: Position) -> Iterator[Batch]:
    """What is to be sent, file after file, in order; the end of a file that is half a line waits."""
    for name, path in _sources(folder):
        begin = position.reached.get(name, 0)
        data = _beyond(path, begin)
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            yield from _cut(name, begin, whole)


def _beyond(path: Path, begin: int) -> bytes:
    if path.stat().st_size <= begin:
        return b""
    with path.open("rb") as f:
        f.seek(begin)
        return f.read()


def _sources(folder: Path) -> list[tuple[str, Path]]:
    """What is to be told is in the spools, and in what an evaluator has found, which may outlive the chief."""
    found = [(path.name, path) for path in spools(folder)]
    evaluations = evaluations_path(folder)
    return [*found, (_EVALUATIONS, evaluations)] if evaluations.exists() else found


def _cut(source: str, begin: int, data: bytes) -> Iterator[Batch]:
    lines: list[Line] = []
    counts = dict.fromkeys(_MOST, 0)
    spooled, at, start = 0, begin, begin
    for raw in data.splitlines(keepends=True):
        found = _evaluation(raw) if source == _EVALUATIONS else _line(raw)
        full = len(lines) + len(found) > _MOST_OF_ALL or any(
            counts[kind] + sum(line.kind == kind for line in found) > most for kind, most in _MOST.items()
        )
        if full and lines:
            yield Batch(source, start, at, tuple(lines), spooled)
            lines, counts, spooled, start = [], dict.fromkeys(_MOST, 0), 0, at
        lines += found
        for line in found:
            counts[line.kind] += 1
        spooled += 1
        at += len(raw)
    yield Batch(source, start, at, tuple(lines), spooled)


def _line(raw: bytes) -> list[Line]:
    """What a line of a spool says; nothing for one that a killed writer left half written."""
    try:
        value = json.loads(raw)
        if "metric" in value:
            return [_metric(value["metric"], value["value"], value["at"], value["step"])]
        for kind in ("param", "tag"):
            if kind in value:
                return [Line(kind, {"key": str(value[kind]), "value": str(value["value"])})]
    except (ValueError, KeyError, TypeError):
        pass
    return []


def _evaluation(raw: bytes) -> list[Line]:
    """An evaluation of a checkpoint as metrics named eval_..."""
    try:
        found = json.loads(raw)
        at, step = found["at"] * 1000, found["step"]
        return [_metric(f"eval_{name}", value, at, step) for name, value in found["metrics"].items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _metric(key: Any, value: Any, at: Any, step: Any) -> Line:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"value must be finite, got {number}")
    return Line("metric", {"key": str(key), "value": number, "timestamp": int(at), "step": int(step)})
