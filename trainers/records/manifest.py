"""The manifest of a dataset: what it holds, from what it was made, and how to tell that it is whole.

Standard library only: Airflow reads manifests. A dataset is a folder

    <output>/<fingerprint, 16 hex digits>/
        manifest.json                        written last: no manifest, no dataset
        schema.json
        statistics.json                      what is needed to merge these statistics with others
        train-00000-of-00002.tfrecord ...    eval-00000-of-00001.tfrecord ...
        quarantine.parquet                   refused rows, when there are any

`digest` is of the content: the schema and every shard's name, records, bytes and SHA-256. Equal digests mean
equal data. `fingerprint` is of what it was made from: the bytes of the inputs, the options, and the version of
the code that writes records. Equal fingerprints mean that there is nothing to do.

A dataset may be one `span` of a longer one, a month of it, say. A window of spans is a dataset too: its manifest
names its `spans`, and its shards are theirs, "../<fingerprint>/train-00000-of-00002.tfrecord" (see records.spans).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job.files import sha256_of_file, write_bytes
from trainers.records.errors import DatasetCorrupt, DatasetMissing
from trainers.records.schema import Schema

__all__ = [
    "MANIFEST",
    "QUARANTINE",
    "SCHEMA",
    "SPLITS",
    "STATISTICS",
    "Manifest",
    "Shard",
    "Span",
    "counts_of",
    "raw_of",
    "told",
]

VERSION = 1
MANIFEST = "manifest.json"
SCHEMA = "schema.json"
QUARANTINE = "quarantine.parquet"
STATISTICS = "statistics.json"
SPLITS = ("train", "eval", "test")


# No name starts with a dot, so nothing leads out of the folder that holds a dataset and its neighbours.
_SHARD_FILE = re.compile(r"(\.\./[^./\\][^/\\]*/)?[^./\\][^/\\]*")


def counts_of(shards: Sequence[Shard]) -> dict[str, int]:
    """Records of train, eval and, where there are any, test."""
    counts = {split: sum(s.records for s in shards if s.split == split) for split in SPLITS}
    return {split: count for split, count in counts.items() if count or split != "test"}


def raw_of(source: str, files: Sequence[tuple[str, int, str]]) -> dict[str, Any]:
    """A manifest's `raw` of files as (name, bytes, SHA-256 or an object store's version); {} for none."""
    if not files:
        return {}
    lines = "".join(f"{name} {size} {version}\n" for name, size, version in sorted(files))
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return {"uri": source, "files": len(files), "bytes": sum(size for _, size, _ in files), "digest": digest}


def told(counts: Mapping[str, int]) -> str:
    """Counts in words: "80 train and 20 eval"."""
    return " and ".join(f"{count} {split}" for split, count in counts.items())


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of records: its split, name, records, bytes and SHA-256.

    `file` is a name in the dataset's folder, or for a window "../<folder of a span>/<name>" beside it.
    """

    split: str
    file: str
    records: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if not _SHARD_FILE.fullmatch(self.file):
            raise ValueError(f"file must be a name, or ../FOLDER/NAME, got {self.file!r}")
        if self.records < 0 or self.bytes < 0:
            raise ValueError(f"records and bytes must be 0 or more, got {self.records}, {self.bytes}")


@dataclasses.dataclass(frozen=True)
class Span:
    """A dataset within a window: its span's name, the folder beside the window's, and its digest."""

    span: str
    folder: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a dataset holds.

    `counts` are records a split; `statistics` are {split: {feature: {...}}} (see records.statistics);
    `quarantined` rows were refused and lie in quarantine.parquet; `options` are those of `prepare` that shape
    the content; `created` is seconds since 1970; `span` is the part of a longer dataset that this is, "" for a
    whole one, and `spans` are those that a window is made of. `raw` is what the source held: {"uri", "files",
    "bytes", "digest"}, the digest over the files' names, sizes and contents; {} where that is not known. `path` is
    where the manifest was read from or written to; it is no part of the value.
    """

    name: str
    digest: str
    fingerprint: str
    schema_digest: str
    label: str
    counts: Mapping[str, int]
    shards: Sequence[Shard]
    sources: Sequence[str]
    statistics: Mapping[str, Any]
    options: Mapping[str, Any]
    quarantined: int
    code_version: str
    created: float
    span: str = ""
    spans: Sequence[Span] = ()
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: Path | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "spans", tuple(self.spans))
        if not {"train", "eval"} <= set(self.counts) <= set(SPLITS):
            raise ValueError(f"counts must have train and eval, and may have test, got {sorted(self.counts)}")
        for split, count in self.counts.items():
            total = sum(shard.records for shard in self.split(split))
            if total != count:
                raise ValueError(f"counts[{split!r}] must be that of the shards, {total}, got {count}")
        if self.digest != content_digest(self.schema_digest, self.shards):
            raise ValueError("digest must be that of the schema and the shards, got another")

    @property
    def folder(self) -> Path:
        """The dataset's folder."""
        if self.path is None:
            raise ValueError("path must be set to find the dataset's folder, got None")
        return self.path.parent

    def split(self, split: str) -> tuple[Shard, ...]:
        """The shards of a split, in order."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return tuple(shard for shard in self.shards if shard.split == split)

    def schema(self) -> Schema:
        """The dataset's schema; DatasetCorrupt when it isn't the one the manifest speaks of."""
        path = self.folder / SCHEMA
        schema = Schema.load(path)
        if schema.digest != self.schema_digest:
            raise DatasetCorrupt(
                str(path), f"has digest {schema.digest[:16]}, its manifest says {self.schema_digest[:16]}"
            )
        return schema

    def verify(self, *, splits: Sequence[str] = SPLITS, checksums: bool = True) -> None:
        """Raise DatasetCorrupt, naming the file, unless the schema and all shards are as the manifest says.

        Sizes tell a truncated file at no cost; checksums read all bytes, about 1 GB/s.
        """
        self.schema()
        for shard in self.shards:
            if shard.split not in splits:
                continue
            path = self.folder / shard.file
            try:
                size = path.stat().st_size
                if size != shard.bytes:
                    raise DatasetCorrupt(str(path), f"has {size} bytes, its manifest says {shard.bytes}")
                if checksums and (found := sha256_of_file(path)) != shard.sha256:
                    raise DatasetCorrupt(
                        str(path), f"has SHA-256 {found[:16]}..., its manifest says {shard.sha256[:16]}..."
                    )
            except FileNotFoundError as e:
                raise DatasetCorrupt(str(path), "is not there, though its manifest names it") from e

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "path"}
        out["shards"] = [dataclasses.asdict(shard) for shard in self.shards]
        out["sources"] = list(self.sources)
        out["spans"] = [dataclasses.asdict(span) for span in self.spans]
        return {"version": VERSION, **out}

    @classmethod
    def from_dict(cls, data: Any, *, path: Path | None = None) -> Manifest:
        """The manifest of JSON values; ValueError, KeyError or TypeError when they aren't one."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a manifest must be an object, got {type(data).__name__}")
        if data.get("version") != VERSION:
            raise ValueError(f"version must be {VERSION}, got {data.get('version')!r}")
        names = [f.name for f in dataclasses.fields(cls) if f.name != "path"]
        missing = dataclasses.MISSING
        optional = {
            f.name
            for f in dataclasses.fields(cls)
            if f.default is not missing or f.default_factory is not missing
        }
        # A manifest of an older version lacks what came later: that has its default.
        values = {name: data[name] for name in names if name in data or name not in optional}
        values["shards"] = [Shard(**shard) for shard in values["shards"]]
        values["spans"] = [Span(**span) for span in values.get("spans", ())]
        return cls(**values, path=path)

    def save(self, path: Path) -> Manifest:
        """Write the manifest atomically; the same manifest with its `path`."""
        document = self.to_dict()
        statistics = document.pop("statistics")
        text = json.dumps(document, indent=1, sort_keys=True)
        # A line a feature: with a line a number Python's encoder would take longer than the statistics themselves.
        lines = (
            f"{json.dumps(split)}: {{\n"
            + ",\n".join(
                f" {json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in by.items()
            )
            + "\n }"
            for split, by in statistics.items()
        )
        whole = text.removesuffix("\n}") + ',\n "statistics": {' + ", ".join(lines) + "}\n}\n"
        write_bytes(path, whole.encode())
        return dataclasses.replace(self, path=path)

    @classmethod
    def load(cls, uri: str | Path) -> Manifest:
        """Read a manifest from its path, its folder, or a file:// URI of either.

        Raises DatasetMissing when there is none, DatasetCorrupt when it can't be read as one.
        """
        path = Path(str(uri).removeprefix("file://"))
        if path.is_dir():
            path = path / MANIFEST
        try:
            return cls.from_dict(json.loads(path.read_text()), path=path)
        except FileNotFoundError as e:
            raise DatasetMissing(
                f"no manifest at {path}, so there is no dataset",
                hint="run the prepare step first, or give the path of a manifest.json",
            ) from e
        except (ValueError, KeyError, TypeError) as e:
            raise DatasetCorrupt(str(path), f"is not a manifest that this version can read: {e!r}") from e


def content_digest(schema_digest: str, shards: Sequence[Shard]) -> str:
    """SHA-256 over the schema's digest and each shard's name, records, bytes and SHA-256."""
    content = [schema_digest, [[s.split, s.file, s.records, s.bytes, s.sha256] for s in shards]]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
