# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Tables: Parquet, CSV (and .tsv) and JSON Lines, one file or a folder of them, read in batches.

A unit is a set of parts: a row group of a Parquet file, or a whole CSV or JSON Lines file (which can only be
read from its start). Memory is bounded by a batch, or by a block of 8 MB of text, whatever the files' sizes.

CSV has a header; fields are read as text and parsed by the schema, so that one bad field costs one row. Empty
fields and NA, N/A, NULL, null and \\N mean missing, unless quoted. In both text formats, types are inferred
from the first 10,000 rows of each file: a column of which 99 % are numbers is one of numbers, and the others are
refused. Where that is wrong, a schema.json given to `prepare` settles it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from trainers.records.convert import feature_of
from trainers.records.errors import ColumnError, SourceEmpty, SourceUnreadable
from trainers.records.jsonl import infer_json, read_json_lines
from trainers.records.schema import Feature, Schema
from trainers.records.source import Batch, Reject, SourceFile

__all__ = ["Table"]

SAMPLE_ROWS = 10_000  # of each text file, from which types are inferred
_BLOCK = 8 << 20
_CSV_NULLS = ["", "NA", "N/A", "NULL", "null", "\\N"]
_MOSTLY = 0.99  # of a sampled text column that must be numbers for the others to be taken for mistakes
_INT = r"^-?[0-9]{1,18}$"
_FLOAT = r"(?i)^-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$|^-?(nan|inf|infinity)$"
_ARROW_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError)


class Part(NamedTuple):
    """What can be read on its own: a file, or one row group of it, and the rows before it in the file."""

    file: SourceFile
    row_group: int | None = None
    first_row: int = 0


class Table:
    """A source of rows; `kind` is "parquet", "csv" or "jsonl"."""

    def __init__(self, source: Path, files: Sequence[SourceFile], kind: str) -> None:
        self.source = source
        self.files = files
        self.kind = kind
        empty = [file for file in files if not file.size]
        if empty:
            raise SourceEmpty(
                f"{empty[0].path} is empty", hint="remove it, or wait until whoever writes it is done"
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
                    yield from _read_parquet(part, schema, batch_rows)
                elif self.kind == "csv":
                    yield from _read_csv(part.file, schema, batch_rows)
                else:
                    yield from read_json_lines(part.file, schema, batch_rows)

    def _parts_of(self, file: SourceFile) -> list[Part]:
        if self.kind != "parquet":
            return [Part(file)]
        with _reading(file):
            metadata = pq.read_metadata(file.path)
        parts, first = [], 0
        for group in range(metadata.num_row_groups):
            parts.append(Part(file, group, first))
            first += metadata.row_group(group).num_rows
        return parts

    def _columns(self, file: SourceFile) -> dict[str, Feature]:
        with _reading(file):
            if self.kind == "parquet":
                schema = pq.read_schema(file.path)
            elif self.kind == "csv":
                schema = _infer_csv(file)
            else:
                schema = infer_json(file)
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if twice:
            raise ColumnError(twice[0], f"is there twice in {file.path}", hint="rename one of them")
        return {field.name: feature_of(field.name, field.type) for field in schema}


@contextlib.contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Turn Arrow's errors into ones that name the file and say what to do."""
    try:
        yield
    except _ARROW_ERRORS as e:
        file.check_unchanged()
        problem = str(e).splitlines()[0] if str(e) else type(e).__name__
        hint = "write the file again; it may be cut short or not be what its name says"
        if "utf8" in problem.lower().replace("-", ""):
            hint = "save it as UTF-8"
        raise SourceUnreadable(str(file.path), f"can't be read: {problem}", hint=hint) from e


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


def _slices(batch: pa.RecordBatch, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    for first in range(0, batch.num_rows, rows):
        yield first, batch.slice(first, rows)


# ------------------------------------------------------------------------------------------------------------
# Parquet


def _read_parquet(part: Part, schema: Schema, batch_rows: int) -> Iterator[Batch]:
    at = part.first_row
    with pq.ParquetFile(part.file.path) as file:
        present = [name for name in schema.names if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_rows, row_groups=[part.row_group], columns=present):
            yield Batch(part.file.name, np.arange(at + 1, at + 1 + batch.num_rows), batch)
            at += batch.num_rows


# ------------------------------------------------------------------------------------------------------------
# CSV: everything is text first


def _open_csv(file: SourceFile, skipped: list[tuple[int, str]]) -> pyarrow.csv.CSVStreamingReader:
    def skip(row: pyarrow.csv.InvalidRow) -> str:
        skipped.append((row.number, f"has {row.actual_columns} fields, wants {row.expected_columns}"))
        return "skip"

    return pyarrow.csv.open_csv(
        file.path,
        # One thread, or Arrow doesn't say the numbers of rows that it skips.
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter="\t" if file.path.suffix.lower() == ".tsv" else ",",
            newlines_in_values=True,
            invalid_row_handler=skip,
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            default_column_type=pa.string(),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=_CSV_NULLS,
        ),
    )


def _infer_csv(file: SourceFile) -> pa.Schema:
    with _open_csv(file, []) as reader:
        names = reader.schema.names
        batches: list[pa.RecordBatch] = []
        rows = 0
        for batch in reader:
            batches.append(batch)
            rows += batch.num_rows
            if rows >= SAMPLE_ROWS:
                break
        table = pa.Table.from_batches(batches, reader.schema).slice(0, SAMPLE_ROWS)
    return pa.schema(
        [pa.field(name, _text_type(column)) for name, column in zip(names, table.columns, strict=True)]
    )


def _text_type(column: pa.ChunkedArray) -> pa.DataType:
    """The narrowest type that all values of a text column parse as."""
    values = pc.utf8_trim_whitespace(column.drop_null())
    if not len(values):
        return pa.null()
    for kind in (
        pa.int64(),
        pa.float64(),
        pa.bool_(),
        pa.date32(),
        pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
    ):
        try:
            values.cast(kind)
        except pa.ArrowInvalid:
            continue
        return kind
    # Nearly all are numbers: then the others are bad rows, rather than the column a text.
    shares = [
        pc.mean(pc.match_substring_regex(values, regex).cast(pa.int8())).as_py() for regex in (_INT, _FLOAT)
    ]
    if max(shares) < _MOSTLY:
        return pa.string()
    return pa.int64() if shares[0] == max(shares) else pa.float64()


def _read_csv(file: SourceFile, schema: Schema, batch_rows: int) -> Iterator[Batch]:
    skipped: list[tuple[int, str]] = []
    told = 0
    good = 0  # rows that Arrow gave us so far
    with _open_csv(file, skipped) as reader:
        present = [name for name in schema.names if name in reader.schema.names]
        for block in reader:
            for first, batch in _slices(block.select(present), batch_rows):
                # A row's number counts the skipped ones before it, and not the header.
                numbers = np.array([number for number, _ in skipped], np.int64) - 1
                before = numbers - 1 - np.arange(len(numbers))
                index = good + first + np.arange(batch.num_rows)
                rows = index + 1 + np.searchsorted(before, index, side="right")
                rejects = [_field_count(file, number, reason) for number, reason in skipped[told:]]
                told = len(skipped)
                yield Batch(file.name, rows, batch, rejects)
            good += block.num_rows
        if told < len(skipped):
            rejects = [_field_count(file, number, reason) for number, reason in skipped[told:]]
            yield Batch(
                file.name, np.empty(0, np.int64), reader.schema.empty_table().to_batches()[0], rejects
            )


def _field_count(file: SourceFile, number: int, reason: str) -> Reject:
    return Reject(file.name, number - 1, "", reason)
