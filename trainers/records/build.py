"""From raw data to a published dataset.

List and hash the files, look whether this very dataset is there already, cut the source into units, write each
unit's shards, and publish: the schema, the quarantine, and last the manifest. Every file comes into its place
by one rename.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainers.job.files import sync_path, write_bytes, write_json
from trainers.records.drift import Drift
from trainers.records.errors import (
    ColumnError,
    SourceEmpty,
)
from trainers.records.layout import BlockShape
from trainers.records.manifest import (
    MANIFEST,
    QUARANTINE,
    SCHEMA,
    SPLITS,
    STATISTICS,
    Manifest,
    Shard,
    content_digest,
    counts_of,
    raw_of,
)
from trainers.records.options import CODE_VERSION, Options, fingerprint
from trainers.records.publishing import Prepared, Progress, publishing
from trainers.records.quality import Known, baseline_of, check, recheck
from trainers.records.schema import Feature, Schema
from trainers.records.source import SPEAK_EVERY, Source, SourceFile, list_files
from trainers.records.statistics import Statistics, domain_of
from trainers.records.units import Unit, UnitResult
from trainers.records.validate import check_threshold, merge
from trainers.records.workers import Work, processes_for, write
from trainers.records.write import temp_path

__all__ = ["Build", "Listing", "build", "judged", "look", "prepare"]


class Listing(NamedTuple):
    """What a source holds, the fingerprint of the dataset that it makes, and that dataset's folder."""

    kind: str
    files: Sequence[SourceFile]
    fingerprint: str
    folder: Path


def prepare(
    source: str | Path,
    output: str | Path,
    *,
    name: str,
    label: str,
    key: str | None = None,
    eval_fraction: float = 0.2,
    shards: int = 2,
    image: str = "raw",
    quarantine_threshold: float = 0.01,
    batch_rows: int = 8192,
    schema: str | Path | None = None,
    span: str = "",
    compression: str = "",
    format: Mapping[str, Any] | None = None,
    partitions: Mapping[str, Any] | None = None,
    split: Mapping[str, Any] | None = None,
    checks: str | Sequence[str] = (),
    statistics: bool = True,
    layout: str = "rows",
    block_rows: int = 1024,
    processes: int | None = None,
    baseline: str | Path = "",
    progress: Progress = print,
) -> Manifest:
    """Turn raw data into a dataset of TFRecords at `output`/<fingerprint>/, or find it there.

    Args:
        source: a path, a path with wildcards, or a URL: a folder of pictures in class folders, files of
            Parquet, CSV or JSON Lines, pairs of NumPy or IDX arrays, or TFRecords.
        output: the folder of all versions of this dataset.
        label: the label's column; for pictures, the name of the feature made from the folder.
        key: the column whose hash decides between train and eval; the path for pictures, the whole row for
            tables when there is none. Rows that belong together (of one user, say) stay together by it.
        eval_fraction: share of keys that go to eval, 0 for none.
        shards: files a split.
        image: "raw" for decoded 8-bit pixels of one shape, "encoded" for the files' bytes.
        quarantine_threshold: share of bad rows above which nothing is published.
        batch_rows: rows held in memory at once, at most; no influence on what is written.
        schema: path of a schema.json to hold to, instead of what the data looks like.
        span: which part of a longer dataset this is, "2013-01" for a month; spans sort by name.
        compression: of the shards: "" for none, "GZIP" or "ZLIB".
        format: hints on how to read files, the fields of records.format.Format: {"encoding": "latin-1"}.
        partitions: which folders of a partitioned source to take: {"dt": ["2013-01", "2013-02"]}.
        split: how rows are dealt to splits, when not by `eval_fraction`; see records.splits.
        checks: "module:function" or a list of them: the user's own checks of rows, see records.rules.
        baseline: a dataset to compare with, by its manifest; "previous" for the span before this one. Where a
            threshold says fail, nothing is published; see records.drift.
        statistics: False counts rows and missing values only, which is faster.
        layout: "rows" for one row an Example, which everything reads; "blocks" for `block_rows` rows an Example,
            which `records.Dataset` reads several times as fast, shuffled within a shard (see records.blocks).
        block_rows: rows of a block, 1 to 65,536; 128 to 1,024 are sensible.
        processes: so many units are written at once, each by a process of its own; no influence on what is
            written. By default one a core for inputs of more than 64 MB, else this process alone.
        progress: called with a line of text now and then.

    Raises errors of trainers.records.errors: class DATA for what is wrong with the data, CONFIG for options.
    """
    options = Options.parse(
        source=source,
        output=output,
        name=name,
        label=label,
        key=key,
        eval_fraction=eval_fraction,
        shards=shards,
        image=image,
        quarantine_threshold=quarantine_threshold,
        batch_rows=batch_rows,
        schema=schema,
        span=span,
        compression=compression,
        format=format,
        partitions=partitions,
        split=split,
        checks=checks,
        statistics=statistics,
        layout=layout,
        block_rows=block_rows,
        processes=processes,
        baseline=baseline,
    )
    return build(options, progress).manifest


def build(options: Options, progress: Progress) -> Prepared:
    """The same as `prepare`; says also whether the dataset was there before."""
    listing = look(options, progress)
    prepared = publishing(listing.folder, progress, lambda: Build(options, listing, progress).run())
    return judged(prepared, options, progress)


def judged(prepared: Prepared, options: Options, progress: Progress) -> Prepared:
    """The same dataset, compared with the baseline where it was there before; DriftFailed as `prepare`."""
    if prepared.reused and options.baseline:
        baseline = baseline_of(options.baseline, options.output, options.span)
        _say_drift(recheck(prepared.manifest, baseline), progress)
    return prepared


def _say_drift(drift: Drift | None, progress: Progress) -> None:
    for line in str(drift).splitlines() if drift is not None else ():
        progress(f"drift: {line}")


def look(options: Options, progress: Progress) -> Listing:
    """List and hash the files of the source."""
    kind, files = list_files(options.source, progress, options.format, options.partitions)
    size = sum(file.size for file in files)
    progress(f"{options.name}: {len(files)} {kind} files in {options.source}, {size / 1e6:.1f} MB")
    found = fingerprint(options, ((file.name, file.size, file.version) for file in files))
    return Listing(kind, files, found, options.output / found[:16])


def _open(options: Options, kind: str, files: Sequence[SourceFile]) -> tuple[Source, str | None]:
    """The source, and the key that splits it."""
    if kind == "images":
        from trainers.records.images import KEY, ImageFolder

        pictures = ImageFolder(
            options.source, files, label=options.label, image=options.image, format=options.format
        )
        return pictures, options.key or KEY
    if kind == "arrays":
        from trainers.records.arrays import KEY, ArrayPairs

        return ArrayPairs(options.source, files, label=options.label), options.key or KEY
    if kind == "tfrecord":
        from trainers.records.tfrecords import Examples

        return Examples(options.source, files), options.key
    from trainers.records.tables import Table

    return Table(options.source, files, kind, options.format), options.key


class Build:
    """One run that writes a dataset, or a part of one."""

    def __init__(self, options: Options, listing: Listing, progress: Progress) -> None:
        self.options = options
        self.listing = listing
        self.folder = listing.folder
        self.fingerprint = listing.fingerprint
        self.progress = progress
        self.source, self.key = _open(options, listing.kind, listing.files)

    def run(self) -> Manifest:
        """Write all units and publish."""
        schema = self.schema()
        units = self.units(schema)
        return self.finish(schema, units, self.write(units, schema))

    def write(self, units: Sequence[Unit], schema: Schema) -> list[UnitResult]:
        """Write some units, by as many processes as the options say; no influence on what is written."""
        size = sum(file.size for file in self.listing.files) * len(units) // max(1, units[0].count)
        processes = processes_for(self.options.processes, size, len(units))
        if processes == 1:
            return [self.unit(unit, schema) for unit in units]
        self.progress(f"{len(units)} units by {processes} processes")
        work = Work(self.options, *self.listing, schema)
        return write(work, units, processes, self.progress)

    def finish(self, schema: Schema, units: Sequence[Unit], results: Sequence[UnitResult]) -> Manifest:
        """Publish what all units wrote: the quarantine, the schema, and last the manifest."""
        good = sum(result.rows for result in results)
        bad = sum(result.bad for result in results)
        if not good + bad:
            raise SourceEmpty(f"{self.options.source} holds no row", hint="check that it is the right data")
        quarantine = self.folder / QUARANTINE
        if bad:
            temp = temp_path(quarantine)
            merge([unit.quarantine for unit, result in zip(units, results, strict=True) if result.bad], temp)
            temp.replace(quarantine)
        check_threshold(quarantine, bad, good + bad, self.options.quarantine_threshold)
        return self._publish(schema, results, bad)

    def schema(self) -> Schema:
        """The schema of the data, or the given one; both must have the label and the key."""
        found = self.source.infer()
        named = list(filter(None, (self.options.label, self.key, self.options.rule.column)))
        for name in named:
            if name not in found:
                raise ColumnError(
                    name, f"isn't in {self.options.source}", hint=f"it holds {', '.join(found.names)}"
                )
        given = self.options.schema
        if given is None:
            return found
        for feature in given:
            wanted = feature.presence == "required" and feature.default is None
            if wanted and feature.name not in found:
                raise ColumnError(
                    feature.name,
                    f"isn't in {self.options.source}, but the schema requires it",
                    hint=f"it holds {', '.join(found.names)}",
                )
        for name in named:
            given[name]  # raises ColumnError
        return given

    def units(self, schema: Schema, *, quiet: bool = False) -> list[Unit]:
        """All units of the dataset, in order; quiet, nothing is said about them."""
        options = self.options if self.key == self.options.key else _with_key(self.options, self.key)
        options.rule.check(schema)
        if options.layout == "blocks":
            BlockShape.of(schema)  # raises InvalidOption before anything is written
        count = self.source.units(options.shards)
        label = schema[options.label]
        if not quiet:
            self.progress(
                f"{len(schema)} features, label {label.name} ({label.type}"
                + (f", {len(label.names)} classes)" if label.names else ")")
                + f", {count} units for {options.shards} shards a split"
            )
        return [Unit(index, count, self.folder, options) for index in range(count)]

    def unit(self, unit: Unit, schema: Schema) -> UnitResult:
        """Write a unit, unless an earlier run did."""
        found = unit.finished()
        if found is not None:
            self.progress(
                f"unit {unit.index + 1}/{unit.count}: {found.rows} rows, finished by an earlier run"
            )
            return found
        required = {self.options.label, *filter(None, [self.key, self.options.rule.column])}
        if self.options.schema is not None:
            required |= {feature.name for feature in schema if feature.presence == "required"}
        start = spoken = time.monotonic()

        def progress(rows: int) -> None:
            nonlocal spoken
            now = time.monotonic()
            if now - spoken >= SPEAK_EVERY:
                spoken = now
                self.progress(
                    f"unit {unit.index + 1}/{unit.count}: {rows} rows, {rows / (now - start):,.0f} rows/s"
                )

        result = unit.run(self.source, schema, required, progress)
        rate = (result.rows + result.bad) / max(time.monotonic() - start, 1e-9)
        self.progress(
            f"unit {unit.index + 1}/{unit.count}: {result.rows} rows written, {result.bad} refused, "
            f"{rate:,.0f} rows/s"
        )
        return result

    def _publish(self, schema: Schema, results: Sequence[UnitResult], bad: int) -> Manifest:
        by_split = {split: Statistics(schema) for split in SPLITS}
        for result in results:
            for split, state in result.statistics.items():
                by_split[split].merge(state)
        given = self.options.schema is not None
        schema = schema.replace(_described(f, list(by_split.values()), given=given) for f in schema)
        shards = sorted((s for r in results for s in r.shards), key=_shard_order)
        counts = counts_of(shards)
        if not counts["train"]:
            raise SourceEmpty(
                f"none of the {sum(counts.values())} rows of {self.options.source} is for training",
                hint="give more rows, or another key if all rows have the same",
            )
        write_json(self.folder / SCHEMA, schema.to_dict())
        states = {split: by_split[split].state() for split in SPLITS}
        write_bytes(self.folder / STATISTICS, json.dumps(states).encode())
        known = Known(
            f"{self.options.name} {self.options.span}".strip(), schema, {s: by_split[s] for s in counts}
        )
        baseline = baseline_of(self.options.baseline, self.options.output, self.options.span)
        _say_drift(check(self.folder, known, counts, bad, baseline), self.progress)
        sync_path(self.folder)
        manifest = Manifest(
            name=self.options.name,
            digest=content_digest(schema.digest, shards),
            fingerprint=self.fingerprint,
            schema_digest=schema.digest,
            label=self.options.label,
            counts=counts,
            shards=shards,
            sources=[str(self.options.source)],
            statistics={split: by_split[split].summary() for split in counts if counts[split]},
            options=self.options.content(),
            quarantined=bad,
            code_version=CODE_VERSION,
            created=time.time(),
            span=self.options.span,
            raw=raw_of(str(self.options.source), [(f.name, f.size, f.version) for f in self.listing.files]),
        ).save(self.folder / MANIFEST)
        sync_path(self.folder)
        return manifest


def _with_key(options: Options, key: str | None) -> Options:
    return dataclasses.replace(options, key=key)


def _shard_order(shard: Shard) -> tuple[int, str]:
    return SPLITS.index(shard.split), shard.file


def _described(feature: Feature, splits: Sequence[Statistics], *, given: bool) -> Feature:
    """A feature with what its values turned out to be."""
    found = [statistics.features[feature.name] for statistics in splits]
    missing = any(one.missing for one in found)
    presence = feature.presence if given else ("optional" if missing else "required")
    domain = domain_of(found)
    if feature.names and domain is not None:
        domain = {**domain, "names": list(feature.names)}
    return dataclasses.replace(feature, presence=presence, domain=domain)
