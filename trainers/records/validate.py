# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Which rows are taken: each is mapped to the schema, and those that can't be go to the quarantine.

quarantine.parquet has a row a refused row: `file`, `row` (its number in the file from 1; null for pictures),
`column` (empty when it is the whole row), and `reason`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from trainers.records.convert import convert
from trainers.records.errors import TooManyBadRows
from trainers.records.rules import Reasons, Rules
from trainers.records.schema import Schema
from trainers.records.source import Batch, Reject

__all__ = ["QUARANTINE_SCHEMA", "Quarantine", "check_threshold", "clean", "worst_reasons"]

_WORST = 3  # columns named in an error

QUARANTINE_SCHEMA = pa.schema(
    [("file", pa.string()), ("row", pa.int64()), ("column", pa.string()), ("reason", pa.string())]
)


def clean(
    batch: Batch, schema: Schema, required: Collection[str], rules: Rules | None = None
) -> tuple[pa.RecordBatch, list[Reject]]:
    """The rows of a batch that fit, mapped to the schema's types, and the others with their reasons.

    `required` names the features that no row may lack; a row is refused for its first bad column.
    """
    rejects = list(batch.rejects)
    reasons: dict[int, tuple[str, str]] = {}
    columns = []
    for feature in schema:
        at = batch.data.schema.get_field_index(feature.name)
        raw = batch.data.column(at) if at >= 0 else pa.nulls(batch.data.num_rows)
        column, refused = convert(raw, feature)
        if feature.presence == "required" and feature.default is not None and not feature.shape:
            # A column that was added later: older files lack it. Refused rows go by their reason, not by null.
            column = column.fill_null(feature.default)
        if feature.name in required:
            refused = {**_lacking(column), **refused}
        for row, reason in refused.items():
            reasons.setdefault(row, (feature.name, reason))
        columns.append(column)
    data = pa.RecordBatch.from_arrays(columns, names=list(schema.names))
    data, numbers = _without(batch.file, data, batch.rows, reasons, rejects)
    if rules and data.num_rows:
        data, _ = _without(batch.file, data, numbers, rules.refuse(data), rejects)
    return data, rejects


def _without(
    file: str, data: pa.RecordBatch, numbers: np.ndarray, reasons: Reasons, rejects: list[Reject]
) -> tuple[pa.RecordBatch, np.ndarray]:
    """The other rows and their numbers; refused ones are put to the `rejects`."""
    if not reasons:
        return data, numbers
    rejects += [Reject(file, int(numbers[row]), *reasons[row]) for row in sorted(reasons)]
    keep = np.ones(data.num_rows, bool)
    keep[list(reasons)] = False
    return data.filter(pa.array(keep)), numbers[keep]


def _lacking(column: pa.Array) -> dict[int, str]:
    """Rows whose required value is missing, or is no number."""
    refused: dict[int, str] = {}
    if column.null_count:
        nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        refused |= dict.fromkeys(nulls.tolist(), "is missing")
    if pt.is_floating(column.type):
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        refused |= {int(i): f"is {values[i]}" for i in np.flatnonzero(~np.isfinite(values)).tolist()}
    return refused


class Quarantine:
    """Writes refused rows of a unit to a Parquet file of its own, as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.reasons: Counter[str] = Counter()
        self._writer: pq.ParquetWriter | None = None

    def add(self, rejects: Iterable[Reject]) -> None:
        """Take in some refused rows."""
        rows = [{"file": r.file, "row": r.row, "column": r.column, "reason": r.reason} for r in rejects]
        if not rows:
            return
        self.count += len(rows)
        self.reasons.update(row["column"] for row in rows)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, QUARANTINE_SCHEMA)
        self._writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=QUARANTINE_SCHEMA))

    def close(self) -> None:
        """Finish the file; without refused rows there is none."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def merge(parts: Sequence[Path], path: Path) -> None:
    """Put the quarantines of units together, in their order."""
    with pq.ParquetWriter(path, QUARANTINE_SCHEMA) as writer:
        for part in parts:
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches():
                    writer.write_batch(batch)


def check_threshold(quarantine: Path, bad: int, total: int, threshold: float) -> None:
    """TooManyBadRows, with the worst reasons, when more than the threshold's share of rows was refused."""
    if bad <= threshold * total:
        return
    worst = "; ".join(
        f"{column} {count} rows, as {example}" for column, count, example in worst_reasons(quarantine)
    )
    raise TooManyBadRows(
        f"{bad} of {total} rows are bad ({bad / total:.1%}, up to {threshold:.1%} are allowed); worst: {worst}",
        bad=bad,
        total=total,
        hint=f"all of them are in {quarantine}; mend the data or raise quarantine_threshold; nothing was published",
    )


def worst_reasons(quarantine: Path, most: int = _WORST) -> list[tuple[str, int, str]]:
    """The columns with the most refused rows: name ("whole row" for none), rows, and the first of them in words."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with pq.ParquetFile(quarantine) as file:
        for batch in file.iter_batches():
            column = batch.column("column")
            for found in pc.value_counts(column).to_pylist():
                counts[found["values"]] += found["counts"]
                if found["values"] not in examples:
                    row = batch.slice(pc.index(column, found["values"]).as_py(), 1).to_pylist()[0]
                    examples[found["values"]] = _told(row)
    worst = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [(column or "whole row", count, examples[column]) for column, count in worst]


def _told(row: Mapping[str, Any]) -> str:
    at = f" row {row['row']}" if row["row"] is not None else ""
    column = f" column {row['column']}" if row["column"] else ""
    return f"{row['file']}{at}{column}: {row['reason']}"
