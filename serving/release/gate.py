"""The gate between an evaluated model and its release: pass, fail or unknown.

    verdict = decide(evaluation, Thresholds(min_accuracy=0.95, max_drop=0.005))
    verdict.outcome      "pass", "fail" or "unknown"; only "pass" may be deployed
    verdict.words()      one sentence for people

What can't be judged (a metric that is missing or NaN, too few examples) is unknown, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from serving.errors import ConfigInvalid

__all__ = [
    "ERRORS",
    "FAIL",
    "LARGER",
    "PASS",
    "SMALLER",
    "UNKNOWN",
    "Override",
    "Thresholds",
    "Verdict",
    "decide",
    "override",
]

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"
_OUTCOMES = (PASS, FAIL, UNKNOWN)
LARGER, SMALLER = "larger", "smaller"
ERRORS = frozenset({"loss", "mae", "mse", "rmse"})
"""Metrics that are better when smaller."""


@dataclass(frozen=True)
class Thresholds:
    """What a model must reach.

    `min_accuracy` is the least value of a `metric` that is better when larger, `max_error` the greatest of one that
    is better when smaller, `max_drop` how much worse than the champion's it may be, `min_examples` how many examples
    make an evaluation count. None switches one off. `better` is "larger" or "smaller"; "" goes by the metric's name:
    losses and errors (loss, mae, mse, rmse) are better when smaller.
    """

    min_accuracy: float | None = 0.9
    max_drop: float | None = 0.01
    min_examples: int = 100
    metric: str = "accuracy"
    max_error: float | None = None
    better: str = ""

    @property
    def smaller_is_better(self) -> bool:
        """Whether a smaller value of the metric is better."""
        return self.better == SMALLER or (not self.better and self.metric in ERRORS)

    def __post_init__(self) -> None:
        for name in ("min_accuracy", "max_drop", "max_error"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not math.isfinite(value)):
                raise ConfigInvalid(f"{name} must be a number or None, got {value!r}")
        if self.max_drop is not None and self.max_drop < 0:
            raise ConfigInvalid(f"max_drop must be 0 or more, got {self.max_drop}")
        if (
            isinstance(self.min_examples, bool)
            or not isinstance(self.min_examples, int)
            or self.min_examples < 1
        ):
            raise ConfigInvalid(
                f"min_examples must be a whole number of 1 or more, got {self.min_examples!r}"
            )
        if self.better not in ("", LARGER, SMALLER):
            raise ConfigInvalid(f"better must be {LARGER}, {SMALLER} or empty, got {self.better!r}")
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigInvalid(f"metric must be a metric's name, got {self.metric!r}")


@dataclass(frozen=True)
class Override:
    """A person's decision against the gate."""

    outcome_before: str
    reason: str
    author: str


@dataclass(frozen=True)
class Verdict:
    """The gate's decision, the sentences that say why, and the numbers they speak of."""

    outcome: str
    reasons: tuple[str, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    override: Override | None = None

    def __post_init__(self) -> None:
        if self.outcome not in _OUTCOMES:
            raise ConfigInvalid(f"outcome must be one of {', '.join(_OUTCOMES)}, got {self.outcome!r}")

    @property
    def deployable(self) -> bool:
        """Only a pass is."""
        return self.outcome == PASS

    def words(self) -> str:
        """One line for people: the outcome and its reasons."""
        return f"{self.outcome}: {'; '.join(self.reasons)}"

    def to_json(self) -> dict[str, Any]:
        """A small JSON value."""
        return {
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "numbers": dict(self.numbers),
            "override": None if self.override is None else asdict(self.override),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Verdict:
        """The verdict of `to_json`; raises ConfigInvalid."""
        try:
            given = document.get("override")
            return cls(
                document["outcome"],
                tuple(map(str, document["reasons"])),
                dict(document.get("numbers") or {}),
                Override(**given) if given else None,
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ConfigInvalid(f"a gate's verdict must have outcome and reasons: {e!r}") from e


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metric(metrics: object, name: str) -> float | None:
    value = metrics.get(name) if isinstance(metrics, Mapping) else None
    return float(value) if _is_number(value) and math.isfinite(value) else None


def decide(evaluation: Mapping[str, Any], thresholds: Thresholds) -> Verdict:
    """Judge an evaluation: {"metrics": {...}, "examples": n, "champion": None or {"version", "metrics"}}."""
    name = thresholds.metric
    value = _metric(evaluation.get("metrics"), name)
    examples = evaluation.get("examples")
    champion = evaluation.get("champion") or None
    champion_value = _metric(champion.get("metrics"), name) if isinstance(champion, Mapping) else None
    smaller = thresholds.smaller_is_better
    worse = None  # by how much than the champion
    if value is not None and champion_value is not None:
        worse = value - champion_value if smaller else champion_value - value
    numbers = {
        "metric": name,
        "value": value,
        "examples": examples,
        "better": SMALLER if smaller else LARGER,
        "min": None if smaller else thresholds.min_accuracy,
        "max": thresholds.max_error if smaller else None,
        "min_examples": thresholds.min_examples,
        "max_drop": thresholds.max_drop,
        "champion_version": champion.get("version") if isinstance(champion, Mapping) else None,
        "champion_value": champion_value,
        "drop": worse,
    }
    unknowns = _unknowns(evaluation, thresholds, value, champion, champion_value)
    if unknowns:
        return Verdict(UNKNOWN, tuple(unknowns), numbers)
    good, bad = [], []
    limit = thresholds.max_error if smaller else thresholds.min_accuracy
    if limit is not None:
        reached = value <= limit if smaller else value >= limit
        words = ("is within", "is above", "maximum") if smaller else ("reaches", "is below", "minimum")
        (good if reached else bad).append(
            f"{name} {value:.4f} {words[0] if reached else words[1]} the {words[2]} {limit:.4f}"
        )
    if champion is None:
        good.append("there is no champion to compare with")
    elif thresholds.max_drop is not None:
        # A hair's breadth for what adding and subtracting decimals leaves over.
        allowed = worse <= thresholds.max_drop + 1e-12
        wrong_side, right_side = ("above", "below") if smaller else ("below", "above")
        side = right_side if worse < 0 else wrong_side
        sentence = f"{abs(worse):.4f} {side} champion {champion.get('version')} ({champion_value:.4f})"
        most = f"at most {thresholds.max_drop:.4f} {wrong_side} is allowed"
        (good if allowed else bad).append(f"{name} lies {sentence}, {most}")
    if bad:
        return Verdict(FAIL, tuple(bad), numbers)
    return Verdict(PASS, (*good, f"judged on {examples} examples"), numbers)


def _unknowns(
    evaluation: Mapping[str, Any],
    thresholds: Thresholds,
    value: float | None,
    champion: Any,
    champion_value: float | None,
) -> list[str]:
    reasons = []
    if value is None:
        reasons.append(f"metric {thresholds.metric} is missing from the evaluation, or not a finite number")
    examples = evaluation.get("examples")
    if isinstance(examples, bool) or not isinstance(examples, int):
        reasons.append(f"the evaluation does not say on how many examples it was made, got {examples!r}")
    elif examples < thresholds.min_examples:
        reasons.append(f"{examples} examples are too few, {thresholds.min_examples} are needed")
    if champion is not None and champion_value is None and thresholds.max_drop is not None:
        reasons.append(f"the champion has no {thresholds.metric} to compare with")
    return reasons


def override(verdict: Verdict, reason: str, author: str) -> Verdict:
    """Let a model pass against the gate; the reason and its author go into the promotion log."""
    if not reason.strip():
        raise ConfigInvalid("an override must have a reason, got none")
    if not author.strip():
        raise ConfigInvalid("an override must have an author, got none")
    if verdict.deployable:
        return verdict
    decision = Override(verdict.outcome, reason.strip(), author.strip())
    words = f"{decision.author} overrides {verdict.outcome}: {decision.reason}"
    return replace(verdict, outcome=PASS, reasons=(words, *verdict.reasons), override=decision)
