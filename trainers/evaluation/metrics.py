"""Metrics of what a model said: means over examples, and measures that are none.

    classifier   accuracy, loss, log_loss, brier, top_3_accuracy and top_5_accuracy (with more classes than that);
                 macro_f1, ece (expected calibration error), and of two classes auc (area under the ROC curve) and
                 pr_auc (average precision)
    regression   loss, mae, rmse; median_absolute_error, and of one output r2

Names and definitions are scikit-learn's. Calibration errors are of 15 equally wide bins (Guo et al., On Calibration
of Modern Neural Networks, 2017): of two classes of the second one's probability, else of the answer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainers.evaluation.scoring import Scores

__all__ = ["by_example", "calibration", "measures"]

BINS = 15
_LEAST = 1e-7  # of a probability in float32, for its logarithm


def by_example(scores: Scores, task: Task) -> dict[str, NDArray]:
    """The metrics that are means over examples, each as its values [n]; rmse as the squares it is the root of."""
    if task.kind != CLASSIFICATION:
        return {"loss": scores.losses, "mae": scores.absolute, "rmse": scores.squared}
    values = {"accuracy": scores.labels == scores.predicted, "loss": scores.losses}
    if len(scores.truth):
        values["log_loss"] = -np.log(np.maximum(scores.truth, _LEAST))
        values["brier"] = scores.brier
        values |= {f"top_{k}_accuracy": scores.rank < k for k in (3, 5) if scores.classes > k}
    return values


def measures(scores: Scores, task: Task, rows: NDArray | None = None) -> dict[str, float]:
    """The metrics that are no means, of all examples or of some; NaN where one is not defined."""
    if rows is None:
        rows = np.arange(scores.examples)
    if task.kind != CLASSIFICATION:
        out = {"median_absolute_error": float(np.median(scores.absolute[rows]))}
        if len(scores.wanted):
            wanted = scores.wanted[rows].astype(np.float64)
            total = np.square(wanted - wanted.mean()).sum()
            out["r2"] = (
                float(1 - scores.squared[rows].sum(dtype=np.float64) / total) if total else float("nan")
            )
        return out
    labels = scores.labels[rows]
    out = {"macro_f1": _macro_f1(labels, scores.predicted[rows], scores.classes)}
    if len(scores.truth):
        likely, right = _likely(scores)
        out["ece"] = _calibration_error(likely[rows], right[rows])
        if scores.classes == 2:
            out |= _curves(labels == 1, likely[rows])
    return out


def calibration(scores: Scores) -> list[dict[str, Any]]:
    """What was said and what came true, bin by bin: {"low", "high", "examples", "said", "true"}."""
    likely, right = _likely(scores)
    if not len(likely) or not np.isfinite(likely).all():
        return []
    bins = _bins(likely)
    counts = np.bincount(bins, minlength=BINS)
    said = np.bincount(bins, weights=likely, minlength=BINS)
    true = np.bincount(bins, weights=right, minlength=BINS)
    return [
        {
            "low": i / BINS,
            "high": (i + 1) / BINS,
            "examples": int(counts[i]),
            "said": float(said[i] / counts[i]),
            "true": float(true[i] / counts[i]),
        }
        for i in range(BINS)
        if counts[i]
    ]


def _likely(scores: Scores) -> tuple[NDArray, NDArray]:
    """Probabilities that were said [n], and whether what they were said of came true [n]."""
    return scores.likely, scores.labels == (1 if scores.classes == 2 else scores.predicted)


def _bins(likely: NDArray) -> NDArray:
    return np.clip((likely * BINS).astype(np.int64), 0, BINS - 1)


def _calibration_error(likely: NDArray, right: NDArray) -> float:
    if not np.isfinite(likely).all():
        return float("nan")
    gaps = np.bincount(_bins(likely), weights=likely - right.astype(np.float64), minlength=BINS)
    return float(np.abs(gaps).sum() / len(likely))


def _macro_f1(labels: NDArray, predicted: NDArray, classes: int) -> float:
    """The mean over the classes that are there of 2 right / (of the class + taken for it)."""
    right = np.bincount(labels[labels == predicted], minlength=classes)
    either = np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes)
    there = either > 0
    return float(np.mean(2 * right[there] / either[there]))


def _curves(positive: NDArray, score: NDArray) -> Mapping[str, float]:
    """The areas under the ROC and the precision-recall curve; NaN where one class is not there."""
    n, positives = len(positive), int(positive.sum())
    if not 0 < positives < n or not np.isfinite(score).all():
        return {"auc": float("nan"), "pr_auc": float("nan")}
    order = np.argsort(-score)
    ordered = score[order]
    last = np.r_[np.flatnonzero(np.diff(ordered)), n - 1]  # of examples with one score: a threshold each
    found = np.cumsum(positive[order])[last].astype(np.float64)
    taken = last + 1.0
    recall, false = found / positives, (taken - found) / (n - positives)
    trapezia = np.diff(false, prepend=0.0) * (recall + np.r_[0.0, recall[:-1]]) / 2
    precision = np.diff(recall, prepend=0.0) * found / taken
    return {"auc": float(trapezia.sum()), "pr_auc": float(precision.sum())}
