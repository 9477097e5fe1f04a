"""Columns of a query's rows as Arrow arrays: of the type that the database declares, so that every chunk has the same.

PostgreSQL says the type of each column beside the rows. From other databases, and for types that are not listed here,
values come as their driver makes them, and Arrow finds the type of a chunk; `prepare` finds what chunks have in common.

    boolean, integers, floats      as they are
    numeric(p, s)                  decimal of p digits; numeric without a size, or of more than 76 digits, is a float
    date, timestamp, time          as they are; timestamptz in UTC; intervals as durations, a month as 30 days
    text, varchar, char, uuid      text
    json, jsonb                    text, its keys in order
    bytea                          bytes
    arrays                         lists
    enums and other types          the text that the driver gives
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["column", "types_of"]

_NUMERIC = 1700
_JSON = (114, 3802)


def types_of(dialect: str, description: Sequence[Any] | None) -> list[Any]:
    """What a cursor's description says of each column: (type code, precision, scale), or None where it can't tell."""
    if dialect != "postgresql" or description is None:
        return [None] * len(description or ())
    return [(about[1], about[4], about[5]) for about in description]


def column(values: Sequence[Any], declared: tuple[int, int | None, int | None] | None) -> pa.Array:
    """An array of the values of a column; ArrowInvalid or ArrowTypeError where they have no type in common."""
    import pyarrow as pa

    if declared is not None:
        code, precision, scale = declared
        if code in _JSON:
            return pa.array([None if v is None else _json(v) for v in values], pa.string())
        if code == _NUMERIC:
            # psycopg gives 65535 digits for a numeric without a size.
            if precision is None or scale is None or not 0 <= scale <= precision <= 76:
                return pa.array([None if v is None else float(v) for v in values], pa.float64())
            kind = pa.decimal128 if precision <= 38 else pa.decimal256
            return pa.array(values, kind(precision, scale))
        known = _known().get(code)
        if known is not None:
            return pa.array([_plain(v) for v in values], known)
    if any(isinstance(v, dict) for v in values):
        return pa.array([None if v is None else _json(v) for v in values], pa.string())
    return pa.array([_plain(v) for v in values])


def _known() -> dict[int, pa.DataType]:
    """Arrow's types by the numbers of PostgreSQL's own, which are fixed for ever (pg_type.dat)."""
    import pyarrow as pa

    return {
        16: pa.bool_(), 21: pa.int64(), 23: pa.int64(), 20: pa.int64(), 700: pa.float32(), 701: pa.float64(),
        1082: pa.date32(), 1083: pa.time64("us"), 1114: pa.timestamp("us"), 1184: pa.timestamp("us", "UTC"),
        1186: pa.duration("us"), 25: pa.string(), 1043: pa.string(), 1042: pa.string(), 2950: pa.string(),
        17: pa.binary(),
    }  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _plain(value: Any) -> Any:
    """A value as Arrow takes it."""
    if isinstance(value, uuid.UUID):
        return str(value)
    return bytes(value) if isinstance(value, memoryview) else value
