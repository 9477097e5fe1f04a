# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Columns that folders' names say: raw/dt=2013-01/part-0.parquet is rows of dt 2013-01, as Hive lays tables out.

A partition is int64 when all its values are whole numbers, a date when all are YYYY-MM-DD, else text. The type
comes from all folders, those that a filter leaves out too, so that it is the same for every window of months.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from trainers.records.errors import ColumnError, InvalidOption, SourceEmpty

__all__ = ["partition_arrays", "partition_values"]

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INT = re.compile(r"-?[0-9]{1,18}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def partition_values(
    source: str, names: Sequence[str], wanted: Mapping[str, Sequence[str]]
) -> dict[str, tuple[tuple[str, Any], ...]]:
    """The partitions of each file that a filter keeps, by its name.

    Raises ColumnError when files disagree on the columns, InvalidOption for a filter on another column,
    SourceEmpty when a wanted value isn't there.
    """
    texts = {name: _parse(name) for name in names}
    columns = [list(found) for found in texts.values()]
    if any(found != columns[0] for found in columns):
        odd = next(name for name, found in texts.items() if list(found) != columns[0])
        raise ColumnError(
            next(iter(set(columns[0]) ^ set(texts[odd])), "="),
            f"is a partition of some files of {source} and not of {odd}",
            hint="give all files the same folders",
        )
    parts = columns[0] if columns else []
    for column, values in wanted.items():
        if column not in parts:
            raise InvalidOption(
                "partitions", f"name partitions of {source}: {', '.join(parts) or 'it has none'}", column
            )
        there = {found[column] for found in texts.values()}
        lacking = [value for value in values if value not in there]
        if lacking:
            raise SourceEmpty(
                f"{source} holds no {column}={lacking[0]}",
                hint=f"it holds {', '.join(sorted(str(value) for value in there)[:20])}",
            )
    converters = {column: _converter([found[column] for found in texts.values()]) for column in parts}
    return {
        name: tuple(
            (column, None if text is None else converters[column](text)) for column, text in found.items()
        )
        for name, found in texts.items()
        if all(found[column] in values for column, values in wanted.items())
    }


def partition_arrays(values: Sequence[tuple[str, Any]], rows: int) -> dict[str, pa.Array]:
    """The columns of some rows of one file."""
    return {name: pa.repeat(pa.scalar(value), rows) for name, value in values}


def _parse(name: str) -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    for part in name.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key:
            out[unquote(key)] = None if value == _NULL else unquote(value)
    return out


def _converter(texts: Sequence[str | None]) -> Callable[[str], Any]:
    present = [text for text in texts if text is not None]
    if present and all(_INT.fullmatch(text) for text in present):
        return int
    if present and all(_DATE.fullmatch(text) for text in present):
        try:
            return _dates(present)
        except ValueError:
            return str
    return str


def _dates(texts: Sequence[str]) -> Callable[[str], Any]:
    for text in texts:
        datetime.date.fromisoformat(text)
    return datetime.date.fromisoformat
