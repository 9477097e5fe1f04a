"""From what models said to numbers: metrics, intervals, confusion, and the difference between two models."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.evaluation.bootstrap import DRAWS, LEVEL, mean_interval, resampled, spread_interval
from trainers.evaluation.metrics import by_example, calibration, measures
from trainers.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainers.evaluation.scoring import Scores

__all__ = ["Measured", "compare", "finite", "means", "summarize"]

_MOST_CLASSES = 200  # of which a confusion matrix is written: 40,000 numbers
_SLICE_DRAWS = 2_000_000  # of rows for a slice's intervals: there are many slices


def finite(value: float) -> float | None:
    """A number as JSON holds it: None for NaN and infinities, which are no measurement."""
    return float(value) if math.isfinite(value) else None


def means(scores: Scores, task: Task) -> dict[str, float | None]:
    """The metrics that are means, and the trainer's own, without the intervals that take most of the time."""
    if not scores.examples:
        return {}
    return {name: finite(value) for name, value in {**_means(scores, task), **scores.more}.items()}


def summarize(scores: Scores, task: Task) -> dict[str, Any]:
    """{"metrics", "intervals"} of a model, with {"per_class", "confusion", "calibration"} for a classifier.

    Metrics are those of `evaluation.metrics` and the trainer's own; the trainer's win where names meet. Without
    examples there are none.
    """
    return Measured(scores, task).summary()


def compare(candidate: Scores, champion: Scores, task: Task) -> dict[str, Any]:
    """The candidate's metrics less the champion's on the same examples, each with its paired interval."""
    return Measured(candidate, task).less(Measured(champion, task))


class Measured:
    """What a model said of some examples, and the resamples that intervals are made of, which are made once."""

    def __init__(self, scores: Scores, task: Task, *, draws: int = DRAWS) -> None:
        self.scores = scores
        self._task = task
        self._draws = draws

    def take(self, rows: NDArray) -> Measured:
        """Of a slice."""
        return Measured(self.scores.take(rows), self._task, draws=_SLICE_DRAWS)

    @functools.cached_property
    def _values(self) -> Mapping[str, NDArray]:
        return by_example(self.scores, self._task)

    @functools.cached_property
    def _measures(self) -> Mapping[str, float]:
        return measures(self.scores, self._task)

    @functools.cached_property
    def _samples(self) -> Mapping[str, NDArray]:
        return resampled(self.scores.examples, lambda rows: measures(self.scores, self._task, rows))

    def metrics(self) -> dict[str, float | None]:
        """Name -> value, None for what is no finite number."""
        if not self.scores.examples:
            return {}
        found = {**_means(self.scores, self._task), **self._measures, **self.scores.more}
        return {name: finite(value) for name, value in found.items()}

    def intervals(self) -> dict[str, Any]:
        """Name -> {"low", "high", "level", "method"} of what has one."""
        scores = self.scores
        bounds = {
            name: mean_interval(v, draws=self._draws)
            for name, v in self._values.items()
            if scores.by_example or name != "loss"
        }
        if bounds.get("rmse"):
            low, high = bounds["rmse"]
            bounds["rmse"] = math.sqrt(max(0.0, low)), math.sqrt(high)
        for name, samples in self._samples.items():
            bounds[name] = spread_interval(self._measures[name], samples, scores.examples)
        return {
            name: {"low": found[0], "high": found[1], "level": LEVEL, "method": "bootstrap"}
            for name, found in bounds.items()
            if found is not None
        }

    def summary(self) -> dict[str, Any]:
        """What `summarize` gives."""
        scores = self.scores
        if not scores.examples:
            return {"metrics": {}, "intervals": {}}
        out: dict[str, Any] = {"metrics": self.metrics(), "intervals": self.intervals()}
        if self._task.kind == CLASSIFICATION:
            confusion = _confusion(scores)
            out["per_class"] = _per_class(confusion, self._task.classes)
            if scores.classes <= _MOST_CLASSES:
                out["confusion"] = confusion.tolist()
            if len(scores.truth):
                out["calibration"] = calibration(scores)
        return out

    def less(self, champion: Measured) -> dict[str, Any]:
        """This model's metrics less the champion's: {"value", "low", "high", "level"} each."""
        out: dict[str, Any] = {}
        for name, ours in self._values.items():
            theirs = champion._values.get(name)
            if theirs is None or name == "rmse" or (name == "loss" and not self.scores.by_example):
                continue  # a root of means, means of batches: there is no difference an example
            difference = ours.astype(np.float64) - theirs
            bounds = mean_interval(difference, draws=self._draws)
            if bounds is not None:
                out[name] = _difference(float(np.mean(difference)), bounds)
        for name, samples in self._samples.items():
            theirs = champion._samples.get(name)
            if theirs is None:
                continue
            value = self._measures[name] - champion._measures[name]
            bounds = spread_interval(value, samples - theirs, self.scores.examples)
            if bounds is not None:
                out[name] = _difference(value, bounds)
        return out


def _difference(value: float, bounds: tuple[float, float]) -> dict[str, float]:
    return {"value": value, "low": bounds[0], "high": bounds[1], "level": LEVEL}


def _means(scores: Scores, task: Task) -> dict[str, float]:
    found = {name: float(np.mean(v, dtype=np.float64)) for name, v in by_example(scores, task).items()}
    if "rmse" in found:
        found["rmse"] = math.sqrt(found["rmse"])
    return found


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
