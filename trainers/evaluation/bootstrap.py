"""Confidence intervals by the percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).

Resampling n examples with replacement, many times, and taking the middle 95 % of the means. The resampled mean
of zeros and ones is a binomial count over n, so an accuracy costs nothing to resample; a mean of other values is
resampled by rows up to some millions of draws, and follows the normal law beyond, where it is the same.

A measure that is no mean (an area under a curve, a median) is made anew of each resample. Beyond 5,000 examples so
many of the n are drawn, and the spread is scaled by the root of their ratio: the m out of n bootstrap (Bickel,
Goetze and van Zwet, Resampling fewer than n observations, 1997).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DRAWS", "LEVEL", "mean_interval", "resampled", "spread_interval"]

LEVEL = 0.95
DRAWS = 20_000_000  # rows drawn in all: about a quarter of a second
_REPLICATES = 2000
_REMADE = 200  # replicates of a measure that is made anew of each
_MOST_ROWS = 5000  # of one such replicate
_Z = 1.959963984540054  # of the normal law, for LEVEL


def mean_interval(values: NDArray, *, seed: int = 0, draws: int = DRAWS) -> tuple[float, float] | None:
    """The 95 % interval of the mean of `values` [n]; None below 2 values or where one is not finite."""
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return None
    rng = np.random.default_rng(seed)
    values = values.astype(np.float64)
    # Zeros and ones, and the difference of two such, have few distinct values: draw how often each comes up.
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= 3:
        means = rng.multinomial(n, counts / n, size=_REPLICATES) @ distinct / n
    elif n * _REPLICATES <= draws:
        block = max(1, 1_000_000 // n)
        means = np.concatenate(
            [
                values[rng.integers(0, n, size=(min(block, _REPLICATES - start), n))].mean(axis=1)
                for start in range(0, _REPLICATES, block)
            ]
        )
    else:
        spread = _Z * values.std(ddof=1) / np.sqrt(n)
        return float(values.mean() - spread), float(values.mean() + spread)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled(
    n: int, measure: Callable[[NDArray], Mapping[str, float]], *, seed: int = 0
) -> dict[str, NDArray]:
    """What `measure` says of resampled rows of n: name -> [replicates], NaN where it has no answer.

    The rows depend on n and the seed alone: two models' answers of the same examples are paired.
    """
    if n < 2:
        return {}
    rng = np.random.default_rng(seed)
    found = [measure(rng.integers(0, n, size=min(n, _MOST_ROWS))) for _ in range(_REMADE)]
    return {name: np.array([said[name] for said in found], np.float64) for name in found[0]}


def spread_interval(value: float, samples: NDArray, n: int) -> tuple[float, float] | None:
    """The 95 % interval of a measure of n examples from its resamples; None where too few of them have one."""
    finite = samples[np.isfinite(samples)]
    if not math.isfinite(value) or len(finite) < 0.9 * len(samples):
        return None
    scale = math.sqrt(min(n, _MOST_ROWS) / n)
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(value + scale * (low - value)), float(value + scale * (high - value))
