"""The plots of an evaluation: calibration and confusion of a classifier, residuals of a regression, and slices.

The candidate is blue, the champion beside it orange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.evaluation.canvas import Canvas
from trainers.task import CLASSIFICATION

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainers.evaluation.scoring import Scores

__all__ = ["Plots", "draw"]

_BLUE, _ORANGE, _INK, _SOFT, _GRID = "#2f6fde", "#e0891d", "#1d2530", "#5c6875", "#dfe4ea"
_MOST_CLASSES = 40  # of a confusion matrix that is drawn
_MOST_NUMBERED = 15  # of one whose cells say their counts
_MOST_SLICES = 30
_CELLS = 40  # of predicted against actual, each way


class Plots:
    """What plots need of the examples beside the document: the scores of the candidate and the champion."""

    def __init__(self) -> None:
        self.candidate: Scores | None = None
        self.champion: Scores | None = None

    def take(self, candidate: Scores, champion: Scores | None) -> None:
        """Keep the scores of both."""
        self.candidate, self.champion = candidate, champion


def draw(document: Mapping[str, Any], plots: Plots) -> dict[str, Canvas]:
    """File name without its ending -> plot, of all that there are examples for."""
    if not document["examples"]:
        return {}
    out: dict[str, Canvas] = {}
    champion = document["champion"] or {}
    if document["task"] == CLASSIFICATION:
        if document.get("calibration"):
            out["calibration"] = _calibration(document["calibration"], champion.get("calibration"))
        for name, title, model in (
            ("confusion", "Confusion, candidate", document),
            ("confusion-champion", "Confusion, champion", champion),
        ):
            if 0 < len(model.get("confusion") or ()) <= _MOST_CLASSES:
                out[name] = _confusion(
                    title, model["confusion"], [row["class"] for row in model["per_class"]]
                )
    elif plots.candidate is not None and len(plots.candidate.wanted):
        other = plots.champion if plots.champion is not None and len(plots.champion.wanted) else None
        found = _residuals(plots.candidate, other)
        out |= {"residuals": found} if found else {}
        found = _predicted(plots.candidate)
        out |= {"predicted-actual": found} if found else {}
    metric = "accuracy" if document["task"] == CLASSIFICATION else "mae"
    rows = [row for row in document["slices"] if row["metrics"].get(metric) is not None]
    if rows:
        out["slices"] = _slices(rows[:_MOST_SLICES], metric, document["metrics"].get(metric))
    return out


class _Axes:
    """A frame with numbers at its sides, and the way from values to places in it."""

    def __init__(
        self, canvas: Canvas, x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str]
    ) -> None:
        self.canvas, self._x, self._y = canvas, x, y
        self.left, self.top, self.right, self.bottom = 58.0, 30.0, canvas.width - 16.0, canvas.height - 44.0
        for share in np.linspace(0, 1, 6):
            at, up = x[0] + share * (x[1] - x[0]), y[0] + share * (y[1] - y[0])
            canvas.line([(self.x(at), self.top), (self.x(at), self.bottom)], _GRID)
            canvas.line([(self.left, self.y(up)), (self.right, self.y(up))], _GRID)
            canvas.text(self.x(at), self.bottom + 15, _number(at), size=10, anchor="middle")
            canvas.text(self.left - 5, self.y(up) + 4, _number(up), size=10, anchor="end")
        canvas.text((self.left + self.right) / 2, canvas.height - 8, labels[0], anchor="middle")
        canvas.text(8, 14, labels[1])

    def x(self, value: float) -> float:
        """From left to right."""
        return self.left + (value - self._x[0]) / (self._x[1] - self._x[0]) * (self.right - self.left)

    def y(self, value: float) -> float:
        """From the bottom up."""
        return self.bottom - (value - self._y[0]) / (self._y[1] - self._y[0]) * (self.bottom - self.top)

    def legend(self, champion: bool) -> None:
        """The names of the colours."""
        for i, (name, color) in enumerate((("candidate", _BLUE), ("champion", _ORANGE))[: 1 + champion]):
            self.canvas.rect(self.right - 160 + 82 * i, 6, 9, 9, color)
            self.canvas.text(self.right - 147 + 82 * i, 15, name, size=10)


def _calibration(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]] | None) -> Canvas:
    canvas = Canvas(440, 400, "Calibration")
    axes = _Axes(canvas, (0.0, 1.0), (0.0, 1.0), ("probability that was said", "share that came true"))
    canvas.line([(axes.x(0), axes.y(0)), (axes.x(1), axes.y(1))], _SOFT)
    most = max(row["examples"] for row in ours)
    for rows, color in ((theirs, _ORANGE), (ours, _BLUE)):
        points = [(axes.x(row["said"]), axes.y(row["true"])) for row in rows or ()]
        canvas.line(points, color, 1.5)
        for (x, y), row in zip(points, rows or (), strict=True):
            canvas.dot(x, y, 2 + round(4 * math.sqrt(min(1.0, row["examples"] / most)), 1), color)
    axes.legend(bool(theirs))
    return canvas


def _confusion(title: str, counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Canvas:
    n = len(counts)
    cell = max(10.0, min(42.0, 420 / n))
    names = [_short(name) for name in classes]
    margin = 24.0 + 6.2 * max(map(len, names))
    canvas = Canvas(int(margin + n * cell + 16), int(44 + margin + n * cell), title)
    canvas.text(8, 14, f"{title}: rows are labels, columns answers")
    small = min(11.0, cell * 0.8)
    for i, row in enumerate(counts):
        total = sum(row)
        canvas.text(margin - 5, 40 + (i + 0.65) * cell, names[i], size=small, anchor="end")
        for j, count in enumerate(row):
            share = count / total if total else 0.0
            x, y = margin + j * cell, 40 + i * cell
            canvas.rect(x, y, cell - 1, cell - 1, _shade(share))
            if count and n <= _MOST_NUMBERED:
                ink = "#ffffff" if share > 0.5 else _INK
                size = min(11.0, cell * 1.5 / len(str(count)))
                canvas.text(x + cell / 2, y + cell * 0.62, str(count), size=size, anchor="middle", color=ink)
    if cell * 1.2 >= 6 * max(map(len, names)):
        for j, name in enumerate(names):
            canvas.text(margin + (j + 0.5) * cell, 54 + n * cell, name, size=small, anchor="middle")
    return canvas


def _residuals(ours: Scores, theirs: Scores | None) -> Canvas | None:
    errors = [
        (scores.given - scores.wanted).astype(np.float64) for scores in (ours, theirs) if scores is not None
    ]
    errors = [e[np.isfinite(e)] for e in errors]
    if not len(errors[0]):
        return None
    low, high = _range(np.concatenate(errors))
    edges = np.linspace(low, high, 41)
    shares = [np.histogram(np.clip(e, low, high), edges)[0] / max(len(e), 1) for e in errors]
    canvas = Canvas(520, 340, "Residuals")
    top = max(float(s.max()) for s in shares) * 1.05
    axes = _Axes(
        canvas, (low, high), (0.0, top), ("answer less label; the ends hold what is beyond", "share")
    )
    for share, (left, right) in zip(shares[0], itertools.pairwise(edges), strict=True):
        canvas.rect(
            axes.x(left), axes.y(share), axes.x(right) - axes.x(left) - 1, axes.bottom - axes.y(share), _BLUE
        )
    if len(shares) > 1:
        steps = [
            (axes.x(x), axes.y(s))
            for s, ends in zip(shares[1], itertools.pairwise(edges), strict=True)
            for x in ends
        ]
        canvas.line(steps, _ORANGE, 1.5)
    if low < 0 < high:
        canvas.line([(axes.x(0), axes.top), (axes.x(0), axes.bottom)], _INK)
    axes.legend(len(shares) > 1)
    return canvas


def _predicted(scores: Scores) -> Canvas | None:
    known = np.isfinite(scores.given) & np.isfinite(scores.wanted)
    wanted, given = scores.wanted[known].astype(np.float64), scores.given[known].astype(np.float64)
    if not len(wanted):
        return None
    low, high = _range(np.concatenate([wanted, given]))
    edges = np.linspace(low, high, _CELLS + 1)
    counts, _, _ = np.histogram2d(np.clip(wanted, low, high), np.clip(given, low, high), bins=(edges, edges))
    canvas = Canvas(440, 400, "Predicted and actual")
    axes = _Axes(canvas, (low, high), (low, high), ("label", "answer"))
    # Most examples lie close together: by the logarithm, the few others are seen too.
    depth = np.log1p(counts) / math.log1p(counts.max())
    for i, j in np.argwhere(counts):
        x, y = axes.x(edges[i]), axes.y(edges[j + 1])
        width, height = axes.x(edges[i + 1]) - x, axes.y(edges[j]) - y
        canvas.rect(x, y, width, height, _shade(0.15 + 0.85 * float(depth[i, j])))
    canvas.line([(axes.x(low), axes.y(low)), (axes.x(high), axes.y(high))], _INK)
    return canvas


def _slices(rows: Sequence[Mapping[str, Any]], metric: str, overall: float | None) -> Canvas:
    canvas = Canvas(640, 60 + 22 * len(rows), f"{metric} by slice")
    models = [(row, row["champion"]) for row in rows]
    values = [overall] if overall is not None else []
    for pair in models:
        for model in filter(None, pair):
            bounds = model["intervals"].get(metric) or {}
            values += [model["metrics"].get(metric), bounds.get("low"), bounds.get("high")]
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    left, right, top = 250.0, 620.0, 34.0

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    canvas.text(8, 16, f"{metric} by slice, with 95 % intervals", color=_INK)
    for value in (low, (low + high) / 2, high):
        canvas.text(x(value), canvas.height - 6, _number(value), size=10, anchor="middle")
    if overall is not None:
        canvas.line([(x(overall), top - 6), (x(overall), canvas.height - 22)], _SOFT)
    for i, (row, champion) in enumerate(models):
        y = top + 22 * i + 8
        ink = _INK if row["enough_examples"] else "#a9b2bd"
        canvas.text(8, y + 4, f"{_short(row['slice'], 26)} ({row['examples']})", size=10, color=ink)
        for model, color, at in ((champion, _ORANGE, y + 4), (row, _BLUE, y - 2)):
            value = model["metrics"].get(metric) if model else None
            if value is None:
                continue
            bounds = model["intervals"].get(metric)
            if bounds:
                canvas.line([(x(bounds["low"]), at), (x(bounds["high"]), at)], color, 1.5)
            canvas.dot(x(value), at, 3, color)
    return canvas


def _range(values: NDArray) -> tuple[float, float]:
    low, high = (float(v) for v in np.quantile(values, [0.005, 0.995]))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _shade(share: float) -> str:
    """From white to blue."""
    return "#" + "".join(f"{round(255 + (c - 255) * share):02x}" for c in (0x1F, 0x55, 0xB5))


def _number(value: float) -> str:
    return f"{value:.3g}"


def _short(text: str, most: int = 18) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
