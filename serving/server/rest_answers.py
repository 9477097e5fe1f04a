"""Outputs and results -> JSON bodies of REST answers.

`predictions` for row requests, `outputs` for column ones, `results` for examples; bytes as `{"b64": ...}`
where the output's name ends in `_bytes`, numbers as short as they can be, NaN and Infinity as bare words.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from serving.server.status import Code, Refused

__all__ = ["dump", "outputs_body", "results_body"]

_encode = msgspec.json.Encoder().encode


def _invalid(message: str) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, message)


def outputs_body(outputs: Mapping[str, Any], row: bool) -> bytes:
    """The answer to a predict request, in the format of its question."""
    if row:
        size = -1
        for name, array in outputs.items():
            if array.ndim == 0:
                raise _invalid(f"Tensor name: {name} has no shape information ")
            if size not in (-1, len(array)):
                raise _invalid(
                    f"Tensor name: {name} has inconsistent batch size: {len(array)} expecting: {size}"
                )
            size = len(array)
    values = {name: _plain(name, np.asarray(array)) for name, array in outputs.items()}
    if not row:
        return dump({"outputs": next(iter(values.values())) if len(values) == 1 else values})
    if len(values) == 1:
        return dump({"predictions": next(iter(values.values()))})
    return dump(
        {"predictions": [dict(zip(values, item, strict=True)) for item in zip(*values.values(), strict=True)]}
    )


def _plain(name: str, array: np.ndarray) -> Any:
    if array.dtype.kind in "OSU":
        return _text(array.tolist(), as_b64=name.endswith("_bytes"))
    if array.dtype == np.float32 or array.dtype.name == "bfloat16" or array.dtype == np.float16:
        return _shortest(array.astype(np.float32)).tolist()
    if array.dtype.kind == "c":
        raise _invalid(f"Failed to write JSON value for tensor type: {array.dtype.name}")
    return array.tolist()


def _text(value: Any, *, as_b64: bool) -> Any:
    if isinstance(value, list):
        return [_text(item, as_b64=as_b64) for item in value]
    if as_b64:
        return {"b64": base64.b64encode(value).decode()}
    return value.decode("utf-8", "replace")


def _shortest(array: np.ndarray) -> np.ndarray:
    """float64s that print as the shortest decimals of the given float32s: 0.2, not 0.20000000298023224."""
    wide = array.astype(np.float64)
    result = wide.copy()
    open_ = np.isfinite(wide) & (wide != 0) & (np.abs(wide) < 1e15) & (np.abs(wide) > 1e-12)
    with np.errstate(all="ignore"):
        magnitude = np.floor(np.log10(np.abs(wide)))
        for digits in (6, 7, 8, 9):
            power = digits - 1 - magnitude
            scale = 10.0 ** np.abs(power)
            rounded = np.where(power >= 0, np.round(wide * scale) / scale, np.round(wide / scale) * scale)
            fits = open_ & (rounded.astype(np.float32) == array)
            result[fits] = rounded[fits]
            open_ &= ~fits
            if not open_.any():
                break
    return result


def dump(value: Any) -> bytes:
    """JSON bytes; NaN and Infinity as bare words, as TF Serving writes them."""
    if _all_finite(value):
        return _encode(value)
    return json.dumps(value).encode()


def _all_finite(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, list):
        return all(map(_all_finite, value))
    if isinstance(value, dict):
        return all(map(_all_finite, value.values()))
    return True


def results_body(response: Any) -> bytes:
    """The answer to a classify or regress request."""
    result = response.result
    if hasattr(result, "classifications"):
        scores = [[one.score for one in item.classes] for item in result.classifications]
        rows = [_shortest(np.array(row, np.float32)).tolist() for row in scores]
        return dump(
            {
                "results": [
                    [[one.label, score] for one, score in zip(item.classes, row, strict=True)]
                    for item, row in zip(result.classifications, rows, strict=True)
                ]
            }
        )
    values = np.array([item.value for item in result.regressions], np.float32)
    return dump({"results": _shortest(values).tolist()})
