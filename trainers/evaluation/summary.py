"""From what models said to numbers: metrics, intervals, confusion, and the difference between two models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.evaluation.bootstrap import LEVEL, mean_interval
from trainers.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainers.evaluation.scoring import Scores

__all__ = ["compare", "finite", "means", "summarize"]

_MOST_CLASSES = 200  # of which a confusion matrix is written: 40,000 numbers


def finite(value: float) -> float | None:
    """A number as JSON holds it: None for NaN and infinities, which are no measurement."""
    return float(value) if math.isfinite(value) else None


def means(scores: Scores, task: Task) -> dict[str, float | None]:
    """The metrics of `summarize` alone, without the intervals that take most of its time."""
    if not scores.examples:
        return {}
    found = {name: float(np.mean(v, dtype=np.float64)) for name, v in _values(scores, task).items()}
    if "rmse" in found:
        found["rmse"] = math.sqrt(found["rmse"])
    return {name: finite(value) for name, value in {**found, **scores.more}.items()}


def summarize(scores: Scores, task: Task) -> dict[str, Any]:
    """{"metrics", "intervals"} of a model, with {"per_class", "confusion"} for a classifier.

    Metrics are accuracy and loss for a classifier, loss, mae and rmse for a regression, and the trainer's own;
    the trainer's win where names meet. Without examples there are none.
    """
    if not scores.examples:
        return {"metrics": {}, "intervals": {}}
    values = _values(scores, task)
    intervals = {name: mean_interval(v) for name, v in values.items() if scores.by_example or name != "loss"}
    if "rmse" in values:
        bounds = intervals["rmse"]
        intervals["rmse"] = bounds and (math.sqrt(max(0.0, bounds[0])), math.sqrt(bounds[1]))
    out: dict[str, Any] = {
        "metrics": means(scores, task),
        "intervals": {
            name: {"low": bounds[0], "high": bounds[1], "level": LEVEL, "method": "bootstrap"}
            for name, bounds in intervals.items()
            if bounds is not None
        },
    }
    if task.kind == CLASSIFICATION:
        confusion = _confusion(scores)
        out["per_class"] = _per_class(confusion, task.classes)
        if scores.classes <= _MOST_CLASSES:
            out["confusion"] = confusion.tolist()
    return out


def compare(candidate: Scores, champion: Scores, task: Task) -> dict[str, Any]:
    """The candidate's metrics less the champion's on the same examples, each with its paired interval."""
    out: dict[str, Any] = {}
    ours, theirs = _values(candidate, task), _values(champion, task)
    for name in ours:
        if name == "rmse" or (name == "loss" and not candidate.by_example):
            continue  # a root of means, means of batches: there is no difference an example
        difference = ours[name].astype(np.float64) - theirs[name]
        bounds = mean_interval(difference)
        if bounds is not None:
            mean = float(np.mean(difference))
            out[name] = {"value": mean, "low": bounds[0], "high": bounds[1], "level": LEVEL}
    return out


def _values(scores: Scores, task: Task) -> Mapping[str, NDArray]:
    if task.kind == CLASSIFICATION:
        return {"accuracy": scores.labels == scores.predicted, "loss": scores.losses}
    return {"loss": scores.losses, "mae": scores.absolute, "rmse": scores.squared}


def _confusion(scores: Scores) -> NDArray:
    """Counts [label, predicted]."""
    cells = scores.labels.astype(np.int64) * scores.classes + scores.predicted
    counts = np.bincount(cells, minlength=scores.classes**2)
    return counts.reshape(scores.classes, scores.classes)


def _per_class(confusion: NDArray, names: Sequence[str] | None) -> list[dict[str, Any]]:
    right, of_class, as_class = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    rows = []
    for index in range(len(confusion)):
        rows.append(
            {
                "class": names[index] if names and index < len(names) else str(index),
                "examples": int(of_class[index]),
                # Of its examples, how many were found; of those taken for it, how many were.
                "accuracy": float(right[index] / of_class[index]) if of_class[index] else None,
                "precision": float(right[index] / as_class[index]) if as_class[index] else None,
            }
        )
    return rows
