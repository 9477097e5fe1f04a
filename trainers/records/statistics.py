# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Statistics of each feature, gathered in the pass that writes the records.

Of each feature: `count` rows, `missing` rows, and
    numbers       `min`, `max`, `mean`, `std` (of all values, population), `zeros`, `distinct`, `quantiles`
                  [[share, value], ...] and `histogram` over finite values; `nan` and `infinite` values apart
    text, bytes   `min_length`, `max_length`, `mean_length` in bytes; `distinct`; and `top` [[value, count], ...]
                  as long as there are not too many different values
    raw pixels    as numbers
    lists         `min_values`, `max_values`, `mean_values` a row, and the above over all values

Accumulators add up exactly: the same rows give the same statistics whichever way they were cut into units and
in whatever order these were merged. Two limits: mean and std are rounded within a batch (about 1e-15 of the
values), and quantiles and histograms know values to within a bucket (see records.sketch). `distinct` is exact up
to 10,000 different texts and 2,048 different numbers, and above that an estimate with a standard error of 3.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from trainers.records.schema import Feature, Schema
from trainers.records.sketch import DistinctSketch, Moments, NumberSketch
from trainers.records.split import hash_values

__all__ = ["FeatureStatistics", "Statistics"]

MAX_DISTINCT = 10_000  # more different values than this are no vocabulary, and their top says little
MAX_TEXT = 2 << 20  # bytes of different values, likewise
TOP = 20
VOCABULARY = 100  # so many distinct values become a feature's domain
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
BARS = 20  # of a summary's histogram
_AT_ONCE = 32_768  # numbers put together before they are looked at: fewer calls, and a sketch's window pays


class _ValueCounts:
    """How often each text was there, as Arrow tables that are summed up now and then."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self._state: list[list[Any]] | None = None  # until more comes

    def add(self, array: pa.Array) -> bool:
        """Count the values of a batch; False when there are too many different ones."""
        counts = pc.value_counts(array)
        return self._take(counts.field("values"), counts.field("counts"))

    def merge(self, state: list[list[Any]]) -> bool:
        """Take in another's `state`; False as for `add`."""
        return self._take(pa.array(state[0], pa.string()), pa.array(state[1], pa.int64()))

    def state(self) -> list[list[Any]] | None:
        """Values in their order and their counts, as two lists; None when there are too many."""
        if self._state is None and self._sum_up():
            table = self._parts[0].sort_by("values") if self._parts else None
            self._state = [table[name].to_pylist() for name in table.column_names] if table else [[], []]
        return self._state

    def hashes(self) -> np.ndarray:
        """Hashes of all values so far."""
        none = np.zeros(0, np.uint64)
        return np.concatenate([none, *(hash_values(c) for t in self._parts for c in t["values"].chunks)])

    def _take(self, values: pa.Array, counts: pa.Array) -> bool:
        self._state = None
        self._parts.append(pa.table({"values": values.cast(pa.string()), "counts": counts}))
        few = sum(map(len, self._parts)) <= 4 * MAX_DISTINCT
        return (few and sum(map(_text, self._parts)) <= 4 * MAX_TEXT) or self._sum_up()

    def _sum_up(self) -> bool:
        if self._parts:
            groups = pa.concat_tables(self._parts).group_by("values", use_threads=False)
            table = groups.aggregate([("counts", "sum")]).select(["values", "counts_sum"])
            self._parts = [table.rename_columns(["values", "counts"])]
            return len(table) <= MAX_DISTINCT and _text(table) <= MAX_TEXT
        return True


def _text(counts: pa.Table) -> int:
    """Bytes of the values of some counts."""
    return pc.sum(pc.binary_length(counts["values"])).as_py() or 0


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
        self.distinct = DistinctSketch()
        self.values: _ValueCounts | None = _ValueCounts() if feature.type == "string" else None
        self._waiting: list[np.ndarray] = []

    @property
    def numeric(self) -> bool:
        """Whether values are numbers, pixels too."""
        return self.feature.type in ("float32", "int64", "uint8")

    def add(self, array: pa.Array) -> None:
        """Take in the mapped values of a batch."""
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

    def _lengths(self, name: str, lengths: pa.Array) -> None:
        if len(lengths):
            found = lengths.to_numpy(zero_copy_only=False)
            self._range(f"min_{name}", f"max_{name}", found.min().item(), found.max().item())
            self.totals[name] = self.totals.get(name, 0) + int(found.sum(dtype=np.int64))

    def _range(self, low: str, high: str, a: float, b: float) -> None:
        self.ranges[low] = min(self.ranges.get(low, a), a)
        self.ranges[high] = max(self.ranges.get(high, b), b)

    def _add_numbers(self, values: np.ndarray) -> None:
        while len(values):
            room = _AT_ONCE - sum(map(len, self._waiting))
            self._waiting.append(values[:room])
            if len(values) < room:
                return
            self._take_waiting()
            values = values[room:]

    def settle(self) -> None:
        """Take in numbers that still wait to be looked at with others, before anything is read off."""
        self._take_waiting()
        if self.values is not None and self.values.state() is None:
            self._overflow()

    def _take_waiting(self) -> None:
        if not self._waiting:
            return
        values = np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting = []
        # The sum is finite when all values are (but for an overflow): cheaper than a mask.
        if values.dtype.kind == "f" and not math.isfinite(float(np.add.reduce(values, dtype=np.float64))):
            finite = np.isfinite(values)
            nan = int(np.isnan(values).sum())
            self.odd["nan"] += nan
            self.odd["infinite"] += int((~finite).sum()) - nan
            values = values[finite]
            if not len(values):
                return
        self._range("min", "max", values.min().item(), values.max().item())
        self.moments.add(values)
        self.odd["zeros"] += int(len(values) - np.count_nonzero(values))
        self.numbers.add(values)
        self.distinct.add_numbers(values)

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
        self.distinct.add_numbers(present)

    def _add_bytes(self, array: pa.Array) -> None:
        self._lengths("length", pc.binary_length(array))
        if self.values is None:
            self.distinct.add(hash_values(array))
        elif not self.values.add(array):
            self._overflow()

    def _overflow(self) -> None:
        """Too many different values to count each: only about how many there are from here on."""
        if self.values is not None:
            self.distinct.add(self.values.hashes())
            self.values = None

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what another accumulator's `state` says."""
        self._take_waiting()
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
        self.distinct.merge(state["distinct"])
        if self.numeric:
            self.moments.merge(state["moments"])
            self.numbers.merge(state["numbers"])
        elif self.feature.type == "string":
            self._merge_values(state["values"])

    def _merge_values(self, theirs: list[list[Any]] | None) -> None:
        if theirs is None:
            self._overflow()
        elif self.values is None:
            self.distinct.add(hash_values(pa.array(theirs[0], pa.string())))
        elif not self.values.merge(theirs):
            self._overflow()

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
            "distinct": self.distinct.state(),
        }
        if self.numeric:
            out |= {"moments": self.moments.state(), "numbers": self.numbers.state()}
        elif self.feature.type == "string":
            out["values"] = self.values.state() if self.values is not None else None
        return out

    def summary(self) -> dict[str, Any]:
        """The statistics as they stand in a manifest."""
        self.settle()
        out: dict[str, Any] = {"count": self.count, "missing": self.missing, **self.ranges}
        if "length" in self.totals:
            out["mean_length"] = self.totals["length"] / max(1, self._value_count())
        if "values" in self.totals:
            out["mean_values"] = self.totals["values"] / max(1, self.count - self.missing)
        if self.moments.n:
            out["mean"] = self.moments.mean
            out["std"] = self.moments.std
            out["zeros"] = self.odd["zeros"]
        out |= {name: self.odd[name] for name in ("nan", "infinite") if self.odd[name]}
        counts = self.counts()
        found = self.distinct_values()
        if found:
            out["distinct"] = found
        if self.moments.n:
            out["quantiles"] = [[share, self.quantile(share)] for share in QUANTILES]
            out["histogram"] = self.histogram(BARS)
        if counts:
            out["top"] = [list(item) for item in top(counts)]
        return out

    def _value_count(self) -> int:
        return self.totals.get("values", self.count - self.missing)

    def distinct_values(self) -> int:
        """Different values; exact, or within 3.1 % (standard error) where there are many."""
        counts = self.counts()
        if counts:
            return len(counts)
        if self.moments.n and self.numbers.exact:
            return len(self.numbers.buckets()[0])
        return self.distinct.estimate()

    def counts(self) -> dict[str, int]:
        """How often each text was there; empty when there are too many, and for numbers."""
        found = self.values.state() if self.values is not None else None
        return dict(zip(*found, strict=True)) if found else {}

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

    def domain(self) -> dict[str, Any] | None:
        """What a schema says about the values."""
        self.settle()
        if "min" in self.ranges:
            return {"min": self.ranges["min"], "max": self.ranges["max"]}
        counts = self.counts()
        return {"values": sorted(counts)} if 0 < len(counts) <= VOCABULARY else None


def top(counts: Mapping[str, int], most: int = TOP) -> list[tuple[str, int]]:
    """The most frequent values and their counts; of equal counts in the values' order."""
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
