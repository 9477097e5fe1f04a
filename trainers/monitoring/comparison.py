"""Statistics of logged requests beside those of the records that a version was trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import DataError
from trainers.monitoring.predictions import Answers, baseline
from trainers.monitoring.requests import Counts, count_requests, watched
from trainers.records.drift import Drift, compare
from trainers.records.limits import MEASURES
from trainers.records.quality import statistics_of
from trainers.records.report import Side, render
from trainers.records.schema import Feature, Schema
from trainers.records.statistics import Statistics

if TYPE_CHECKING:
    from trainers.monitor import Options
    from trainers.records.manifest import Manifest
    from trainers.released import Released

__all__ = ["Comparison"]


class NothingToWatch(DataError):
    """A version takes none of the features of the records that it was trained on."""

    code = "monitor.nothing_to_watch"


class Comparison:
    """Counts the requests of one version, and compares windows of them."""

    def __init__(self, options: Options, released: Released, manifest: Manifest, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        known = statistics_of(manifest)
        found = watched(known.schema, manifest.label, list(released.inputs()))
        if found is None:
            raise NothingToWatch(
                f"version {released.version} of {released.name} takes no feature of its records"
            )
        self.features = found
        self.options = options
        self._released = released
        self._train = known.splits.get("train") or known.whole()
        self._answers = baseline(released, manifest, place / "baseline.json")
        self._name = f"{manifest.name} {manifest.span or manifest.folder.name}"

    def count(self, files: Sequence[Path]) -> dict[str, Any]:
        """What a part holds, but for its files."""
        counts, statistics = Counts(), Statistics(self.features)
        answers = Answers.of(self._released)
        count_requests(files, self.features, statistics, answers, counts)
        out = {"counts": dataclasses.asdict(counts), "features": statistics.state()}
        return {**out, "answers": answers.statistics.state() if answers else {}}

    def compare(self, window: Mapping[str, Mapping[str, Any]]) -> tuple[Drift, int, str]:
        """The drift of some parts together, their rows, and the report as HTML."""
        now, before = Statistics(self.features), Statistics(self.features)
        for name, feature in before.features.items():
            feature.merge(self._train.features[name].state())
        answers = Answers.of(self._released) if self._answers else None
        odd, reasons = 0, {}
        for part in window.values():
            now.merge({name: state for name, state in part["features"].items() if name in now.features})
            if answers is not None:
                answers.statistics.merge(
                    {n: s for n, s in part["answers"].items() if n in answers.statistics.features}
                )
            odd += part["counts"]["odd_rows"] + part["counts"]["odd_requests"]
            for reason, number in part["counts"]["reasons"].items():
                reasons[reason] = reasons.get(reason, 0) + number
        features: list[Feature] = list(self.features)
        if answers is not None and self._answers is not None:
            features += list(answers.schema)
            now.features |= answers.statistics.features
            before.features |= self._answers.statistics.features
        schema = Schema(tuple(self._limited(feature) for feature in features))
        rows = max((f.count for f in now.features.values()), default=0)
        title = f"{self._released.name} version {self._released.version}: requests"
        general = {k: v for k, v in self.options.thresholds.items() if k in MEASURES}
        drift = compare(before, now, schema, names=(self._name, title), thresholds=general)
        refused = [
            (reason, number, reason) for reason, number in sorted(reasons.items(), key=lambda i: -i[1])
        ]
        sides = [Side("requests", now)]
        page = render(title, schema, {"requests": rows}, sides, Side(self._name, before), drift, odd, refused)
        return drift, rows, page

    def _limited(self, feature: Feature) -> Feature:
        """The feature with the thresholds that are said for it."""
        own = self.options.thresholds.get(feature.name)
        return (
            feature if own is None else dataclasses.replace(feature, drift={**(feature.drift or {}), **own})
        )
