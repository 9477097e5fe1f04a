"""How far data has moved: a span against the one before it, or what serving saw against what was trained on.

    python -m trainers.records.drift BASELINE CURRENT [--thresholds FILE] [--json]

Each side is a dataset (its manifest or folder) or a file or folder of rows (Parquet, CSV, JSON Lines), of which at
least one is a dataset. The exit code is 0 for pass, warn and unknown, and that of class DATA for fail.

| measure           | of      | what it is                                                            | warns above |
|-------------------|---------|-----------------------------------------------------------------------|-------------|
| `js`              | numbers | Jensen-Shannon divergence in bits, 0 (the same) to 1 (nothing shared) | 0.05        |
| `linf`            | text    | greatest change of one value's share                                  | 0.1         |
| `new_values`      | text    | share of rows with values that the baseline doesn't hold              | 0.01        |
| `vanished_values` | text    | share of the baseline's rows with values that are gone                | 0.01        |
| `missing`         | all     | change of the share of missing values                                 | 0.05        |
| `out_of_range`    | numbers | share of values outside the baseline's least and greatest             | 0.01        |

By default nothing fails: what is a failure only the data's owner knows. Thresholds are in the schema, a feature
(see records.limits), or for all features in a JSON object {measure: {"warn": number, "fail": number or null}}.
Below 100 rows on a side a measure says unknown, since chance alone would look like drift.

Of more than 10,000 different texts the frequent ones have bounds in place of counts (see records.values): `linf` is
then what the greatest change is at least, its words say within what, and values are called new or vanished only where
all values of the other side are known.

The divergence is over up to 20 bins that hold equal shares of both sides together, or over each value where there
are few. Sources: J. Lin, Divergence measures based on the Shannon entropy, IEEE Trans. Inf. Theory 37(1), 1991; the
measures are those of TensorFlow Data Validation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.records.errors import RecordsError
from trainers.records.limits import MEASURES, check_limits
from trainers.records.schema import Schema
from trainers.records.statistics import FeatureStatistics, Statistics

__all__ = [
    "DEFAULT_THRESHOLDS",
    "FAIL",
    "PASS",
    "UNKNOWN",
    "WARN",
    "Drift",
    "DriftFailed",
    "Measure",
    "compare",
]

PASS, UNKNOWN, WARN, FAIL = "pass", "unknown", "warn", "fail"
_ORDER = (PASS, UNKNOWN, WARN, FAIL)

LEAST_ROWS = 100
_BINS = 20
_A_BIN = 50  # rows, on average, or there are fewer bins
_NAMED = 5  # values named in words
_MOST_UNSURE = 0.05  # of a share, or it isn't told

Thresholds = Mapping[str, Mapping[str, float | None]]

DEFAULT_THRESHOLDS: Thresholds = {
    "js": {"warn": 0.05, "fail": None},
    "linf": {"warn": 0.1, "fail": None},
    "new_values": {"warn": 0.01, "fail": None},
    "vanished_values": {"warn": 0.01, "fail": None},
    "missing": {"warn": 0.05, "fail": None},
    "out_of_range": {"warn": 0.01, "fail": None},
}


class DriftFailed(RecordsError):
    """The data has moved further from its baseline than a threshold allows; `drift` holds all measures."""

    code = "records.drift"

    def __init__(self, drift: Drift) -> None:
        failed = [m for m in drift.measures if m.verdict == FAIL]
        super().__init__(
            f"the data has drifted from {drift.baseline}: " + "; ".join(m.words for m in failed[:5]),
            hint="look at the report; mend the data, or raise the thresholds where the change is right",
        )
        self.drift = drift


@dataclasses.dataclass(frozen=True)
class Measure:
    """One measure of one feature; `value` is None where it can't be told, and `words` say why."""

    feature: str
    measure: str
    value: float | None
    warn: float | None
    fail: float | None
    verdict: str
    words: str

    def __post_init__(self) -> None:
        if self.verdict not in _ORDER:
            raise ValueError(f"verdict must be one of {', '.join(_ORDER)}, got {self.verdict!r}")
        if self.measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {self.measure!r}")


@dataclasses.dataclass(frozen=True)
class Drift:
    """All measures of a comparison; `rows` are the baseline's and the current data's."""

    baseline: str
    current: str
    rows: tuple[int, int]
    measures: tuple[Measure, ...]

    @property
    def verdict(self) -> str:
        """The worst of all measures; unknown only when nothing could be told."""
        told = [m.verdict for m in self.measures if m.verdict != UNKNOWN]
        return max(told, key=_ORDER.index) if told else UNKNOWN

    def of(self, feature: str) -> tuple[Measure, ...]:
        """The measures of a feature."""
        return tuple(m for m in self.measures if m.feature == feature)

    def __str__(self) -> str:
        worst_first = sorted(self.measures, key=lambda m: -_ORDER.index(m.verdict))
        lines = [f"{m.verdict:7} {m.words}" for m in worst_first if m.verdict != PASS]
        passed = sum(m.verdict == PASS for m in self.measures)
        head = f"{self.verdict}: {self.current} ({self.rows[1]} rows) against {self.baseline} ({self.rows[0]} rows)"
        return "\n".join([head, *lines, f"{passed} of {len(self.measures)} measures pass"])

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "version": 1,
            "verdict": self.verdict,
            "baseline": self.baseline,
            "current": self.current,
            "rows": list(self.rows),
            "measures": [dataclasses.asdict(measure) for measure in self.measures],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Drift:
        """The comparison of JSON values."""
        measures = tuple(Measure(**measure) for measure in data["measures"])
        return cls(data["baseline"], data["current"], (data["rows"][0], data["rows"][1]), measures)


def compare(
    baseline: Statistics,
    current: Statistics,
    schema: Schema,
    *,
    names: tuple[str, str] = ("baseline", "current"),
    thresholds: Thresholds | None = None,
) -> Drift:
    """Measure each feature of the schema that both sides hold.

    Thresholds are the defaults, over them `thresholds`, and over these a feature's own in the schema.
    ValueError for thresholds that are none.
    """
    baseline.settle()
    current.settle()
    general = {name: dict(limits) for name, limits in DEFAULT_THRESHOLDS.items()}
    for name, limits in (thresholds or {}).items():
        if name not in MEASURES:
            raise ValueError(f"thresholds must be some of {', '.join(MEASURES)}, got {name!r}")
        check_limits(f"thresholds of {name}", limits)
        general[name].update(limits)
    measures: list[Measure] = []
    for feature in schema:
        old, new = baseline.features.get(feature.name), current.features.get(feature.name)
        if old is None or new is None:
            continue
        own = feature.drift or {}
        limits = {name: {**general[name], **own.get(name, {})} for name in MEASURES}
        measures += [_judged(feature.name, *found, limits) for found in _measure(old, new)]
    rows = (_rows(baseline), _rows(current))
    return Drift(*names, rows, tuple(measures))


def _rows(statistics: Statistics) -> int:
    return max((f.count for f in statistics.features.values()), default=0)


def _judged(
    feature: str,
    measure: str,
    value: float | None,
    words: str,
    limits: Mapping[str, Mapping[str, float | None]],
) -> Measure:
    warn, fail = limits[measure].get("warn"), limits[measure].get("fail")
    if value is None:
        return Measure(feature, measure, None, warn, fail, UNKNOWN, f"{feature}: {words}")
    value = round(value, 6)
    verdict, limit = PASS, None
    if fail is not None and value > fail:
        verdict, limit = FAIL, fail
    elif warn is not None and value > warn:
        verdict, limit = WARN, warn
    above = f", above {limit:g}" if limit is not None else ""
    return Measure(feature, measure, value, warn, fail, verdict, f"{feature}: {words}{above}")


Found = tuple[str, float | None, str]  # measure, value, words


def _measure(old: FeatureStatistics, new: FeatureStatistics) -> list[Found]:
    few = min(old.count, new.count)
    if few < LEAST_ROWS:
        return [("missing", None, f"{few} rows are too few to tell, {LEAST_ROWS} are wanted")]
    found = [_missing(old, new)]
    if not (old.detail and new.detail):
        return found
    if old.numeric and new.numeric:
        return [*found, *_numbers(old, new)]
    if old.feature.type == new.feature.type == "string":
        return [*found, *_texts(old, new)]
    return found


def _missing(old: FeatureStatistics, new: FeatureStatistics) -> Found:
    def share(side: FeatureStatistics) -> float:
        absent = side.missing + (0 if side.feature.shape else side.odd["nan"])
        return absent / side.count

    before, after = share(old), share(new)
    return "missing", abs(after - before), f"{after:.1%} missing, before {before:.1%}"


def _numbers(old: FeatureStatistics, new: FeatureStatistics) -> list[Found]:
    few = min(old.moments.n, new.moments.n)
    if few < LEAST_ROWS:
        return [("js", None, f"{few} values are too few to tell, {LEAST_ROWS} are wanted")]
    edges = _edges(old, new, max(5, min(_BINS, few // _A_BIN)))
    js = jensen_shannon(_shares(old, edges), _shares(new, edges))
    moved = f"mean {new.moments.mean:.4g}, before {old.moments.mean:.4g}"
    low, high = old.ranges["min"], old.ranges["max"]
    counts = new.numbers.below([low, np.nextafter(float(high), np.inf)])
    outside = float(counts[0] + new.moments.n - counts[1]) / new.moments.n
    span = f"{new.ranges['min']:g} to {new.ranges['max']:g}, before {low:g} to {high:g}"
    return [
        ("js", js, f"Jensen-Shannon divergence {js:.3f} ({moved})"),
        ("out_of_range", outside, f"{outside:.1%} outside the range before ({span})"),
    ]


def _edges(old: FeatureStatistics, new: FeatureStatistics, bins: int) -> np.ndarray:
    """Inner edges of bins that hold equal shares of both sides together."""
    values, weights, single = [], [], True
    for side in (old, new):
        low, high, counts = side.numbers.buckets()
        values.append(low / 2 + high / 2)
        weights.append(counts / counts.sum())
        single = single and side.numbers.exact
    points = np.concatenate(values)
    different = np.unique(points)
    if single and len(different) <= 2 * bins:
        return different[1:]
    order = np.argsort(points, kind="stable")
    total = np.cumsum(np.concatenate(weights)[order])
    at = np.searchsorted(total, np.arange(1, bins) * (2 / bins))
    return np.unique(points[order][np.minimum(at, len(points) - 1)])


def _shares(side: FeatureStatistics, edges: np.ndarray) -> np.ndarray:
    below = side.numbers.below(edges)
    return np.diff(np.concatenate([[0.0], below, [float(side.moments.n)]])) / side.moments.n


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    """The divergence of two distributions over the same bins, in bits: 0 to 1."""
    middle = (p + q) / 2

    def entropy(of: np.ndarray) -> float:
        some = of > 0
        return float(np.sum(of[some] * np.log2(of[some] / middle[some])))

    return min(1.0, max(0.0, (entropy(p) + entropy(q)) / 2))


def _texts(old: FeatureStatistics, new: FeatureStatistics) -> list[Found]:
    (before, unsure_before), (after, unsure_after) = old.frequent(), new.frequent()
    n, m = old.value_count, new.value_count
    if not n or not m:
        return [("linf", None, "no values to compare")]
    bounded = [side for side in (old, new) if side.values is not None and not side.values.exact]
    # Where counts are bounds, a share may be this much greater than what was counted.
    unsure = max(unsure_before / n, unsure_after / m)
    change = {v: after.get(v, 0) / m - before.get(v, 0) / n for v in sorted(before.keys() | after.keys())}
    most = max(change, key=lambda value: abs(change[value])) if change else ""
    by = change.get(most, 0.0)
    words = f"the share of {_quoted(most)} changed by {by:+.1%}" if most else "no value is frequent"
    if bounded:
        found = max(side.distinct_values() for side in bounded)
        words += f", give or take {unsure:.1%}: counts are bounds, of about {found} different values"
        if unsure > _MOST_UNSURE:
            return [("linf", None, f"too many different values to compare each, about {found}")]
    return [
        ("linf", max(0.0, abs(by) - unsure), words),
        _only_there("new_values", after, m, before, old, "new values{}", "in {:.1%} of rows"),
        _only_there("vanished_values", before, n, after, new, "values{} are gone,", "{:.1%} of rows before"),
    ]


def _only_there(
    measure: str,
    counts: Mapping[str, int],
    n: int,
    others: Mapping[str, int],
    other: FeatureStatistics,
    what: str,
    share: str,
) -> Found:
    """Values that one side has and the other lacks, which can be told only where the other counted all of its own."""
    if other.values is not None and not other.values.exact:
        return measure, None, f"too many different values to know all, about {other.distinct_values()}"
    lacking = [value for value in counts if value not in others]
    rows = sum(counts[value] for value in lacking) / n
    return measure, rows, f"{len(lacking)} {what.format(_names(lacking, counts))} {share.format(rows)}"


def _quoted(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:37] + "...")


def _names(values: list[str], counts: Mapping[str, int]) -> str:
    if not values:
        return ""
    most = sorted(values, key=lambda v: (-counts[v], v))[:_NAMED]
    more = ", ..." if len(values) > len(most) else ""
    return f" ({', '.join(map(_quoted, most))}{more})"


if __name__ == "__main__":
    from trainers.records.quality import main

    sys.exit(main())
