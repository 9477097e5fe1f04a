# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""CSV and .tsv: read as text in blocks, and parsed by the schema, so that one bad field costs one row.

A file has a header. Empty fields and NA, N/A, NULL, null and \\N mean missing, unless quoted. Types are inferred
from the first 10,000 rows of each file: a column of which 99 % are numbers is one of numbers, and the others are
refused. Where that is wrong, a schema.json given to `prepare` settles it. A row is at most a block of 2 MB.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trainers.records.errors import ColumnError, SourceUnreadable
from trainers.records.files import SourceFile
from trainers.records.format import Format
from trainers.records.schema import Schema
from trainers.records.source import Batch, Reject

__all__ = ["infer_csv", "read_csv"]

SAMPLE_ROWS = 10_000  # of each file, from which types are inferred
_BLOCK = 2 << 20  # Arrow reads up to 32 of them ahead
_LINES_OF_A_ROW = 1_000  # in quotes; more, and a quote was not closed
_MOSTLY = 0.99  # of a sampled text column that must be numbers for the others to be taken for mistakes
_INT = r"^-?[0-9]{1,18}$"
_FLOAT = r"(?i)^-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$|^-?(nan|inf|infinity)$"


class _Skipped:
    """Rows that Arrow skipped for their number of fields, until they are told."""

    def __init__(self, file: SourceFile, delimiter: str) -> None:
        self._file = file
        self._delimiter = delimiter
        self._rows: list[tuple[int, str]] = []  # number with the header as 1, reason
        self._told = 0
        self._dropped = 0
        self._endless = 0

    def add(self, row: pyarrow.csv.InvalidRow) -> str:
        """Arrow's handler of such rows."""
        reason = f"has {row.actual_columns} fields, wants {row.expected_columns}"
        other = _other_delimiter(row.text, self._delimiter, row.expected_columns)
        self._rows.append((row.number, reason + (f"; it looks separated by {other!r}" if other else "")))
        if row.text.count("\n") > _LINES_OF_A_ROW:
            self._endless = self._endless or row.number  # an error raised here would be lost
        return "skip"

    def numbers(self, good: int, rows: int) -> np.ndarray:
        """Numbers of rows, from 1 after the header, of which `good` were given before."""
        numbers = np.array([number for number, _ in self._rows], np.int64) - 1
        before = numbers - 1 - self._dropped - np.arange(len(numbers))  # rows given before each skipped one
        index = good + np.arange(rows)
        return index + 1 + self._dropped + np.searchsorted(before, index, side="right")

    def tell(self, good: int) -> list[Reject]:
        """The rows that weren't told yet; `good` were given so far."""
        if self._endless:
            raise SourceUnreadable(
                self._file.location,
                f"row {self._endless - 1} goes over more than {_LINES_OF_A_ROW} lines and has too few fields",
                hint="is a quote not closed there?",
            )
        out = [Reject(self._file.name, number - 1, "", reason) for number, reason in self._rows[self._told :]]
        # What comes before all rows to come only counts: a file of bad rows takes no memory.
        past = sum(1 for i, (number, _) in enumerate(self._rows) if number - 2 - self._dropped - i <= good)
        self._rows = self._rows[past:]
        self._dropped += past
        self._told = len(self._rows)
        return out


@contextlib.contextmanager
def _open_csv(file: SourceFile, format: Format) -> Iterator[tuple[pyarrow.csv.CSVStreamingReader, _Skipped]]:
    delimiter = format.delimiter or ("\t" if file.kind_suffix == ".tsv" else ",")
    skipped = _Skipped(file, delimiter)
    with file.stream(format.encoding) as stream:
        reader = pyarrow.csv.open_csv(
            stream,
            # One thread, or Arrow doesn't say the numbers of rows that it skips.
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skipped.add
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                default_column_type=pa.string(),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=list(format.nulls),
            ),
        )
        with reader:
            yield reader, skipped


def _other_delimiter(text: str, delimiter: str, fields: int) -> str:
    """The delimiter by which a row would have as many fields as the header."""
    others = [other for other in ",;\t|" if other != delimiter and text.count(other) == fields - 1 > 0]
    return others[0] if others else ""


def infer_csv(file: SourceFile, format: Format) -> pa.Schema:
    """The types of a file's first rows."""
    with _open_csv(file, format) as (reader, _):
        names = reader.schema.names
        other = next((mark for mark in ",;\t|" if len(names) == 1 and mark in names[0]), "")
        if other:
            raise SourceUnreadable(
                file.location,
                f"its header looks separated by {other!r}: {names[0][:60]!r}",
                hint=f'give the delimiter: format={{"delimiter": {json.dumps(other)}}}',
            )
        if "" in names:
            raise ColumnError(
                "", f"in {file.location} has no name", hint="give each column of the header one"
            )
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


def read_csv(file: SourceFile, format: Format, schema: Schema, batch_rows: int) -> Iterator[Batch]:
    """The rows of a file as text, numbered from 1 after the header; rows with other fields are refused."""
    good = 0  # rows that Arrow gave us so far
    with _open_csv(file, format) as (reader, skipped):
        present = [name for name in schema.names if name in reader.schema.names]
        for block in reader:
            for first in range(0, block.num_rows, batch_rows):
                batch = block.select(present).slice(first, batch_rows)
                numbers = skipped.numbers(good, batch.num_rows)
                yield Batch(file.name, numbers, batch, skipped.tell(good))
                good += batch.num_rows
        rejects = skipped.tell(good)
        if rejects:
            nothing = pa.RecordBatch.from_pylist([], schema=reader.schema)
            yield Batch(file.name, np.empty(0, np.int64), nothing, rejects)
