# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Statistics of each feature, gathered in the pass that writes the records.

Of each feature: `count` rows, `missing` rows, and
    numbers       `min`, `max`, `mean`, `std` (of all values, population) and `zeros` over finite values;
                  `nan` and `infinite` values apart
    text, bytes   `min_length`, `max_length` in bytes; `distinct` and `top` [[value, count], ...] as long as
                  there are not too many different values
    raw pixels    as numbers
    lists         `min_values`, `max_values` a row, and the above over all values

Accumulators of units are merged in order, so a dataset's statistics don't depend on which unit was done first
or in which run. Mean and variance are merged by Chan's formula.
Source: T. Chan, G. Golub, R. LeVeque, Updating formulae and a pairwise algorithm, Stanford 1979.
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

__all__ = ["FeatureStatistics", "Statistics"]

MAX_DISTINCT = 10_000  # more different values than this are no vocabulary, and their top says little
TOP = 20
VOCABULARY = 100  # so many distinct values become a feature's domain


class _ValueCounts:
    """How often each text was there, as Arrow tables that are summed up now and then."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []

    def add(self, array: pa.Array) -> bool:
        """Count the values of a batch; False when there are too many different ones."""
        counts = pc.value_counts(array)
        return self._take(counts.field("values"), counts.field("counts"))

    def merge(self, state: list[list[Any]] | None) -> bool:
        """Take in another's `state`; False as for `add`, or when the other had too many."""
        if state is None:
            return False
        return self._take(pa.array(state[0], pa.string()), pa.array(state[1], pa.int64()))

    def state(self) -> list[list[Any]] | None:
        """Values and their counts, as two lists; None when there are too many."""
        if not self._sum_up():
            return None
        table = self._parts[0] if self._parts else None
        return [table["values"].to_pylist(), table["counts"].to_pylist()] if table else [[], []]

    def _take(self, values: pa.Array, counts: pa.Array) -> bool:
        self._parts.append(pa.table({"values": values.cast(pa.string()), "counts": counts}))
        return sum(map(len, self._parts)) <= 4 * MAX_DISTINCT or self._sum_up()

    def _sum_up(self) -> bool:
        if self._parts:
            groups = pa.concat_tables(self._parts).group_by("values", use_threads=False)
            table = groups.aggregate([("counts", "sum")]).rename_columns(["values", "counts"])
            self._parts = [table]
            return len(table) <= MAX_DISTINCT
        return True


class FeatureStatistics:
    """The accumulator of one feature."""

    def __init__(self, feature: Feature) -> None:
        self.feature = feature
        self.count = 0
        self.missing = 0
        self.numbers: dict[str, Any] = {"n": 0, "mean": 0.0, "m2": 0.0, "zeros": 0, "nan": 0, "infinite": 0}
        self.values: _ValueCounts | None = _ValueCounts()
        self.ranges: dict[str, int | float] = {}

    def add(self, array: pa.Array) -> None:
        """Take in the mapped values of a batch."""
        self.count += len(array)
        self.missing += array.null_count
        if self.feature.encoding == "raw":
            self._add_pixels(array)
            return
        if pt.is_large_list(array.type):
            lengths = pc.list_value_length(array).drop_null()
            if len(lengths):
                self._widen("values", lengths)
            array = array.flatten()
        if self.feature.type in ("string", "bytes"):
            self._add_bytes(array)
        else:
            self._add_numbers(array.drop_null().to_numpy(zero_copy_only=False))

    def _widen(self, name: str, values: Any) -> None:
        found = pc.min_max(values).as_py()
        self._range(f"min_{name}", f"max_{name}", found["min"], found["max"])

    def _range(self, low: str, high: str, a: float, b: float) -> None:
        self.ranges[low] = min(self.ranges.get(low, a), a)
        self.ranges[high] = max(self.ranges.get(high, b), b)

    def _add_numbers(self, values: np.ndarray) -> None:
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                nan = int(np.isnan(values).sum())
                self.numbers["nan"] += nan
                self.numbers["infinite"] += int((~finite).sum()) - nan
                values = values[finite]
        if not len(values):
            return
        self._range("min", "max", values.min().item(), values.max().item())
        # From the batch's own mean, so that great numbers of little spread keep their digits.
        wide = values.astype(np.float64)
        mean = float(wide.mean())
        spread = wide - mean
        # Not by `dot`: BLAS would wake a thread a core for so little, and they spin.
        self._merge_moments(len(values), mean, float(np.einsum("i,i->", spread, spread)))
        self.numbers["zeros"] += int(len(values) - np.count_nonzero(values))

    def _add_pixels(self, array: pa.Array) -> None:
        size = array.type.byte_width
        data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * size, array.offset * size)
        counts = np.bincount(data, minlength=256)
        present = np.flatnonzero(counts)
        if not len(present):
            return
        self._range("min", "max", int(present[0]), int(present[-1]))
        mean = float(counts.dot(np.arange(256))) / len(data)
        self._merge_moments(len(data), mean, float(counts.dot((np.arange(256) - mean) ** 2)))
        self.numbers["zeros"] += int(counts[0])

    def _add_bytes(self, array: pa.Array) -> None:
        array = array.drop_null()
        if not len(array):
            return
        self._widen("length", pc.binary_length(array))
        if self.feature.type == "bytes" or (self.values is not None and not self.values.add(array)):
            self.values = None

    def _merge_moments(self, n: int, mean: float, m2: float) -> None:
        mine = self.numbers
        total = mine["n"] + n
        if not total:
            return
        delta = mean - mine["mean"]
        mine["m2"] += m2 + delta * delta * mine["n"] * n / total
        mine["mean"] += delta * n / total
        mine["n"] = total

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what another accumulator's `state` says."""
        self.count += state["count"]
        self.missing += state["missing"]
        numbers = state["numbers"]
        self._merge_moments(numbers["n"], numbers["mean"], numbers["m2"])
        for name in ("zeros", "nan", "infinite"):
            self.numbers[name] += numbers[name]
        for name, value in state["ranges"].items():
            pick = min if name.startswith("min") else max
            self.ranges[name] = pick(self.ranges.get(name, value), value)
        if state["values"] is None or (self.values is not None and not self.values.merge(state["values"])):
            self.values = None

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as JSON values."""
        return {
            "count": self.count,
            "missing": self.missing,
            "numbers": self.numbers,
            "values": self.values.state() if self.values is not None else None,
            "ranges": self.ranges,
        }

    def summary(self) -> dict[str, Any]:
        """The statistics as they stand in a manifest."""
        out: dict[str, Any] = {"count": self.count, "missing": self.missing, **self.ranges}
        numbers = self.numbers
        if numbers["n"]:
            out["mean"] = numbers["mean"]
            out["std"] = math.sqrt(numbers["m2"] / numbers["n"])
            out["zeros"] = numbers["zeros"]
        out |= {name: numbers[name] for name in ("nan", "infinite") if numbers[name]}
        counts = self._counts()
        if counts:
            out["distinct"] = len(counts)
            top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TOP]
            out["top"] = [list(item) for item in top]
        return out

    def _counts(self) -> dict[str, int]:
        found = self.values.state() if self.values is not None else None
        return dict(zip(*found, strict=True)) if found else {}

    def domain(self) -> dict[str, Any] | None:
        """What a schema says about the values."""
        if "min" in self.ranges:
            return {"min": self.ranges["min"], "max": self.ranges["max"]}
        counts = self._counts()
        return {"values": sorted(counts)} if 0 < len(counts) <= VOCABULARY else None


class Statistics:
    """Accumulators of all features of one split."""

    def __init__(self, schema: Schema) -> None:
        self.features = {feature.name: FeatureStatistics(feature) for feature in schema}

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in a batch of mapped columns."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self.features[name].add(column)

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
