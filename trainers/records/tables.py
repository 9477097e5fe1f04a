# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Tables: Parquet, CSV (and .tsv) and JSON Lines, one file or many, read in batches.

A unit is a set of parts: a row group of a Parquet file, or a whole CSV or JSON Lines file (which can only be
read from its start). Memory is bounded whatever the files' sizes: by blocks of text (2 MB of CSV, of which Arrow
reads 32 ahead, and 8 MB of JSON Lines), and of Parquet by 32 MB of rows and a page of each column. Folders named
`dt=2013-01` add a column `dt`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainers.records.convert import feature_of
from trainers.records.delimited import infer_csv, read_csv
from trainers.records.errors import ColumnError, SourceEmpty, SourceUnreadable
from trainers.records.format import Format
from trainers.records.jsonl import infer_json, read_json_lines
from trainers.records.partitions import partition_arrays
from trainers.records.schema import Feature, Schema
from trainers.records.source import Batch, SourceFile

__all__ = ["Table"]

_BUFFER = 1 << 20  # bytes of a column read at once
_BATCH_BYTES = 32 << 20  # of rows held at once, when rows are large
_ARROW_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError)


class Part(NamedTuple):
    """What can be read on its own: a file, or one row group of it, and the rows before it in the file."""

    file: SourceFile
    row_group: int | None = None
    first_row: int = 0


class Table:
    """A source of rows; `kind` is "parquet", "csv" or "jsonl"."""

    def __init__(
        self, source: Path | str, files: Sequence[SourceFile], kind: str, format: Format | None = None
    ) -> None:
        self.source = source
        self.files = files
        self.kind = kind
        self.format = format or Format()
        empty = [file for file in files if not file.size]
        if empty:
            raise SourceEmpty(
                f"{empty[0].location} is empty", hint="remove it, or wait until whoever writes it is done"
            )
        self._parts = [part for file in files for part in self._parts_of(file)]

    def infer(self) -> Schema:
        """The columns of all files, with one type each."""
        merged: dict[str, Feature] = {}
        for file in self.files:
            columns = self._columns(file)
            if merged and set(columns) != set(merged):
                odd = sorted(set(columns) ^ set(merged))[0]
                has, lacks = (
                    (file.name, self.files[0].name) if odd in columns else (self.files[0].name, file.name)
                )
                raise ColumnError(odd, f"is in {has}, not in {lacks}", hint="give all files the same columns")
            for name, feature in columns.items():
                merged[name] = _common(merged.get(name, feature), feature, file.name)
        if not merged:
            raise SourceEmpty(f"{self.source} has no columns", hint="check that it is the right file")
        return Schema(tuple(merged.values()))

    def units(self, most: int) -> int:
        """As many as there are parts."""
        return max(1, min(most, len(self._parts)))

    def _unit_parts(self, unit: int, units: int) -> list[Part]:
        return self._parts[unit::units]

    def unit_files(self, unit: int, units: int) -> list[SourceFile]:
        """The files of a unit's parts."""
        return list(dict.fromkeys(part.file for part in self._unit_parts(unit, units)))

    def read(self, unit: int, units: int, schema: Schema, batch_rows: int) -> Iterator[Batch]:
        """The rows of a unit, part by part; only columns of the schema."""
        for part in self._unit_parts(unit, units):
            with _reading(part.file):
                if self.kind == "parquet":
                    batches = _read_parquet(part, schema, batch_rows)
                elif self.kind == "csv":
                    batches = read_csv(part.file, self.format, schema, batch_rows)
                else:
                    batches = read_json_lines(part.file, schema, batch_rows)
                for batch in batches:
                    yield _with_partitions(batch, part.file, schema)

    def _parts_of(self, file: SourceFile) -> list[Part]:
        if self.kind != "parquet":
            return [Part(file)]
        with _reading(file), file.seekable() as opened:
            metadata = pq.read_metadata(opened)
        parts, first = [], 0
        for group in range(metadata.num_row_groups):
            parts.append(Part(file, group, first))
            first += metadata.row_group(group).num_rows
        return parts

    def _columns(self, file: SourceFile) -> dict[str, Feature]:
        with _reading(file):
            if self.kind == "parquet":
                with file.seekable() as opened:
                    schema = pq.read_schema(opened)
            elif self.kind == "csv":
                schema = infer_csv(file, self.format)
            else:
                schema = infer_json(file)
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if twice:
            raise ColumnError(twice[0], f"is there twice in {file.location}", hint="rename one of them")
        columns = {field.name: feature_of(field.name, field.type) for field in schema}
        for name, array in partition_arrays(file.partitions, 0).items():
            if name in columns:
                raise ColumnError(
                    name, f"is in {file.location} and in its folder's name", hint="rename one of them"
                )
            columns[name] = feature_of(name, array.type)
        return columns


@contextlib.contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Turn Arrow's errors into ones that name the file and say what to do."""
    try:
        yield
    except _ARROW_ERRORS as e:
        file.check_unchanged()
        problem = str(e).splitlines()[0] if str(e) else type(e).__name__
        hint = "write the file again; it may be cut short or not be what its name says"
        if "straddling object" in problem:
            problem = "a row is longer than 2 MB"
            hint = "is a quote not closed, or is it no CSV?"
        raise SourceUnreadable(file.location, f"can't be read: {problem}", hint=hint) from e


def _common(a: Feature, b: Feature, file: str) -> Feature:
    """The feature that holds the values of both; ColumnError when there is none."""
    if (a.type, a.shape) == (b.type, b.shape):
        return (
            a if a.source == b.source else Feature(a.name, a.type, a.shape, source=f"{a.source}, {b.source}")
        )
    for empty, other in ((a, b), (b, a)):
        if empty.source == "null":
            return other
    if a.shape == b.shape and {a.type, b.type} == {"int64", "float32"}:
        return a if a.type == "float32" else b
    raise ColumnError(
        a.name,
        f"is {a.source} in the files before, {b.source} in {file}",
        hint="write it with one type in all",
    )


def _with_partitions(batch: Batch, file: SourceFile, schema: Schema) -> Batch:
    wanted = [(name, value) for name, value in file.partitions if name in schema]
    if not wanted:
        return batch
    data = batch.data
    for name, array in partition_arrays(wanted, data.num_rows).items():
        data = data.append_column(name, array)
    return dataclasses.replace(batch, data=data)


# ------------------------------------------------------------------------------------------------------------
# Parquet


def _read_parquet(part: Part, schema: Schema, batch_rows: int) -> Iterator[Batch]:
    at = part.first_row
    # Buffered, columns are read by pages: else whole chunks of a row group would be held at once.
    with part.file.seekable() as opened, pq.ParquetFile(opened, buffer_size=_BUFFER) as file:
        group = file.metadata.row_group(part.row_group)
        mean = max(1, group.total_byte_size // max(1, group.num_rows))
        batch_rows = max(1, min(batch_rows, _BATCH_BYTES // mean))
        present = [name for name in schema.names if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_rows, row_groups=[part.row_group], columns=present):
            yield Batch(part.file.name, np.arange(at + 1, at + 1 + batch.num_rows), batch)
            at += batch.num_rows
