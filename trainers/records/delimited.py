# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""CSV and .tsv: read as text in blocks, and parsed by the schema, so that one bad field costs one row.

A file has a header. Empty fields and NA, N/A, NULL, null and \\N mean missing, unless quoted. Types are inferred
from the first 10,000 rows of each file: a column of which 99 % are numbers is one of numbers, and the others are
refused. Where that is wrong, a schema.json given to `prepare` settles it. A row is at most a block of 8 MB.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trainers.records.errors import SourceUnreadable
from trainers.records.files import SourceFile
from trainers.records.format import Format
from trainers.records.schema import Schema
from trainers.records.source import Batch, Reject

__all__ = ["infer_csv", "read_csv"]

SAMPLE_ROWS = 10_000  # of each file, from which types are inferred
_BLOCK = 8 << 20
_MOSTLY = 0.99  # of a sampled text column that must be numbers for the others to be taken for mistakes
_INT = r"^-?[0-9]{1,18}$"
_FLOAT = r"(?i)^-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$|^-?(nan|inf|infinity)$"


Skipped = list[tuple[int, str]]  # rows with another number of fields: number with the header as 1, reason


@contextlib.contextmanager
def _open_csv(file: SourceFile, format: Format, skipped: Skipped) -> Iterator[pyarrow.csv.CSVStreamingReader]:
    tabs = file.kind_suffix == ".tsv"
    delimiter = format.delimiter or ("\t" if tabs else ",")

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        reason = f"has {row.actual_columns} fields, wants {row.expected_columns}"
        other = _other_delimiter(row.text, delimiter, row.expected_columns)
        skipped.append((row.number, reason + (f"; it looks separated by {other!r}" if other else "")))
        return "skip"

    with file.stream(format.encoding) as stream:
        try:
            yield pyarrow.csv.open_csv(
                stream,
                # One thread, or Arrow doesn't say the numbers of rows that it skips.
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    default_column_type=pa.string(),
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    null_values=list(format.nulls),
                ),
            )
        except (pa.ArrowInvalid, UnicodeDecodeError) as e:
            _explain(file, format, e)
            raise


def _other_delimiter(text: str, delimiter: str, fields: int) -> str:
    """The delimiter by which a row would have as many fields as the header."""
    others = [other for other in ",;\t|" if other != delimiter and text.count(other) == fields - 1 > 0]
    return others[0] if others else ""


def _explain(file: SourceFile, format: Format, error: Exception) -> None:
    """Raise SourceUnreadable with the line of the first bytes that aren't UTF-8, when that is the trouble."""
    if "utf" not in str(error).lower():
        return
    file.check_unchanged()
    line, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    with file.stream(format.encoding) as stream:
        while chunk := stream.read(1 << 20):
            held = decoder.getstate()[0]
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as e:
                seen = held + chunk
                line += seen[: e.start].count(b"\n")
                raise SourceUnreadable(
                    file.location,
                    f"line {line} is not UTF-8, but has the byte 0x{seen[e.start]:02x}",
                    hint='save it as UTF-8, or give its encoding: format={"encoding": "latin-1"}',
                ) from error
            line += chunk.count(b"\n")


def infer_csv(file: SourceFile, format: Format) -> pa.Schema:
    """The types of a file's first rows."""
    with _open_csv(file, format, []) as reader:
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


def read_csv(file: SourceFile, format: Format, schema: Schema, batch_rows: int) -> Iterator[Batch]:
    """The rows of a file as text, numbered from 1 after the header; rows with other fields are refused."""
    skipped: Skipped = []
    told = 0
    good = 0  # rows that Arrow gave us so far
    with _open_csv(file, format, skipped) as reader:
        present = [name for name in schema.names if name in reader.schema.names]
        for block in reader:
            for first in range(0, block.num_rows, batch_rows):
                batch = block.select(present).slice(first, batch_rows)
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
