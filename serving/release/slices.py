"""Whether a model keeps its limits in the slices of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from serving.release.limits import FAIL, PASS, UNKNOWN, Check, Compared, Limit, check, finite

__all__ = ["SliceLimits", "check_slices"]

_MOST_SAID = 5  # slices of which a verdict says a sentence each
_MOST_NAMED = 20


@dataclass(frozen=True)
class SliceLimits:
    """Limits of all slices and of single ones, and how many examples make a slice count."""

    general: Limit
    own: Mapping[str, Limit]
    least: int
    skip_small: bool = True

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.general != Limit() or bool(self.own)

    def of(self, name: str) -> Limit:
        """A slice's own limits, and the general ones where it has none."""
        own = {key: value for key, value in asdict(self.own.get(name, Limit())).items() if value is not None}
        return replace(self.general, **own)


def check_slices(
    given: Any, limits: SliceLimits, champion: Any, *, metric: str, smaller: bool, test: str
) -> tuple[list[Check], dict[str, Any] | None]:
    """What is to be said of an evaluation's slices, the worst first, and the numbers; None without limits."""
    if not limits:
        return [], None
    rows = [row for row in given if isinstance(row, Mapping)] if isinstance(given, (list, tuple)) else []
    missing = sorted(set(limits.own) - {str(row.get("slice")) for row in rows})
    unknown = [Check(UNKNOWN, f"the evaluation has no slice {name}") for name in missing]
    bad: list[tuple[str, Check]] = []
    judged = small = 0
    for row in rows:
        name = str(row.get("slice"))
        limit = limits.of(name)
        if limit == Limit():
            continue
        if not _enough(row.get("examples"), limits.least):
            small += 1
            if not limits.skip_small or name in limits.own:
                few = f"slice {name} has {row.get('examples')} examples, {limits.least} are needed"
                unknown.append(Check(UNKNOWN, few))
            continue
        judged += 1
        for found in _of_slice(row, name, limit, champion, metric, smaller, test):
            if found.outcome == UNKNOWN:
                unknown.append(found)
            elif found.outcome == FAIL:
                bad.append((name, found))
    if not judged and not unknown:
        none = (
            f"no slice has the {limits.least} examples that are needed"
            if rows
            else "the evaluation has no slices"
        )
        unknown.append(Check(UNKNOWN, f"{none}, and thresholds speak of slices"))
    bad.sort(key=lambda pair: -pair[1].beyond)
    failed = list(dict.fromkeys(name for name, _ in bad))
    numbers = {"judged": judged, "too_small": small, "failed": failed[:_MOST_NAMED]}
    checks = [found for _, found in bad[:_MOST_SAID]] + unknown[:_MOST_SAID]
    if len(bad) > _MOST_SAID:
        checks.append(Check(FAIL, f"{len(bad) - _MOST_SAID} more limits of slices are not kept"))
    if not bad and not unknown:
        kept = "1 slice keeps its limits" if judged == 1 else f"{judged} slices keep their limits"
        few = f", {small} more have fewer than {limits.least} examples" if small else ""
        checks.append(Check(PASS, f"{kept}{few}"))
    return checks, numbers


def _enough(examples: object, least: int) -> bool:
    return isinstance(examples, int) and not isinstance(examples, bool) and examples >= least


def _of_slice(
    row: Mapping[str, Any], name: str, limit: Limit, champion: Any, metric: str, smaller: bool, test: str
) -> Iterator[Check]:
    metrics = row.get("metrics")
    value = finite(metrics.get(metric)) if isinstance(metrics, Mapping) else None
    if value is None:
        yield Check(UNKNOWN, f"slice {name} has no {metric}")
        return
    compared = None
    if champion is not None:
        version = champion.get("version") if isinstance(champion, Mapping) else None
        compared = Compared.of(row.get("champion"), metric, version)
    for found in check(metric, value, limit, compared, smaller=smaller, test=test):
        yield found._replace(words=f"in slice {name} {found.words}")
