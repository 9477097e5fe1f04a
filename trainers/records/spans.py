"""Spans of a dataset, and rolling windows of them.

A dataset that grows by the month is a row of spans, each a dataset of its own, prepared once. Training on the last
three takes a *window*: a folder beside theirs with a manifest of its own, that names the spans and their shards.

    storage/records/flights/
        spans/2013-01.json ...         which dataset is that span's now: {"span", "folder", "digest"}
        3a627be8d7c9066a/              the dataset of a span
        91f0c2a4be61d3aa/              a window: manifest.json, schema.json, statistics.json, report.html, no shard

To whoever reads it a window is a dataset like any other: records aren't copied, checksums and counts hold as they
do for its spans, and its statistics are those of its rows. Its fingerprint is that of its spans' digests, so the
same spans make the same window, which is then there already.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, write_bytes, write_json
from trainers.records.errors import ColumnError, DatasetCorrupt, DatasetMissing, InvalidOption
from trainers.records.locks import exclusive
from trainers.records.manifest import (
    MANIFEST,
    SCHEMA,
    SPLITS,
    STATISTICS,
    Manifest,
    Shard,
    Span,
    content_digest,
    counts_of,
)
from trainers.records.publishing import Prepared, Progress, existing, lock_of
from trainers.records.quality import Known, check
from trainers.records.schema import Feature, Schema
from trainers.records.statistics import Statistics

__all__ = ["HELD_OUT", "SPANS", "newest", "record_span", "spans", "window"]

SPANS = "spans"
HELD_OUT = ("all", "newest")
_MOST_SPANS = 1000
_READ_BY = ("image", "layout", "block_rows", "compression")  # options that a reader goes by


def record_span(manifest: Manifest) -> Span:
    """Say that this dataset is its span's now; one that was before stays on disk, but in no later window."""
    found = Span(manifest.span, manifest.folder.name, manifest.digest)
    path = manifest.folder.parent / SPANS / f"{found.span}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if read_json(path) != dataclasses.asdict(found):
        write_json(path, dataclasses.asdict(found))
    return found


def spans(output: str | Path, *, until: str | None = None) -> list[Span]:
    """The spans of a dataset by name, up to and with `until`."""
    out = []
    for path in sorted((Path(output) / SPANS).glob("*.json")):
        try:
            found = Span(**read_json(path))
        except (ValueError, TypeError) as e:
            raise DatasetCorrupt(str(path), f"names no span: {e!r}", hint="prepare that span again") from e
        if until is None or found.span <= until:
            out.append(found)
    return out


def newest(output: str | Path, *, until: str, size: int) -> list[str]:
    """The names of span `until` and those before it, `size` of them or as many as there are."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MOST_SPANS:
        raise InvalidOption("window", f"be a number of spans from 1 to {_MOST_SPANS}", size)
    return [span.span for span in spans(output, until=until)][-size:]


def window(output: str | Path, names: Sequence[str], *, held_out: str, progress: Progress) -> Prepared:
    """The dataset of the spans `names`.

    `held_out` says what is evaluated on: "all" leaves each span split as it is. With "newest" it is what the newest
    span holds out, and what older ones held out is trained on: for spans that are split by time, whose held-out rows
    come after all others, so that evaluation is on rows later than any that was trained on.

    Raises ColumnError when the spans' schemas don't go together, DatasetMissing or DatasetCorrupt for a span that
    isn't whole.
    """
    if not names or len(set(names)) < len(names) or len(names) > _MOST_SPANS:
        raise InvalidOption("spans", f"be 1 to {_MOST_SPANS} different spans", list(names))
    if held_out not in HELD_OUT:
        raise InvalidOption("held_out", f"be one of {', '.join(HELD_OUT)}", held_out)
    output = Path(output)
    there = {span.span: span for span in spans(output)}
    missing = [name for name in names if name not in there]
    if missing:
        raise DatasetMissing(f"{output} has no span {', '.join(missing)}", hint="prepare that span first")
    chosen = [there[name] for name in sorted(names)]
    manifests = [_load(output, span) for span in chosen]
    made_from = ["window", held_out, [[span.span, span.folder, span.digest] for span in chosen]]
    fingerprint = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    folder = output / fingerprint[:16]
    called = ", ".join(span.span for span in chosen)
    with exclusive(
        lock_of(folder), lambda: progress(f"another run makes the window {folder}; waiting for it")
    ):
        manifest = existing(folder, progress)
        if manifest is not None:
            progress(f"nothing to do: {folder} is the window of {called}")
            return Prepared(manifest, reused=True)
        folder.mkdir(exist_ok=True)
        manifest = _write(folder, fingerprint, chosen, manifests, held_out)
    counts = " and ".join(f"{count} {split}" for split, count in manifest.counts.items())
    progress(f"{folder} is the window of {called}: {counts} records")
    return Prepared(manifest, reused=False)


def _load(output: Path, span: Span) -> Manifest:
    manifest = Manifest.load(output / span.folder)
    if manifest.digest != span.digest:
        raise DatasetCorrupt(
            str(manifest.path), f"has digest {manifest.digest[:16]}, its span says {span.digest[:16]}"
        )
    return manifest


def _write(
    folder: Path, fingerprint: str, chosen: Sequence[Span], manifests: Sequence[Manifest], held_out: str
) -> Manifest:
    newest = manifests[-1]
    for other in manifests:
        for option in ("label", *_READ_BY):
            ours, theirs = newest.options.get(option), other.options.get(option)
            if ours != theirs:
                raise InvalidOption(
                    option, f"be the same in all spans: {newest.span} has {ours!r}, {other.span}", theirs
                )
    schema = _merged_schema([(m.span, m.schema()) for m in manifests])
    statistics = {split: Statistics(schema) for split in SPLITS}
    shards: list[Shard] = []
    for manifest in manifests:
        states = _states(manifest)
        for split in SPLITS:
            to = "train" if held_out == "newest" and manifest is not newest else split
            statistics[to].merge(states.get(split, {}))
            shards += [
                dataclasses.replace(shard, split=to, file=f"../{manifest.folder.name}/{shard.file}")
                for shard in manifest.split(split)
            ]
    shards.sort(key=lambda shard: SPLITS.index(shard.split))
    counts = counts_of(shards)
    write_json(folder / SCHEMA, schema.to_dict())
    states = {split: statistics[split].state() for split in SPLITS}
    write_bytes(folder / STATISTICS, json.dumps(states).encode())
    quarantined = sum(m.quarantined for m in manifests)
    name = f"{newest.name} {' '.join(span.span for span in chosen)}"
    check(folder, Known(name, schema, {s: statistics[s] for s in counts}), counts, quarantined, None)
    return dataclasses.replace(
        newest,
        digest=content_digest(schema.digest, shards),
        fingerprint=fingerprint,
        schema_digest=schema.digest,
        counts=counts,
        shards=shards,
        sources=list(dict.fromkeys(source for m in manifests for source in m.sources)),
        statistics={split: statistics[split].summary() for split in counts if counts[split]},
        options={**newest.options, "held_out": held_out},
        quarantined=quarantined,
        created=time.time(),
        spans=chosen,
        raw={},  # that of each span is in the span's own manifest
    ).save(folder / MANIFEST)


def _states(manifest: Manifest) -> Mapping[str, Any]:
    path = manifest.folder / STATISTICS
    found = read_json(path)
    if not isinstance(found, Mapping):
        raise DatasetMissing(
            f"no statistics at {path}, so its span fits into no window",
            hint=f"remove {manifest.path} and prepare the span again",
        )
    return found


def _merged_schema(schemas: Sequence[tuple[str, Schema]]) -> Schema:
    """One schema that reads the records of all."""
    span, last = schemas[-1]
    merged = {feature.name: feature for feature in last}
    for other, schema in schemas[:-1]:
        odd = sorted(set(merged) ^ set(schema.names))
        if odd:
            has, lacks = (span, other) if odd[0] in merged else (other, span)
            raise ColumnError(
                odd[0], f"is in span {has}, not in {lacks}", hint="prepare both with one schema"
            )
        for feature in schema:
            merged[feature.name] = _common(merged[feature.name], feature, span, other)
    return Schema(tuple(merged.values()))


def _common(ours: Feature, theirs: Feature, span: str, other: str) -> Feature:
    for what in ("type", "shape", "encoding", "names"):
        a, b = getattr(ours, what), getattr(theirs, what)
        if a != b:
            raise ColumnError(
                ours.name,
                f"has {what} {a} in span {span}, {b} in {other}",
                hint="prepare both with one schema",
            )
    presence = "optional" if "optional" in (ours.presence, theirs.presence) else "required"
    return dataclasses.replace(ours, presence=presence, domain=_common_domain(ours.domain, theirs.domain))


def _common_domain(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if a is None or b is None or set(a) != set(b):
        return None
    pick: Mapping[str, Any] = {"min": min, "max": max, "values": _union, "names": lambda x, y: x}
    return {name: pick[name](a[name], b[name]) for name in a if name in pick}


def _union(a: Iterable[Any], b: Iterable[Any]) -> list[Any]:
    return sorted({*a, *b})
