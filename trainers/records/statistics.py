# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Statistics of each feature, gathered in the pass that writes the records.

Of each feature: `count` rows, `missing` rows, and
    numbers       `min`, `max`, `mean`, `std` (of all values, population), `zeros`, `distinct`, `quantiles`
                  [[share, value], ...] and `histogram` over finite values; `nan` and `infinite` values apart
    text, bytes   `min_length`, `max_length`, `mean_length` in bytes; `distinct`; of text `top` [[value, count], ...],
                  and `top_error` where there are too many different values to count each: a value was there as
                  often as `top` says, or up to `top_error` times more often
    raw pixels    as numbers
    lists         `min_values`, `max_values`, `mean_values` a row, and the above over all values

Accumulators add up exactly: the same rows give the same statistics whichever way they were cut into units and
in whatever order these were merged. Two limits: mean and std are rounded within a batch (about 1e-15 of the
values), and quantiles and histograms know values to within a bucket (see records.sketch). `distinct` is exact up
to 10,000 different texts and 2,048 different numbers, and above that an estimate with a standard error of 3.1 %.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from trainers.records.schema import Feature, Schema
from trainers.records.sketch import DistinctSketch, Moments, NumberSketch
from trainers.records.split import hash_values
from trainers.records.values import ValueCounts

__all__ = ["FeatureStatistics", "Statistics", "domain_of"]

TOP = 20
VOCABULARY = 100  # so many distinct values become a feature's domain
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
BARS = 20  # of a summary's histogram
_AT_ONCE = 65_536  # numbers put together before they are looked at: fewer calls, and a sketch's window pays


class FeatureStatistics:
    """The accumulator of one feature; without `detail` it counts rows and missing values only."""

    def __init__(self, feature: Feature, detail: bool = True) -> None:
        self.feature = feature
        self.detail = detail
        self.count = 0
        self.missing = 0
        self.odd = {"zeros": 0, "nan": 0, "infinite": 0}
        self.totals: dict[str, int] = {}  # bytes of all values, values of all rows
        self.ranges: dict[str, int | float] = {}
        self.moments = Moments()
        self.numbers = NumberSketch(32 if feature.type == "float32" else 64)
        self.distinct = self.numbers.distinct if self.numeric else DistinctSketch()
        self.values = ValueCounts() if feature.type == "string" else None
        self._waiting: list[np.ndarray] = []
        self._rows_waiting = 0
        self._summary: dict[str, Any] | None = None  # until more comes

    @property
    def numeric(self) -> bool:
        """Whether values are numbers, pixels too."""
        return self.feature.type in ("float32", "int64", "uint8")

    def add(self, array: pa.Array) -> None:
        """Take in the mapped values of a batch."""
        self._summary = None
        self.count += len(array)
        self.missing += array.null_count
        if not self.detail:
            return
        if self.feature.encoding == "raw":
            self._add_pixels(array)
            return
        if pt.is_large_list(array.type):
            self._lengths("values", pc.list_value_length(array).drop_null())
            array = array.flatten()
        if array.null_count:
            array = array.drop_null()
        if not len(array):
            return
        if not self.numeric:
            self._add_bytes(array)
        else:
            self._add_numbers(array.to_numpy(zero_copy_only=False))

    def _lengths(self, name: str, lengths: pa.Array) -> int:
        if not len(lengths):
            return 0
        found = lengths.to_numpy(zero_copy_only=False)
        self._range(f"min_{name}", f"max_{name}", found.min().item(), found.max().item())
        total = int(found.sum(dtype=np.int64))
        self.totals[name] = self.totals.get(name, 0) + total
        return total

    def _range(self, low: str, high: str, a: float, b: float) -> None:
        # Of -0.0 and 0.0 each is the smaller, whichever comes first: one zero, or the order of units would show.
        a, b = a or abs(a), b or abs(b)
        self.ranges[low] = min(self.ranges.get(low, a), a)
        self.ranges[high] = max(self.ranges.get(high, b), b)

    def _add_numbers(self, values: np.ndarray) -> None:
        while len(values):
            some = values[: _AT_ONCE - self._rows_waiting]
            self._waiting.append(some)
            self._rows_waiting += len(some)
            if self._rows_waiting == _AT_ONCE:
                self._take_waiting()
            values = values[len(some) :]

    def settle(self) -> None:
        """Take in values that still wait to be looked at with others, before anything is read off."""
        self._take_waiting()
        if self.values is not None:
            self.values.settle()
            self.distinct.add(self.values.new_hashes())

    def _take_waiting(self) -> None:
        if not self._waiting:
            return
        values = np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting, self._rows_waiting = [], 0
        found = self.numbers.add(values)
        self.odd["zeros"] += found.zeros
        self.odd["nan"] += found.nan
        self.odd["infinite"] += found.infinite
        if found.low is None or found.high is None:
            return
        self._range("min", "max", found.low, found.high)
        self.moments.add(values if found.n == len(values) else values[np.isfinite(values)])

    def _add_pixels(self, array: pa.Array) -> None:
        size = array.type.byte_width
        data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * size, array.offset * size)
        counts = np.bincount(data, minlength=256)
        present = np.flatnonzero(counts)
        if not len(present):
            return
        self._range("min", "max", int(present[0]), int(present[-1]))
        mean = float(counts.dot(np.arange(256))) / len(data)
        self.moments.add_moments(len(data), mean, float(counts.dot((np.arange(256) - mean) ** 2)))
        self.odd["zeros"] += int(counts[0])
        self.numbers.add_counts(present, counts[present])

    def _add_bytes(self, array: pa.Array) -> None:
        size = self._lengths("length", pc.binary_length(array))
        if self.values is None:
            self.distinct.add(hash_values(array))
        else:
            self.values.add(array, size)
            self.distinct.add(self.values.new_hashes())

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what another accumulator's `state` says."""
        self._summary = None
        self.count += state["count"]
        self.missing += state["missing"]
        self.detail = self.detail and state["detail"]
        for name, value in state["odd"].items():
            self.odd[name] += value
        for name, value in state["totals"].items():
            self.totals[name] = self.totals.get(name, 0) + value
        for name, value in state["ranges"].items():
            pick = min if name.startswith("min") else max
            self.ranges[name] = pick(self.ranges.get(name, value), value)
        if self.numeric:
            self.moments.merge(state["moments"])
            self.numbers.merge(state["numbers"], state["distinct"])
            return
        self.distinct.merge(state["distinct"])
        if self.values is not None:
            self.values.merge(_counts_of(state))
            self.distinct.add(self.values.new_hashes())

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as JSON values."""
        self.settle()
        out = {
            "count": self.count,
            "missing": self.missing,
            "detail": self.detail,
            "odd": dict(self.odd),
            "totals": dict(self.totals),
            "ranges": dict(self.ranges),
        }
        if self.numeric:
            out |= {"moments": self.moments.state(), "numbers": self.numbers.state()}
        elif self.values is not None:
            out["values"] = self.values.state()
        out["distinct"] = self.distinct.state()
        return out

    def summary(self) -> dict[str, Any]:
        """The statistics as they stand in a manifest."""
        if self._summary is None:
            self._summary = self._summed_up()
        return self._summary

    def _summed_up(self) -> dict[str, Any]:
        self.settle()
        out: dict[str, Any] = {"count": self.count, "missing": self.missing, **self.ranges}
        if "length" in self.totals:
            out["mean_length"] = self.totals["length"] / max(1, self.value_count)
        if "values" in self.totals:
            out["mean_values"] = self.totals["values"] / max(1, self.count - self.missing)
        if self.moments.n:
            out["mean"] = self.moments.mean
            out["std"] = self.moments.std
            out["zeros"] = self.odd["zeros"]
        out |= {name: self.odd[name] for name in ("nan", "infinite") if self.odd[name]}
        counts, error = self.frequent()
        found = self.distinct_values()
        if found:
            out["distinct"] = found
        if self.moments.n:
            out["quantiles"] = [[share, self.quantile(share)] for share in QUANTILES]
            out["histogram"] = self.histogram(BARS)
        if counts:
            out["top"] = [list(item) for item in top(counts)]
        if error:
            out["top_error"] = error
        return out

    @property
    def value_count(self) -> int:
        """Values that aren't missing: of lists all of each row."""
        return self.totals.get("values", self.count - self.missing)

    def distinct_values(self) -> int:
        """Different values; exact, or within 3.1 % (standard error) where there are many."""
        counts = self.counts()
        if counts:
            return len(counts)
        return self.numbers.different() if self.numeric else self.distinct.estimate()

    def counts(self) -> dict[str, int]:
        """How often each text was there; empty when there are too many, and for numbers."""
        return self.frequent()[0] if self.values is not None and self.values.exact else {}

    def frequent(self) -> tuple[dict[str, int], int]:
        """How often frequent texts were there at least, and by how much that may be too low; all texts, when by 0."""
        if self.values is None:
            return {}, 0
        found = self.values.state()
        return dict(zip(found["values"], found["counts"], strict=True)), found["error"]

    def quantile(self, share: float) -> float:
        """The value of rank ceil(share * n): the middle of its bucket."""
        if not self.moments.n:
            return math.nan
        low, high = self.numbers.quantile_bounds(share)
        return _short(min(max((low + high) / 2, self.ranges["min"]), self.ranges["max"]))

    def histogram(self, bars: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
        """Counts of `bars` bars of one width from `low` to `high` (min and max): {"edges", "counts"}.

        What lies outside is in the first and the last bar. Integers of few values get whole-numbered bars.
        """
        low = float(self.ranges["min"] if low is None else low)
        high = float(self.ranges["max"] if high is None else high)
        edges = _edges(low, high, bars, whole=self.feature.type != "float32")
        inner = np.round(self.numbers.below(edges[1:-1]))
        counts = np.diff(np.concatenate([[0.0], inner, [float(self.moments.n)]]))
        return {"edges": edges, "counts": counts.astype(int).tolist()}


def domain_of(parts: Sequence[FeatureStatistics]) -> dict[str, Any] | None:
    """What a schema says about the values of a feature, by its statistics of some splits: range, or values if few."""
    for part in parts:
        part.settle()
    ranges = [part.ranges for part in parts if "min" in part.ranges]
    if ranges:
        return {"min": min(r["min"] for r in ranges), "max": max(r["max"] for r in ranges)}
    counted = [part.values for part in parts if part.values is not None]
    if not all(counts.exact and counts.different <= VOCABULARY for counts in counted):
        return None
    values = sorted({value for counts in counted for value in counts.state()["values"]})
    return {"values": values} if 0 < len(values) <= VOCABULARY else None


def _counts_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A feature's counts of texts, as `ValueCounts.merge` takes them, from older states too."""
    found = state["values"]
    if isinstance(found, Mapping):
        return found
    if found is not None:
        return {"exact": True, "error": 0, "values": found[0], "counts": found[1]}
    # Nothing was known of too many: each value may have been there as often as there were any.
    error = state["totals"].get("values", state["count"] - state["missing"])
    return {"exact": False, "error": error, "values": [], "counts": []}


def top(counts: Mapping[str, int], most: int = TOP) -> list[tuple[str, int]]:
    """The most frequent values and their counts; of equal counts in the values' order."""
    if len(counts) > most:
        # First by the counts alone: a key for each of thousands of values costs more than counting them did.
        least = heapq.nlargest(most, counts.values())[-1]
        counts = {value: count for value, count in counts.items() if count >= least}
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]


def _edges(low: float, high: float, bars: int, *, whole: bool) -> list[float]:
    if whole and high - low < bars:
        return [low - 0.5 + i for i in range(round(high - low) + 2)]
    if high <= low:
        return [low, math.nextafter(low, math.inf)]
    step = high / bars - low / bars  # no overflow
    return [low, *(_short(low + step * i) for i in range(1, bars)), high]


def _short(number: float) -> float:
    """To nine digits, as many as a float32 has."""
    return float(f"{number:.9g}") if math.isfinite(number) else number


class Statistics:
    """Accumulators of all features of one split; without `detail` of counts and missing values only."""

    def __init__(self, schema: Schema, *, detail: bool = True) -> None:
        self.features = {feature.name: FeatureStatistics(feature, detail) for feature in schema}

    @classmethod
    def from_state(cls, schema: Schema, state: Mapping[str, Any]) -> Statistics:
        """The accumulators that a `state` tells of; features that it lacks are empty."""
        found = cls(schema)
        found.merge(state)
        return found

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in a batch of mapped columns."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self.features[name].add(column)

    def settle(self) -> None:
        """Make all accumulators ready to be read."""
        for feature in self.features.values():
            feature.settle()

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in another's `state`."""
        for name, value in state.items():
            self.features[name].merge(value)

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as JSON values."""
        return {name: feature.state() for name, feature in self.features.items()}

    def summary(self) -> dict[str, Any]:
        """The statistics as they stand in a manifest."""
        return {name: feature.summary() for name, feature in self.features.items()}
