"""What is scored by what, pinned: the version's digest, the source's, and into how many parts it is cut.

    <output>/<fingerprint, 16 hex digits>/
        manifest.json                          written last: no manifest, no scores
        part-00000-of-00004.parquet ...        keys, columns that are passed through, answers
        quarantine.parquet                     rows that could not be scored, with reasons
        .plan.json  .parts/                    what finished parts left for others

The same version, source and options give the same folder, where there is then nothing to do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job.checks import spec_fields
from trainers.job.errors import ConfigError, InvalidSpec
from trainers.job.files import read_json, write_json
from trainers.records.manifest import MANIFEST, SPLITS, Manifest
from trainers.records.source import SourceFile, list_files
from trainers.released import Released

__all__ = ["Options", "Plan", "make_plan"]

PLAN = ".plan.json"
PARTS = ".parts"
_VERSION = 1
_TABLES = ("parquet", "csv", "jsonl")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for: `model` a released version's folder, `source` a manifest, a path with wildcards or a URL."""

    name: str
    model: str
    source: str
    output: str
    records: str = ""
    split: str = "all"
    columns: Sequence[str] = ()
    shards: int = 1
    signature: str = ""
    prefix: str = ""
    batch_rows: int = 1024
    quarantine_threshold: float = 0.01

    def __post_init__(self) -> None:
        for name in ("name", "model", "source", "output"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidSpec(name, "be text that isn't empty", value)
        if self.split not in ("all", *SPLITS):
            raise InvalidSpec("split", f"be all, {', '.join(SPLITS)}", self.split)
        for name in ("shards", "batch_rows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidSpec(name, "be a whole number above 0", value)
        if not 0 <= self.quarantine_threshold <= 1:
            raise InvalidSpec("quarantine_threshold", "be from 0 to 1", self.quarantine_threshold)
        if isinstance(self.columns, str) or not all(isinstance(c, str) for c in self.columns):
            raise InvalidSpec("columns", "be a list of names", self.columns)

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Options:
        """The options of a spec; InvalidSpec names the field that is wrong."""
        return cls(**spec_fields(cls, spec, ("name", "model", "source", "output")))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Options, the folder of this very scoring, its parts, and the files of the source."""

    options: Options
    folder: Path
    fingerprint: str
    release: str
    kind: str
    parts: int
    files: Sequence[SourceFile] = ()

    @property
    def path(self) -> Path:
        """Where the plan is kept."""
        return self.folder / PLAN

    def part(self, index: int) -> Path:
        """A part's file."""
        return self.folder / f"part-{index:05d}-of-{self.parts:05d}.parquet"

    def proof(self, index: int) -> Path:
        """What says that a part is there: {"rows", "bad", "bytes", "sha256", "seconds"}."""
        return self.folder / PARTS / f"{index:05d}.json"

    def quarantine(self, index: int) -> Path:
        """Refused rows of a part."""
        return self.folder / PARTS / f"{index:05d}.parquet"

    def save(self) -> None:
        """Keep it for the parts' pods."""
        (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
        value = {
            **dataclasses.asdict(self),
            "folder": str(self.folder),
            "files": [f.to_dict() for f in self.files],
        }
        write_json(self.path, value)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that `save` kept; ConfigError when there is none."""
        value = read_json(Path(path))
        if value is None:
            raise ConfigError(f"there is no plan at {path}", hint="run the step plan first")
        options = Options(**value.pop("options"))
        files = [SourceFile.from_dict(file) for file in value.pop("files")]
        return cls(options=options, files=files, **{**value, "folder": Path(value["folder"])})


def make_plan(options: Options) -> Plan:
    """Look at the version and the source; errors of trainers.records.errors for a source that is none."""
    released = Released.open(options.name, options.model)
    place = Path(options.source.removeprefix("file://"))
    files: Sequence[SourceFile] = ()
    if "://" not in str(place) and (place.name == MANIFEST or (place / MANIFEST).is_file()):
        manifest = Manifest.load(place)
        kind, source = "records", [manifest.digest, options.split]
        parts = len(shards_of(manifest, options.split))
    else:
        kind, files = list_files(options.source, print)
        if kind not in _TABLES:
            raise InvalidSpec("source", f"be a dataset, or files of {', '.join(_TABLES)}", f"{kind} files")
        source = [[file.name, file.size, file.version] for file in files]
        from trainers.records.tables import Table

        parts = Table(options.source, files, kind).units(options.shards)
    content = {
        "version": _VERSION,
        "release": released.digest,
        "source": source,
        "parts": parts,
        "kind": kind,
    }
    content |= {
        n: getattr(options, n) for n in ("name", "columns", "signature", "prefix", "quarantine_threshold")
    }
    content["columns"] = list(options.columns)
    fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    folder = Path(options.output.removeprefix("file://")) / fingerprint[:16]
    return Plan(options, folder, fingerprint, released.digest, kind, parts, files)


def shards_of(manifest: Manifest, split: str) -> list[tuple[str, int, int]]:
    """(split, index, of how many) of each shard that holds records, in order."""
    found = []
    for name in SPLITS if split == "all" else (split,):
        full = [shard for shard in manifest.split(name) if shard.records]
        found += [(name, index, len(full)) for index in range(len(full))]
    return found
