# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""What a source of raw data is: files that are listed first (records.listing), then read in units.

Each file's version is known before anything is read, and looked at again when it has been read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from trainers.records.files import SourceFile
from trainers.records.listing import SPEAK_EVERY, list_files, threads
from trainers.records.schema import Schema

__all__ = ["SPEAK_EVERY", "Batch", "Reject", "Source", "SourceFile", "list_files", "threads"]


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
