"""What one metric must reach, and whether it does: the parts that the gate's verdict is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serving.errors import ConfigInvalid

__all__ = [
    "FAIL",
    "NON_INFERIOR",
    "PASS",
    "SIGNIFICANTLY_WORSE",
    "TESTS",
    "UNKNOWN",
    "VALUE",
    "Check",
    "Compared",
    "Limit",
    "check",
    "finite",
]

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"

VALUE, SIGNIFICANTLY_WORSE, NON_INFERIOR = "value", "significantly_worse", "non_inferior"
TESTS = (VALUE, SIGNIFICANTLY_WORSE, NON_INFERIOR)
"""How a drop is held against what is allowed: by its value; failing only when its whole interval lies beyond what is
allowed; or passing only when its whole interval lies within."""

_HAIR = 1e-12  # what adding and subtracting decimals leaves over


def finite(value: object) -> float | None:
    """A number, None for anything that is no finite one."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Limit:
    """What a metric must reach; None switches a part off.

    `least` is of one that is better when larger, `most` of one that is better when smaller; `max_drop` is how much
    worse than the champion's it may be, `max_drop_relative` the same as a share of the champion's.
    """

    least: float | None = None
    most: float | None = None
    max_drop: float | None = None
    max_drop_relative: float | None = None

    def __post_init__(self) -> None:
        for name in ("least", "most", "max_drop", "max_drop_relative"):
            value = getattr(self, name)
            if value is not None and finite(value) is None:
                raise ConfigInvalid(f"{_SAID.get(name, name)} must be a number or None, got {value!r}")
            if name.startswith("max_drop") and value is not None and value < 0:
                raise ConfigInvalid(f"{name} must be 0 or more, got {value}")

    @classmethod
    def of(cls, given: Mapping[str, Any], what: str) -> Limit:
        """Of {"min", "max", "max_drop", "max_drop_relative"}; `what` it is for is named in errors."""
        known = {
            "min": "least",
            "max": "most",
            "max_drop": "max_drop",
            "max_drop_relative": "max_drop_relative",
        }
        if not isinstance(given, Mapping) or not given or set(given) - set(known):
            raise ConfigInvalid(f"the limits of {what} must be some of {', '.join(known)}, got {given!r}")
        try:
            return cls(**{known[name]: value for name, value in given.items()})
        except ConfigInvalid as e:
            raise ConfigInvalid(f"of {what}, {e}") from e

    @property
    def compares(self) -> bool:
        """Whether it needs a champion's value."""
        return self.max_drop is not None or self.max_drop_relative is not None


_SAID = {"least": "min", "most": "max"}


class Compared(NamedTuple):
    """The champion's version and value, and the interval of the difference candidate - champion, if there is one."""

    version: Any
    value: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, champion: Any, metric: str, version: Any) -> Compared:
        """What a champion's part of an evaluation says of a metric."""
        said = champion if isinstance(champion, Mapping) else {}
        metrics, difference = said.get("metrics"), said.get("difference")
        found = difference.get(metric) if isinstance(difference, Mapping) else None
        low, high = (
            (finite(found.get(end)) for end in ("low", "high"))
            if isinstance(found, Mapping)
            else (None, None)
        )
        if low is None or high is None or low > high:
            low = high = None
        return cls(version, finite(metrics.get(metric)) if isinstance(metrics, Mapping) else None, low, high)

    def drop(self, value: float, smaller: bool) -> float | None:
        """By how much a value is worse; below 0 when it is better."""
        if self.value is None:
            return None
        return value - self.value if smaller else self.value - value

    def interval(self, smaller: bool) -> tuple[float, float] | None:
        """The interval of that drop."""
        if self.low is None or self.high is None:
            return None
        return (self.low, self.high) if smaller else (-self.high, -self.low)


class Check(NamedTuple):
    """One comparison: its outcome, the sentence that says why, and by how much a limit is passed over (0 if not)."""

    outcome: str
    words: str
    beyond: float = 0.0


def check(
    name: str, value: float, limit: Limit, champion: Compared | None, *, smaller: bool, test: str = VALUE
) -> list[Check]:
    """Hold a value against its limits, and against the champion's."""
    found = []
    bound = limit.most if smaller else limit.least
    if bound is not None:
        reached = value <= bound if smaller else value >= bound
        words = ("is within", "is above", "maximum") if smaller else ("reaches", "is below", "minimum")
        sentence = f"{name} {value:.4f} {words[0] if reached else words[1]} the {words[2]} {bound:.4f}"
        found.append(Check(PASS if reached else FAIL, sentence, 0.0 if reached else abs(value - bound)))
    if champion is None:
        return found
    if limit.max_drop is not None:
        found.append(_drop(name, value, champion, limit.max_drop, "", smaller, test))
    if limit.max_drop_relative is not None:
        allowed = limit.max_drop_relative * abs(champion.value or 0.0)
        share = f"{100 * limit.max_drop_relative:.4g} %, "
        found.append(_drop(name, value, champion, allowed, share, smaller, test))
    return found


def _drop(
    name: str, value: float, champion: Compared, allowed: float, share: str, smaller: bool, test: str
) -> Check:
    worse = champion.drop(value, smaller)
    if worse is None:
        return Check(UNKNOWN, f"the champion has no {name} to compare with")
    wrong_side, right_side = ("above", "below") if smaller else ("below", "above")
    side = right_side if worse < 0 else wrong_side
    sentence = f"{name} lies {abs(worse):.4f} {side} champion {champion.version} ({champion.value:.4f})"
    most = f"at most {share}{allowed:.4f} {wrong_side} is allowed"
    held = worse
    if test != VALUE:
        interval = champion.interval(smaller)
        if interval is None:
            return Check(UNKNOWN, f"{sentence}, and this difference has no interval to judge it by")
        held = interval[0] if test == SIGNIFICANTLY_WORSE else interval[1]
        sentence += f", in 95 % of resamples {interval[0]:+.4f} to {interval[1]:+.4f} worse"
    outcome = PASS if held <= allowed + _HAIR else FAIL
    return Check(outcome, f"{sentence}, {most}", 0.0 if outcome == PASS else held - allowed)
