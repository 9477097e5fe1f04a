"""The gate between an evaluated model and its release: pass, fail or unknown.

    verdict = decide(evaluation, Thresholds(min_accuracy=0.95, max_drop=0.005, slice_min=0.9))
    verdict.outcome      "pass", "fail" or "unknown"; only "pass" may be deployed
    verdict.words()      one sentence for people

What can't be judged (a metric that is missing or NaN, too few examples, a champion without numbers, slices that are
not there) is unknown, never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.errors import ConfigInvalid
from serving.release.limits import FAIL, PASS, TESTS, UNKNOWN, VALUE, Check, Compared, Limit, check, finite
from serving.release.slices import SliceLimits, check_slices
from serving.release.verdict import Approval, Override, Verdict, override

__all__ = [
    "ERRORS",
    "FAIL",
    "LARGER",
    "PASS",
    "SMALLER",
    "UNKNOWN",
    "Approval",
    "Override",
    "Thresholds",
    "Verdict",
    "decide",
    "override",
]

LARGER, SMALLER = "larger", "smaller"
ERRORS = frozenset(
    {"loss", "mae", "mse", "rmse", "median_absolute_error", "mape", "log_loss", "brier", "ece"}
)
"""Metrics that are better when smaller."""

_UNKNOWN, _IGNORE = "unknown", "ignore"
_SKIP = "skip"


@dataclass(frozen=True)
class Thresholds:
    """What a model must reach. None switches a limit off.

    `min_accuracy` is the least value of a `metric` that is better when larger, `max_error` the greatest of one that
    is better when smaller; `max_drop` is how much worse than the champion's it may be, `max_drop_relative` the same
    as a share of the champion's; `min_examples` is how many examples make an evaluation count. `better` is "larger"
    or "smaller"; "" goes by the metric's name: losses and errors are better when smaller.

    `drop_test` says how a drop is held against what is allowed: "value" takes it as it is, "significantly_worse"
    fails only when its whole paired interval lies beyond, "non_inferior" passes only when all of it lies within.
    `champion_unusable` is "unknown", or "ignore" to judge by thresholds alone where the champion has no numbers.

    `slice_min` or `slice_max`, `slice_max_drop` and `slice_max_drop_relative` hold in each slice of the evaluation
    that has `slice_min_examples`; smaller ones are skipped, or make the verdict unknown with
    `small_slices="unknown"`. `slices` has limits of single slices, `also` of other metrics:
    {"carrier=UA": {"min": 0.8}}, {"ece": {"max": 0.05, "max_drop": 0.01}}; keys are min, max, max_drop and
    max_drop_relative.
    """

    min_accuracy: float | None = 0.9
    max_drop: float | None = 0.01
    min_examples: int = 100
    metric: str = "accuracy"
    max_error: float | None = None
    better: str = ""
    max_drop_relative: float | None = None
    drop_test: str = VALUE
    champion_unusable: str = _UNKNOWN
    slice_min: float | None = None
    slice_max: float | None = None
    slice_max_drop: float | None = None
    slice_max_drop_relative: float | None = None
    slice_min_examples: int = 30
    small_slices: str = _SKIP
    slices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    also: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def smaller_is_better(self) -> bool:
        """Whether a smaller value of the metric is better."""
        return self.better == SMALLER or (not self.better and self.metric in ERRORS)

    @property
    def limit(self) -> Limit:
        """The limits of the metric over all examples."""
        return Limit(self.min_accuracy, self.max_error, self.max_drop, self.max_drop_relative)

    @property
    def slice_limit(self) -> Limit:
        """The limits of the metric in each slice."""
        return Limit(self.slice_min, self.slice_max, self.slice_max_drop, self.slice_max_drop_relative)

    def __post_init__(self) -> None:
        for name in (
            *("min_accuracy", "max_error", "max_drop", "max_drop_relative"),
            *("slice_min", "slice_max", "slice_max_drop", "slice_max_drop_relative"),
        ):
            _check_limit(name, getattr(self, name))
        for name in ("min_examples", "slice_min_examples"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigInvalid(f"{name} must be a whole number of 1 or more, got {value!r}")
        if self.better not in ("", LARGER, SMALLER):
            raise ConfigInvalid(f"better must be {LARGER}, {SMALLER} or empty, got {self.better!r}")
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigInvalid(f"metric must be a metric's name, got {self.metric!r}")
        for name, known in (
            ("drop_test", TESTS),
            ("champion_unusable", (_UNKNOWN, _IGNORE)),
            ("small_slices", (_SKIP, _UNKNOWN)),
        ):
            if getattr(self, name) not in known:
                raise ConfigInvalid(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("slices", "also"):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise ConfigInvalid(f"{name} must map names to limits, got {given!r}")
            for what, limits in given.items():
                Limit.of(limits, str(what))


def _check_limit(name: str, value: object) -> None:
    number = finite(value)
    if value is not None and number is None:
        raise ConfigInvalid(f"{name} must be a number or None, got {value!r}")
    if "max_drop" in name and number is not None and number < 0:
        raise ConfigInvalid(f"{name} must be 0 or more, got {value}")


def decide(evaluation: Mapping[str, Any], thresholds: Thresholds) -> Verdict:
    """Judge an evaluation: {"metrics", "examples", "champion": None or {"version", "metrics", "difference"}, "slices"}.

    "difference" (the paired intervals) and "slices" are only asked for where thresholds need them; evaluation.json
    holds both.
    """
    name, smaller = thresholds.metric, thresholds.smaller_is_better
    champion, notes = _champion(evaluation, thresholds)
    value = _metric(evaluation.get("metrics"), name)
    compared = None if champion is None else Compared.of(champion, name, _version(champion))
    numbers: dict[str, Any] = {
        "metric": name,
        "value": value,
        "examples": finite(evaluation.get("examples")) and evaluation["examples"],
        "better": SMALLER if smaller else LARGER,
        "min": None if smaller else thresholds.min_accuracy,
        "max": thresholds.max_error if smaller else None,
        "min_examples": thresholds.min_examples,
        "max_drop": thresholds.max_drop,
        "max_drop_relative": thresholds.max_drop_relative,
        "drop_test": thresholds.drop_test,
        "champion_version": _version(evaluation.get("champion")),
        "champion_value": compared and compared.value,
        "drop": None if compared is None or value is None else compared.drop(value, smaller),
        "drop_interval": compared and compared.interval(smaller),
    }
    checks = [Check(UNKNOWN, words) for words in _too_little(evaluation, thresholds, value)]
    for metric, limit in {name: thresholds.limit, **_limits(thresholds.also)}.items():
        found = _metric(evaluation.get("metrics"), metric)
        if found is None and metric != name:
            checks.append(
                Check(UNKNOWN, f"metric {metric} is missing from the evaluation, or not a finite number")
            )
        elif found is None:
            checks += [c for c in _lost(metric, limit, champion) if compared is not None]
        else:
            other = None if champion is None else Compared.of(champion, metric, _version(champion))
            down = smaller if metric == name else metric in ERRORS
            checks += check(metric, found, limit, other, smaller=down, test=thresholds.drop_test)
    unknown = [c.words for c in checks if c.outcome == UNKNOWN]
    if unknown:
        return Verdict(UNKNOWN, tuple(unknown), numbers)
    in_slices, numbers["slices"] = check_slices(
        evaluation.get("slices"),
        SliceLimits(
            thresholds.slice_limit,
            _limits(thresholds.slices),
            thresholds.slice_min_examples,
            skip_small=thresholds.small_slices == _SKIP,
        ),
        champion,
        metric=name,
        smaller=smaller,
        test=thresholds.drop_test,
    )
    bad = [c.words for c in (*checks, *in_slices) if c.outcome == FAIL]
    if bad:
        return Verdict(FAIL, tuple(bad), numbers)
    unknown = [c.words for c in in_slices if c.outcome == UNKNOWN]
    if unknown:
        return Verdict(UNKNOWN, tuple(unknown), numbers)
    good = [c.words for c in (*checks, *in_slices)] + notes
    return Verdict(PASS, (*good, f"judged on {evaluation.get('examples')} examples"), numbers)


def _champion(evaluation: Mapping[str, Any], thresholds: Thresholds) -> tuple[Any, list[str]]:
    """The champion to compare with, None for none; and what is to be said of it."""
    champion = evaluation.get("champion") or None
    if champion is None:
        return None, ["there is no champion to compare with"]
    usable = (
        isinstance(champion, Mapping) and isinstance(champion.get("metrics"), Mapping) and champion["metrics"]
    )
    if not usable and thresholds.champion_unusable == _IGNORE:
        why = f": {champion['error']}" if isinstance(champion, Mapping) and champion.get("error") else ""
        return None, [f"champion {_version(champion)} can't be compared with, which is ignored{why}"]
    return champion, []


def _version(champion: Any) -> Any:
    return champion.get("version") if isinstance(champion, Mapping) else None


def _metric(metrics: object, name: str) -> float | None:
    return finite(metrics.get(name)) if isinstance(metrics, Mapping) else None


def _limits(given: Mapping[str, Mapping[str, float]]) -> dict[str, Limit]:
    return {name: Limit.of(limits, name) for name, limits in given.items()}


def _lost(metric: str, limit: Limit, champion: Any) -> list[Check]:
    """What is said of a champion where the candidate has no number itself."""
    compared = Compared.of(champion, metric, None)
    if compared.value is None and limit.compares:
        return [Check(UNKNOWN, f"the champion has no {metric} to compare with")]
    return []


def _too_little(evaluation: Mapping[str, Any], thresholds: Thresholds, value: float | None) -> list[str]:
    reasons = []
    if value is None:
        reasons.append(f"metric {thresholds.metric} is missing from the evaluation, or not a finite number")
    examples = evaluation.get("examples")
    if isinstance(examples, bool) or not isinstance(examples, int):
        reasons.append(f"the evaluation does not say on how many examples it was made, got {examples!r}")
    elif examples < thresholds.min_examples:
        reasons.append(f"{examples} examples are too few, {thresholds.min_examples} are needed")
    return reasons
