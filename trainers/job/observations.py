"""What is seen of a job beside its training: evaluations of its checkpoints, and warnings that end nothing.

    evaluations.jsonl     {"step": 400, "metrics": {"accuracy": 0.97}, "examples": 360, "seconds": 0.4, "at": ...}
    warnings/BY.jsonl     {"by": "evaluator-0", "text": "...", "at": ...}, a file for each who warns

Lines of JSON in the job's folder, each written whole and synced to the disk; a line that a killed writer left half
written is passed over.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.checks import check, is_number, is_whole
from trainers.job.files import append_json_line, read_json_lines

__all__ = [
    "Evaluation",
    "Remark",
    "add_evaluation",
    "add_warning",
    "evaluations",
    "evaluations_path",
    "warnings",
]

_WARNINGS = "warnings"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One checkpoint on held-out examples: the finished `step` it is of, `metrics` by name, `seconds` it took.

    `examples` is how many were looked at; `at` epoch seconds of the end. A metric that is no finite number is
    left out by who measures it.
    """

    step: int
    metrics: Mapping[str, float]
    examples: int
    seconds: float
    at: float = 0.0

    def __post_init__(self) -> None:
        check(is_whole(self.step) and self.step >= 0, "step", "be a whole number of 0 or more", self.step)
        check(
            is_whole(self.examples) and self.examples >= 0,
            "examples",
            "be a count of 0 or more",
            self.examples,
        )
        for name, value in self.metrics.items():
            check(is_number(value), f"metrics.{name}", "be a finite number", value)


@dataclasses.dataclass(frozen=True)
class Remark:
    """A warning: `by` is the replica that says it, `at` epoch seconds."""

    by: str
    text: str
    at: float = 0.0


def evaluations_path(folder: Path | str) -> Path:
    """Where the evaluations of the job in `folder` are."""
    return Path(folder) / "evaluations.jsonl"


def add_evaluation(folder: Path | str, evaluation: Evaluation) -> None:
    """Append an evaluation; durable when this returns."""
    append_json_line(evaluations_path(folder), _dated(evaluation))


def evaluations(folder: Path | str) -> list[Evaluation]:
    """All evaluations of a job, one a step (the latest, where a step was looked at twice), by step."""
    found = {line["step"]: line for line in read_json_lines(evaluations_path(folder)) if "step" in line}
    return [_read_as(Evaluation, found[step]) for step in sorted(found)]


def add_warning(folder: Path | str, by: str, text: str) -> None:
    """Append a warning; `by` is a replica's name.

    Each has a file of its own: files of several writers could not be copied to an object store and back.
    """
    path = Path(folder) / _WARNINGS / f"{by}.jsonl"
    path.parent.mkdir(exist_ok=True)
    append_json_line(path, _dated(Remark(by, text)))


def warnings(folder: Path | str) -> list[Remark]:
    """All warnings of a job, oldest first."""
    files = sorted((Path(folder) / _WARNINGS).glob("*.jsonl"))
    lines = [line for path in files for line in read_json_lines(path) if {"by", "text"} <= set(line)]
    found: list[Remark] = [_read_as(Remark, line) for line in lines]
    return sorted(found, key=lambda remark: remark.at)


def _dated(value: Evaluation | Remark) -> dict[str, Any]:
    data = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Evaluation):
        data["metrics"] = dict(value.metrics)
    return {**data, "at": value.at or time.time()}


def _read_as(cls: type[Any], data: Mapping[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in data.items() if key in known})
