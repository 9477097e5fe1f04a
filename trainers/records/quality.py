"""What lies beside a manifest to judge a dataset by: drift.json against a baseline, and report.html for people."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainers.job.errors import ConfigError, TrainyardError
from trainers.job.failures import exit_code_of
from trainers.job.files import read_json, write_bytes, write_json
from trainers.records.drift import FAIL, Drift, DriftFailed, Thresholds, compare
from trainers.records.errors import DatasetMissing, RecordsError
from trainers.records.manifest import MANIFEST, QUARANTINE, STATISTICS, Manifest
from trainers.records.report import Side, render
from trainers.records.schema import Schema
from trainers.records.statistics import Statistics
from trainers.records.validate import worst_reasons

__all__ = ["DRIFT", "REPORT", "Known", "baseline_of", "check", "main", "recheck", "statistics_of"]

DRIFT = "drift.json"
REPORT = "report.html"


class Known(NamedTuple):
    """A side of a comparison: its name, its schema, and its statistics a split."""

    name: str
    schema: Schema
    splits: Mapping[str, Statistics]

    def whole(self) -> Statistics:
        """Statistics of all splits together."""
        found = Statistics(self.schema)
        for split in self.splits.values():
            found.merge(split.state())
        return found


def statistics_of(manifest: Manifest) -> Known:
    """The statistics of a dataset; DatasetMissing when it was made before they were kept."""
    states = read_json(manifest.folder / STATISTICS)
    if states is None:
        raise DatasetMissing(
            f"no statistics at {manifest.folder / STATISTICS}",
            hint="prepare that dataset again, it is an old one",
        )
    schema = manifest.schema()
    name = f"{manifest.name} {manifest.span or manifest.folder.name}"
    splits = {
        s: Statistics.from_state(schema, state) for s, state in states.items() if manifest.counts.get(s)
    }
    return Known(name, schema, splits)


def baseline_of(baseline: str, output: Path, span: str) -> Manifest | None:
    """The manifest that `prepare(baseline=...)` names; "previous" is the span before this one, if there is one."""
    if not baseline:
        return None
    if baseline != "previous":
        return Manifest.load(baseline)
    from trainers.records.spans import spans

    before = [found for found in spans(output) if found.span < span]
    return Manifest.load(output / before[-1].folder) if before else None


def check(
    folder: Path, known: Known, counts: Mapping[str, int], quarantined: int, baseline: Manifest | None
) -> Drift | None:
    """Write the report, and the drift from the baseline where there is one; DriftFailed where a threshold says so.

    Both files are there also when it fails, to look at.
    """
    before = statistics_of(baseline) if baseline is not None else None
    drift = None
    if before is not None:
        drift = compare(before.whole(), known.whole(), known.schema, names=(before.name, known.name))
        write_json(folder / DRIFT, {**drift.to_dict(), "digest": baseline.digest if baseline else ""})
    # A window of spans has no quarantine of its own.
    there = quarantined and (folder / QUARANTINE).exists()
    refused = worst_reasons(folder / QUARANTINE, 20) if there else []
    sides = [Side(split, statistics) for split, statistics in known.splits.items()]
    previous = Side(before.name, before.whole()) if before is not None else None
    page = render(known.name, known.schema, counts, sides, previous, drift, quarantined, refused)
    write_bytes(folder / REPORT, page.encode())
    if drift is not None and drift.verdict == FAIL:
        raise DriftFailed(drift)
    return drift


def recheck(manifest: Manifest, baseline: Manifest | None) -> Drift | None:
    """The same for a dataset that is there already, unless it was done for this baseline."""
    done = read_json(manifest.folder / DRIFT)
    same = done is not None and baseline is not None and done.get("digest") == baseline.digest
    if baseline is None or same:
        if done is not None and same and done.get("verdict") == FAIL:
            raise DriftFailed(Drift.from_dict(done))
        return Drift.from_dict(done) if done is not None and same else None
    return check(manifest.folder, statistics_of(manifest), manifest.counts, manifest.quarantined, baseline)


def rows_of(source: str, schema: Schema) -> Known:
    """Statistics of a file or folder of rows, as a schema has them; columns that it lacks are left out."""
    from trainers.records.source import list_files
    from trainers.records.tables import Table
    from trainers.records.validate import clean

    kind, files = list_files(Path(source), lambda line: None)
    if kind == "images":
        raise ConfigError(f"{source} holds pictures", hint="give rows as Parquet, CSV or JSON Lines")
    table = Table(Path(source), files, kind)
    there = set(table.infer().names)
    held = [feature for feature in schema if feature.name in there]
    if not held:
        raise ConfigError(
            f"{source} has none of the columns {', '.join(schema.names)}", hint="name other rows"
        )
    part = Schema(tuple(held))
    found = Statistics(part)
    for batch in table.read(0, 1, part, 8192):
        data, _ = clean(batch, part, ())
        if data.num_rows:
            found.add(data)
    return Known(source, part, {"rows": found})


def _side(path: str, schema: Schema | None) -> Known | None:
    """A side of the command line: a dataset, or rows once the other side's schema is known."""
    place = Path(path.removeprefix("file://"))
    if place.name == MANIFEST or (place / MANIFEST).exists():
        return statistics_of(Manifest.load(place))
    return rows_of(str(place), schema) if schema is not None else None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of records.drift."""
    parser = argparse.ArgumentParser(
        prog="python -m trainers.records.drift", description="Compare two datasets."
    )
    parser.add_argument("baseline", help="a dataset, or rows")
    parser.add_argument("current", help="a dataset, or rows")
    parser.add_argument("--thresholds", help="a JSON file: {measure: {warn, fail}}")
    parser.add_argument("--json", action="store_true", help="print the measures as JSON")
    asked = parser.parse_args(arguments)
    try:
        drift = _compared(asked.baseline, asked.current, asked.thresholds)
    except TrainyardError as e:
        print(e, file=sys.stderr)
        return exit_code_of(e.failure_class)
    print(json.dumps(drift.to_dict(), indent=1) if asked.json else drift)
    return exit_code_of(RecordsError.failure_class) if drift.verdict == FAIL else 0


def _compared(baseline: str, current: str, thresholds: str | None) -> Drift:
    limits: Thresholds | None = None
    if thresholds:
        try:
            limits = json.loads(Path(thresholds).read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"{thresholds} holds no thresholds: {e}", hint="give a JSON file") from e
    after = _side(current, None)
    before = _side(baseline, after.schema if after else None)
    if before is None:
        raise ConfigError("neither side is a dataset", hint="give at least one manifest, for its schema")
    after = after or _side(current, before.schema)
    assert after is not None
    try:
        names = (before.name, after.name)
        return compare(before.whole(), after.whole(), after.schema, names=names, thresholds=limits)
    except ValueError as e:
        raise ConfigError(str(e)) from e
