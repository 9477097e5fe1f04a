# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""From the types of raw data to the three kinds of values an Example holds.

| raw (Arrow) type                   | feature type, shape | value in the record                              |
|------------------------------------|---------------------|--------------------------------------------------|
| bool                               | int64               | 0 or 1                                           |
| int8 ... int64, uint8 ... uint64   | int64               | the number; a uint64 above 2**63 - 1 is refused  |
| float16, float32, float64          | float32             | rounded; a finite float64 too great is refused   |
| decimal, scale 0, to 18 digits     | int64               | the number                                       |
| decimal, others                    | float32             | rounded                                          |
| date                               | int64               | days since 1970-01-01                            |
| timestamp                          | int64               | microseconds since 1970-01-01 UTC, rounded down  |
| time, duration                     | int64               | microseconds (since midnight), rounded down      |
| string (large, view)               | string              | UTF-8 bytes                                      |
| binary (large, view, fixed size)   | bytes               | the bytes                                        |
| dictionary                         | as its values       | the value, not the index                         |
| list (large) of one of these       | shape [null]        | any number of values, 0 too                      |
| fixed-size list of n of these      | shape [n]           | n values                                         |
| null                               | string, optional    | missing in every row                             |
| null in a column                   | presence optional   | the feature is missing in that row               |
| null inside a list                 |                     | refused: an Example can't say it                 |
| text, where the schema says number | int64, float32      | parsed; what doesn't parse is refused            |

Struct, map, union, and lists of lists have no place in an Example: ColumnError says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from trainers.records.errors import ColumnError
from trainers.records.schema import Feature

__all__ = ["Refused", "convert", "feature_of"]

# Refused rows of one column: index within the batch -> reason.
Refused = dict[int, str]

_DECIMAL_DIGITS = 18  # of an int64
_SHOWN = 60  # characters of a refused value in its reason


def _is_list(kind: pa.DataType) -> bool:
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind) or pt.is_null(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return (
        pt.is_binary(kind)
        or pt.is_large_binary(kind)
        or pt.is_binary_view(kind)
        or pt.is_fixed_size_binary(kind)
    )


def _is_whole(kind: pa.DataType) -> bool:
    small_decimal = pt.is_decimal(kind) and kind.scale == 0 and kind.precision <= _DECIMAL_DIGITS
    moment = pt.is_temporal(kind) and not pt.is_interval(kind)
    return pt.is_boolean(kind) or pt.is_integer(kind) or moment or small_decimal


def _value_type(kind: pa.DataType) -> str | None:
    if pt.is_dictionary(kind):
        return _value_type(kind.value_type)
    for is_kind, name in (
        (_is_whole, "int64"),
        (pt.is_floating, "float32"),
        (pt.is_decimal, "float32"),
        (_is_text, "string"),
        (_is_binary, "bytes"),
    ):
        if is_kind(kind):
            return name
    return None


def feature_of(name: str, kind: pa.DataType) -> Feature:
    """The feature that a column of an Arrow type becomes; ColumnError for a type that can't be one."""
    shape: tuple[int | None, ...] = ()
    item = kind
    if _is_list(kind):
        shape = (kind.list_size,) if pt.is_fixed_size_list(kind) else (None,)
        item = kind.value_type
    value = _value_type(item)
    if value is None or shape == (0,):
        raise ColumnError(
            name,
            f"has type {kind}, which a tf.train.Example can't hold",
            hint="flatten it into columns of numbers, strings or lists of these, or leave it out",
        )
    return Feature(name, value, shape, source=str(kind))


def convert(array: pa.Array, feature: Feature) -> tuple[pa.Array, Refused]:
    """Map a column to its feature's type: float32, int64, string or bytes, or a list of these.

    Refused rows are null in the result; their reasons come with it.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if feature.encoding == "raw":
        return array, {}
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pt.is_null(array.type):
        return pa.nulls(len(array), _target(feature)), {}
    if _is_list(array.type):
        return _convert_list(array, feature)
    if feature.shape:
        return _refuse_all(array, feature, "is one value, wants a list")
    return _convert_values(array, feature)


def _target(feature: Feature) -> pa.DataType:
    value = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.string(), "bytes": pa.binary()}
    kind = value[feature.type]
    return pa.large_list(kind) if feature.shape else kind


def _refuse_all(array: pa.Array, feature: Feature, reason: str) -> tuple[pa.Array, Refused]:
    rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)).tolist()
    return pa.nulls(len(array), _target(feature)), dict.fromkeys(rows, reason)


def _convert_list(array: pa.Array, feature: Feature) -> tuple[pa.Array, Refused]:
    if not feature.shape:
        return _refuse_all(array, feature, "is a list, wants one value")
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    items = array.flatten()  # leaves out what lies under nulls
    if pt.is_dictionary(items.type):
        items = items.dictionary_decode()
    parents = np.repeat(np.arange(len(array)), counts)
    refused: Refused = {}
    if items.null_count:
        nulls = np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))
        refused |= dict.fromkeys(parents[nulls].tolist(), "has a null inside a list")
    values, bad = _convert_values(items, feature)
    refused |= {int(parents[i]): reason for i, reason in bad.items()}
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if not feature.ragged:
        for row in np.flatnonzero(valid & (counts != feature.size)).tolist():
            refused[row] = f"has {counts[row]} values, wants {feature.size}"
    missing = ~valid
    missing[list(refused)] = True
    offsets = np.concatenate([[0], np.cumsum(counts)])
    out = pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing))
    if refused:
        # Take rows anew, so that no null item is left under a refused row.
        out = out.take(pa.array(np.where(missing, None, np.arange(len(array))), pa.int64()))
    return out, refused


def _convert_values(array: pa.Array, feature: Feature) -> tuple[pa.Array, Refused]:
    kind = array.type
    if _value_type(kind) is None:
        return _refuse_all(array, _scalar(feature), f"is {kind}, wants {feature.type}")
    if feature.type == "string":
        return _to_string(array, feature)
    if feature.type == "bytes":
        if not (_is_binary(kind) or _is_text(kind)):
            return _refuse_all(array, _scalar(feature), f"is {kind}, wants bytes")
        return array.cast(pa.binary()), {}
    if _is_text(kind):
        return _parse(array, feature)
    if _is_binary(kind):
        return _refuse_all(array, _scalar(feature), f"is {kind}, wants {feature.type}")
    return _to_int64(array) if feature.type == "int64" else _to_float32(array)


def _scalar(feature: Feature) -> Feature:
    return Feature(feature.name, feature.type)


def _to_string(array: pa.Array, feature: Feature) -> tuple[pa.Array, Refused]:
    if pt.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    # Numbers and dates become their text: only when a given schema asks for it.
    return _cast(array, lambda values: values.cast(pa.string()), pa.string(), "can't be text: {}")


def _to_int64(array: pa.Array) -> tuple[pa.Array, Refused]:
    kind = array.type
    if pt.is_boolean(kind) or pt.is_integer(kind) or pt.is_decimal(kind) or pt.is_floating(kind):
        return _cast(array, lambda values: values.cast(pa.int64()), pa.int64(), "{} is no int64")
    if pt.is_date(kind):
        return array.cast(pa.date32(), safe=False).cast(pa.int32()).cast(pa.int64()), {}
    ticks = array.cast(pa.int64() if kind.bit_width == 64 else pa.int32()).cast(pa.int64())
    factor = {"s": 1_000_000, "ms": 1_000, "us": 1}.get(kind.unit)
    if factor is None:  # nanoseconds; rounded down before 1970 too
        return pa.array(ticks.fill_null(0).to_numpy() // 1000, mask=_nulls(array)), {}
    return _cast(
        ticks, lambda values: pc.multiply_checked(values, factor), pa.int64(), "{} is out of range in us"
    )


def _to_float32(array: pa.Array) -> tuple[pa.Array, Refused]:
    if array.type == pa.float32():
        return array, {}
    if pt.is_temporal(array.type):
        array, _ = _to_int64(array)
    if pt.is_boolean(array.type):
        array = array.cast(pa.uint8())
    wide = array.cast(pa.float64(), safe=False)
    out = wide.cast(pa.float32(), safe=False)
    a, b = (values.fill_null(0).to_numpy(zero_copy_only=False) for values in (wide, out))
    lost = np.flatnonzero(np.isinf(b) & np.isfinite(a))
    if not len(lost):
        return out, {}
    mask = _nulls(array)
    mask[lost] = True
    return pa.array(b, mask=mask), {int(i): f"{a[i].item()!r} doesn't fit float32" for i in lost.tolist()}


def _parse(array: pa.Array, feature: Feature) -> tuple[pa.Array, Refused]:
    """Text to numbers, as Arrow parses them; `source` of the feature may name a date or a bool."""
    kinds = {
        "bool": pa.bool_(),
        "date32[day]": pa.date32(),
        "timestamp[us]": pa.timestamp("us"),
        "timestamp[us, tz=UTC]": pa.timestamp("us", "UTC"),
    }
    kind = kinds.get(feature.source, pa.int64()) if feature.type == "int64" else pa.float64()
    values, refused = _cast(
        array.cast(pa.string()),
        lambda text: pc.utf8_trim_whitespace(text).cast(kind),
        kind,
        "{} is no " + (feature.source or feature.type),
    )
    out, more = _to_int64(values) if feature.type == "int64" else _to_float32(values)
    return out, {**refused, **more}


def _nulls(array: pa.Array) -> np.ndarray:
    return array.is_null().to_numpy(zero_copy_only=False).copy()


def _cast(
    array: pa.Array, cast: Callable[[pa.Array], pa.Array], kind: pa.DataType, reason: str
) -> tuple[pa.Array, Refused]:
    """Cast a whole column; where Arrow refuses, find the rows by halving, so that good ones stay fast."""
    try:
        return cast(array), {}
    except pa.ArrowInvalid:
        if len(array) > 1:
            middle = len(array) // 2
            left, bad = _cast(array.slice(0, middle), cast, kind, reason)
            right, more = _cast(array.slice(middle), cast, kind, reason)
            both = pa.concat_arrays([left, right])
            return both, bad | {row + middle: why for row, why in more.items()}
        return pa.nulls(1, kind), {0: reason.format(_shown(array[0]))}


def _shown(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
