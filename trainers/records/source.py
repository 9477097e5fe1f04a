# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""What a source of raw data is: files that are listed and hashed first, then read in units.

A source is a folder of pictures (one folder a class), or a file or folder of Parquet, CSV or JSON Lines. Files
are taken in the order of their names, so the same files are always read the same way. Each file's bytes are
hashed before anything is read, and its size and time are looked at again when it has been read.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from trainers.records.errors import SourceChanged, SourceEmpty, SourceMissing, SourceUnreadable
from trainers.records.manifest import sha256_of_file
from trainers.records.schema import Schema

__all__ = [
    "IMAGE_SUFFIXES",
    "SPEAK_EVERY",
    "TABLE_SUFFIXES",
    "Batch",
    "Reject",
    "Source",
    "SourceFile",
    "list_files",
    "threads",
]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
TABLE_SUFFIXES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}

SPEAK_EVERY = 5.0  # seconds between lines of progress


@dataclasses.dataclass(frozen=True)
class Reject:
    """A row that isn't taken: its file, its number in the file (from 1; None for a picture), column, reason."""

    file: str
    row: int | None
    column: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some rows of one file, with their numbers in it, and rows that could not even be read."""

    file: str
    rows: np.ndarray
    data: pa.RecordBatch
    rejects: Sequence[Reject] = ()


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a source as it was when it was listed; `name` is relative to the source, with slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    sha256: str

    def check_unchanged(self) -> None:
        """SourceChanged when the file isn't the one that was listed."""
        try:
            now = self.path.stat()
        except FileNotFoundError as e:
            raise SourceChanged(str(self.path), "went away") from e
        if now.st_size != self.size:
            raise SourceChanged(str(self.path), f"went from {self.size} to {now.st_size} bytes")
        if now.st_mtime_ns != self.mtime_ns:
            raise SourceChanged(str(self.path), "was written to")


class Source(Protocol):
    """A way to read raw data."""

    files: Sequence[SourceFile]

    def infer(self) -> Schema:
        """The features that the data would become, without presence or domains."""

    def units(self, most: int) -> int:
        """Into how many parts, at most `most`, the data can be cut so that each is read on its own."""

    def unit_files(self, unit: int, units: int) -> Sequence[SourceFile]:
        """The files that a unit reads."""

    def read(self, unit: int, units: int, schema: Schema, batch_rows: int) -> Iterator[Batch]:
        """The rows of a unit, in an order that never changes."""


def threads() -> int:
    """Threads worth having for work that releases the interpreter's lock: the CPUs we may use, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))


def list_files(source: Path, progress: Callable[[str], None]) -> tuple[str, list[SourceFile]]:
    """What kind of files a source holds ("images", "parquet", "csv", "jsonl"), and the files, hashed.

    Hidden files are passed over; files of other kinds are counted aloud. Raises SourceMissing, SourceEmpty,
    and SourceUnreadable when there is more than one kind.
    """
    if not source.exists():
        raise SourceMissing(
            f"no such file or folder: {source}", hint="check the path, and that it is mounted"
        )
    paths = [source] if source.is_file() else sorted(_walk(source))
    kinds: dict[str, list[Path]] = {}
    ignored: list[Path] = []
    for path in paths:
        suffix = path.suffix.lower()
        kind = "images" if suffix in IMAGE_SUFFIXES else TABLE_SUFFIXES.get(suffix)
        if kind:
            kinds.setdefault(kind, []).append(path)
        else:
            ignored.append(path)
    known = ", ".join([*IMAGE_SUFFIXES, *TABLE_SUFFIXES])
    if not kinds:
        found = f"only files such as {ignored[0]}" if ignored else "no file"
        raise SourceEmpty(f"{source} holds {found}", hint=f"put files there that end in one of {known}")
    if len(kinds) > 1:
        examples = ", ".join(f"{kind} ({files[0].name})" for kind, files in sorted(kinds.items()))
        raise SourceUnreadable(
            str(source), f"holds files of several kinds: {examples}", hint="name a folder that holds one kind"
        )
    if ignored:
        progress(f"passed over {len(ignored)} files that are no data, such as {ignored[0]}")
    kind, chosen = next(iter(kinds.items()))
    base = source.parent if source.is_file() else source
    return kind, _hashed(chosen, base, progress)


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root) / name for name in files if not name.startswith("."))


def _hashed(paths: Sequence[Path], base: Path, progress: Callable[[str], None]) -> list[SourceFile]:
    def look(path: Path) -> SourceFile:
        name = path.relative_to(base).as_posix()
        try:
            before = path.stat()
            digest = sha256_of_file(path)
        except FileNotFoundError as e:
            raise SourceChanged(str(path), "went away") from e
        except OSError as e:
            raise SourceUnreadable(
                str(path), f"can't be read: {e.strerror}", hint="check its owner and mode"
            ) from e
        file = SourceFile(path, name, before.st_size, before.st_mtime_ns, digest)
        file.check_unchanged()
        return file

    files: list[SourceFile] = []
    spoken = time.monotonic()
    with ThreadPoolExecutor(threads()) as pool:
        for file in pool.map(look, paths):
            files.append(file)
            if time.monotonic() - spoken >= SPEAK_EVERY:
                spoken = time.monotonic()
                done = sum(f.size for f in files) / 1e6
                progress(f"looked at {len(files)} of {len(paths)} files, {done:,.0f} MB")
    return files
