"""What a canary must show, and the verdict on what it showed; standard library only.

    Canary(share=0.1, min_requests=500, duration_s=900, max_error_rate=0.01, max_latency_ratio=1.5)

A verdict compares the candidate with `stable` over the same time. It is *pass*, *fail*, *unknown* (not enough
requests to say) or *waiting*; unknown is decided by `on_unknown`, and by default never promotes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.errors import ConfigInvalid

__all__ = ["FAIL", "PASS", "UNKNOWN", "WAITING", "Canary", "CanaryVerdict", "Counts", "judge"]

PASS, FAIL, UNKNOWN, WAITING = "pass", "fail", "unknown", "waiting"
_POLICIES = ("rollback", "promote")
# Three standard deviations: one false alarm in a thousand looks.
_Z = 3.0
_GROSS = 2.0


@dataclass(frozen=True)
class Canary:
    """How a candidate is tried on a share of the traffic before it is promoted; times in seconds.

    The candidate fails as soon as its error rate is surely above that of `stable` by `max_error_rate`, and at
    the end of `duration_s` when it is at all, or when its latency (at `quantile`) is over `max_latency_ratio`
    times that of `stable`. Below `min_requests` of either it is waited for up to `max_wait_s` in all (0: four
    times the duration); after that it is unknown, and `on_unknown` says "rollback" or "promote".
    """

    share: float = 0.1
    min_requests: int = 100
    duration_s: float = 600.0
    max_error_rate: float = 0.01
    max_latency_ratio: float = 2.0
    quantile: float = 0.95
    max_wait_s: float = 0.0
    on_unknown: str = "rollback"

    def __post_init__(self) -> None:
        for name, low, high in (("share", 0, 1), ("quantile", 0, 1)):
            if not low < getattr(self, name) < high:
                raise ConfigInvalid(
                    f"{name} of a canary must be between {low} and {high}, got {getattr(self, name)}"
                )
        if (
            isinstance(self.min_requests, bool)
            or not isinstance(self.min_requests, int)
            or self.min_requests < 1
        ):
            raise ConfigInvalid(f"min_requests of a canary must be 1 or more, got {self.min_requests!r}")
        if not 0 < self.duration_s < math.inf:
            raise ConfigInvalid(f"duration_s of a canary must be over 0, got {self.duration_s}")
        if not 0 <= self.max_error_rate < 1:
            raise ConfigInvalid(
                f"max_error_rate of a canary must be from 0 to below 1, got {self.max_error_rate}"
            )
        if not self.max_latency_ratio > 0:
            raise ConfigInvalid(f"max_latency_ratio of a canary must be over 0, got {self.max_latency_ratio}")
        if self.max_wait_s and self.max_wait_s < self.duration_s:
            raise ConfigInvalid(
                f"max_wait_s of a canary must be 0 or at least duration_s, got {self.max_wait_s}"
            )
        if self.on_unknown not in _POLICIES:
            raise ConfigInvalid(f"on_unknown of a canary must be one of {_POLICIES}, got {self.on_unknown!r}")

    @property
    def patience_s(self) -> float:
        """How long it is waited for requests in all."""
        return self.max_wait_s or 4 * self.duration_s

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Counts:
    """Requests of one side: how many, how many failed, and a histogram of latencies.

    `buckets` holds how many answers came within each upper bound (microseconds) and above the bound before.
    """

    requests: int = 0
    errors: int = 0
    buckets: Mapping[float, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        buckets = dict(self.buckets)
        for bound, count in other.buckets.items():
            buckets[bound] = buckets.get(bound, 0) + count
        return Counts(self.requests + other.requests, self.errors + other.errors, buckets)

    def since(self, before: Counts) -> Counts:
        """What was added; everything where the counter began anew, as that of a restarted server does."""
        if self.requests < before.requests or self.errors < before.errors:
            return self
        buckets = {b: max(0, count - before.buckets.get(b, 0)) for b, count in self.buckets.items()}
        return Counts(self.requests - before.requests, self.errors - before.errors, buckets)

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    def latency_us(self, quantile: float) -> float | None:
        """A quantile of the latency in microseconds, by interpolation within its bucket; None without answers."""
        total = sum(self.buckets.values())
        if not total:
            return None
        wanted, seen, low = quantile * total, 0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if seen + count >= wanted and count:
                high = bound if math.isfinite(bound) else low
                return low + (high - low) * (wanted - seen) / count
            seen += count
            low = bound if math.isfinite(bound) else low
        return low

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        buckets = {repr(bound): count for bound, count in self.buckets.items() if count}
        return {"requests": self.requests, "errors": self.errors, "buckets": buckets}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Counts:
        """Read back; ValueError for what is none."""
        try:
            buckets = {float(bound): int(count) for bound, count in document.get("buckets", {}).items()}
            return cls(int(document["requests"]), int(document["errors"]), buckets)
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"counts must have requests, errors and buckets: {e!r}") from e


@dataclass(frozen=True)
class CanaryVerdict:
    """What is to be said of a canary now: outcome, reasons in words, and the numbers they come from."""

    outcome: str
    reasons: tuple[str, ...]
    numbers: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """For XCom and the promotion log."""
        return {"outcome": self.outcome, "reasons": list(self.reasons), "numbers": dict(self.numbers)}


def judge(canary: Canary, stable: Counts, candidate: Counts, elapsed_s: float) -> CanaryVerdict:
    """Compare a candidate with `stable` after some time of both."""
    ours, theirs = candidate.latency_us(canary.quantile), stable.latency_us(canary.quantile)
    ratio = ours / theirs if ours is not None and theirs else None
    numbers = {
        "elapsed_s": round(elapsed_s, 1),
        "requests": candidate.requests,
        "errors": candidate.errors,
        "error_rate": round(candidate.error_rate, 6),
        "latency_ms": None if ours is None else round(ours / 1000, 3),
        "stable_requests": stable.requests,
        "stable_errors": stable.errors,
        "stable_error_rate": round(stable.error_rate, 6),
        "stable_latency_ms": None if theirs is None else round(theirs / 1000, 3),
        "latency_ratio": None if ratio is None else round(ratio, 3),
        "latency_quantile": canary.quantile,
    }
    enough = candidate.requests >= canary.min_requests and stable.requests >= canary.min_requests
    over = elapsed_s >= canary.duration_s
    limit = min(stable.error_rate + canary.max_error_rate, 1.0)
    rate = candidate.error_rate
    if _surely_above(candidate, limit) or (enough and over and rate > limit):
        return CanaryVerdict(
            FAIL,
            (
                f"{candidate.errors} of the candidate's {candidate.requests} requests failed ({rate:.2%}), "
                f"at stable {stable.error_rate:.2%}; {canary.max_error_rate:.2%} more are allowed",
            ),
            numbers,
        )
    worst = canary.max_latency_ratio * (1.0 if over else _GROSS)
    if enough and ratio is not None and ratio > worst:
        return CanaryVerdict(
            FAIL,
            (
                f"the candidate's latency at quantile {canary.quantile:g} is {numbers['latency_ms']} ms, "
                f"{ratio:.2f} times the {numbers['stable_latency_ms']} ms of stable; "
                f"{canary.max_latency_ratio:g} times are allowed",
            ),
            numbers,
        )
    counted = f"{candidate.requests} requests of the candidate and {stable.requests} of stable"
    if enough and over and ratio is not None:
        return CanaryVerdict(
            PASS, (f"{counted}, {rate:.2%} failed, latency {ratio:.2f} times that of stable",), numbers
        )
    if elapsed_s >= canary.patience_s:
        short = f"{counted} in {elapsed_s:.0f} s are not the {canary.min_requests} that a verdict needs"
        return CanaryVerdict(UNKNOWN, (short,), numbers)
    return CanaryVerdict(WAITING, (f"{counted} in {elapsed_s:.0f} s",), numbers)


def _surely_above(counts: Counts, limit: float) -> bool:
    """Whether the lower end of Wilson's interval of the error rate lies above a limit."""
    n = counts.requests
    if not counts.errors or not n:
        return False
    rate = counts.errors / n
    middle = rate + _Z * _Z / (2 * n)
    half = _Z * math.sqrt(rate * (1 - rate) / n + _Z * _Z / (4 * n * n))
    return (middle - half) / (1 + _Z * _Z / n) > limit
