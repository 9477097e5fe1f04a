"""One dataset written by several machines: plan, encode a slice each, publish.

    plan      lists and hashes the source, fixes schema and units, and deals the units into slices
    encode    one slice of the units, each on its own: in any order, beside each other, twice, or again after a kill
    publish   checks that every unit is there, merges statistics and quarantine, writes the manifest

The plan is a file in the dataset's folder, `.plan.json`, which every slice reads; it goes when the dataset is
published. Units never depend on each other nor on how they were dealt, so the digest is that of one process
doing it all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.files import read_json, write_json
from trainers.records.build import Build, Listing, judged, look
from trainers.records.errors import DatasetMissing, InvalidOption, UnitsMissing
from trainers.records.locks import shared
from trainers.records.manifest import MANIFEST, Manifest
from trainers.records.options import Options, fingerprint
from trainers.records.publishing import Prepared, Progress, existing, lock_of, publishing
from trainers.records.schema import Schema
from trainers.records.source import SourceFile

__all__ = ["INDEX_VARIABLE", "PLAN", "Plan", "encode", "plan", "publish"]

PLAN = ".plan.json"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Where a pod of an Indexed Job finds which slice is its own."""

_VERSION = 1
_NAMED = 200  # bytes of a slice's title


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a dataset is going to be written: from what, with which schema, in how many units and slices.

    `spec` are the options as they were given; `titles` say what each slice reads, for people.
    """

    path: Path
    spec: Mapping[str, Any]
    listing: Listing
    schema: Schema
    units: int
    titles: Sequence[str]

    @property
    def slices(self) -> int:
        """Into how many slices the units are dealt."""
        return len(self.titles)

    def units_of(self, index: int) -> range:
        """The units of a slice."""
        return range(index, self.units, self.slices)

    def options(self) -> Options:
        """The options; ConfigError when they no longer are those of the plan, as when a schema file changed."""
        options = Options.parse(**self.spec)
        files = ((file.name, file.size, file.version) for file in self.listing.files)
        if fingerprint(options, files) != self.listing.fingerprint:
            raise ConfigError(
                f"{self.path} was made with other options or by another version of this code",
                hint="run the plan step again",
            )
        return options

    def save(self) -> None:
        """Write the plan atomically."""
        files = [file.to_dict() for file in self.listing.files]
        write_json(
            self.path,
            {
                "version": _VERSION,
                "spec": dict(self.spec),
                "kind": self.listing.kind,
                "fingerprint": self.listing.fingerprint,
                "files": files,
                "schema": self.schema.to_dict(),
                "units": self.units,
                "titles": list(self.titles),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; ConfigError when there is none or it can't be read."""
        path = Path(str(path).removeprefix("file://"))
        try:
            data = read_json(path)
            if data is not None and data["version"] != _VERSION:
                raise ValueError(f"version {data['version']!r}")
            if data is not None:
                files = [SourceFile.from_dict(row) for row in data["files"]]
                listing = Listing(data["kind"], files, data["fingerprint"], path.parent)
                schema = Schema.from_dict(data["schema"])
                return cls(path, data["spec"], listing, schema, data["units"], tuple(data["titles"]))
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(
                f"{path} is not a plan that this version can read: {e!r}", hint="run the plan step again"
            ) from e
        raise ConfigError(f"no plan at {path}", hint="run the plan step, or give the path that it returned")


def plan(spec: Mapping[str, Any], slices: int, progress: Progress) -> tuple[Plan, Manifest | None]:
    """Plan a dataset in up to `slices` slices; the plan, and the dataset where it is there already."""
    if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
        raise InvalidOption("slices", "be a whole number of 1 or more", slices)
    options = Options.parse(**spec)
    listing = look(options, progress)
    manifest = existing(listing.folder, progress)
    path = listing.folder / PLAN
    if manifest is not None:
        progress(f"nothing to do: {listing.folder} holds this dataset, digest {manifest.digest[:16]}")
        return Plan(path, spec, listing, manifest.schema(), 0, ()), manifest
    work = Build(options, listing, progress)
    schema = work.schema()
    units = work.units(schema)
    count = min(slices, len(units))
    titles = [_title(work, len(units), range(i, len(units), count)) for i in range(count)]
    made = Plan(path, spec, listing, schema, len(units), titles)
    listing.folder.mkdir(parents=True, exist_ok=True)
    made.save()
    progress(f"{len(units)} units in {count} slices")
    return made, None


def _title(work: Build, units: int, mine: range) -> str:
    """What a slice reads: "2013-01.parquet" or "a.csv and 7 more"."""
    files = list(dict.fromkeys(f.name for unit in mine for f in work.source.unit_files(unit, units)))
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0][:_NAMED]}{more}" if files else ""


def encode(path: str | Path, index: int | None, progress: Progress) -> dict[str, int]:
    """Write the units of slice `index` that aren't written yet; {"slice", "units", "rows", "bad"}.

    Without an index, the environment says it: this is pod JOB_COMPLETION_INDEX of an Indexed Job. Nothing
    happens when the dataset is published already.
    """
    folder = Path(str(path).removeprefix("file://")).parent
    index = _from_environment() if index is None else index
    with _side_by_side(folder, progress):
        if (folder / MANIFEST).exists() and not Path(path).exists():
            progress(f"nothing to do: {folder} is published")
            return {"slice": index, "units": 0, "rows": 0, "bad": 0}
        found = Plan.load(path)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < found.slices:
            raise InvalidOption("slice", f"be one of the plan's {found.slices}, counted from 0", index)
        work = Build(found.options(), found.listing, progress)
        units = work.units(found.schema)
        results = work.write([units[i] for i in found.units_of(index)], found.schema)
    return {
        "slice": index,
        "units": len(results),
        "rows": sum(result.rows for result in results),
        "bad": sum(result.bad for result in results),
    }


@contextlib.contextmanager
def _side_by_side(folder: Path, progress: Progress) -> Iterator[None]:
    """Beside other slices of the dataset, and beside no publication."""
    with shared(lock_of(folder), lambda: progress(f"another run is preparing {folder}; waiting for it")):
        yield


def _from_environment() -> int:
    text = os.environ.get(INDEX_VARIABLE, "")
    if not text.isdigit():
        raise ConfigError(
            f"the spec names no slice, and {INDEX_VARIABLE} is {text!r}",
            hint='give "slice": 0, or run the step as a pod of an Indexed Job',
        )
    return int(text)


def publish(path: str | Path, progress: Progress) -> Prepared:
    """Publish what the slices wrote; UnitsMissing, naming the slices, while one is missing.

    The same dataset again when it is published already.
    """
    path = Path(str(path).removeprefix("file://"))
    folder = path.parent
    if not path.exists():
        manifest = existing(folder, progress) if folder.is_dir() else None
        if manifest is None:
            raise DatasetMissing(f"neither a plan nor a dataset in {folder}", hint="run the plan step again")
        progress(f"nothing to do: {folder} holds this dataset, digest {manifest.digest[:16]}")
        return Prepared(manifest, reused=True)
    found = Plan.load(path)
    prepared = publishing(found.listing.folder, progress, lambda: _merged(found, progress))
    return judged(prepared, found.options(), progress)


def _merged(found: Plan, progress: Progress) -> Manifest:
    work = Build(found.options(), found.listing, progress)
    units = work.units(found.schema)
    results = [unit.finished() for unit in units]
    missing = [
        index for index in range(found.slices) if any(results[i] is None for i in found.units_of(index))
    ]
    if missing:
        which = "; ".join(f"slice {i} ({found.titles[i]})" for i in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UnitsMissing(
            f"{len(missing)} of {found.slices} slices of {work.folder} are not written: {which}{more}",
            hint="run the encode step of these again, then publish; what is written stays",
        )
    return work.finish(found.schema, units, [result for result in results if result is not None])
