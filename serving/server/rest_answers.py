"""Outputs and results -> JSON bodies of REST answers.

`predictions` for row requests, `outputs` for column ones, `results` for examples; bytes as `{"b64": ...}`
where the output's name ends in `_bytes`, numbers as short as they can be, NaN and Infinity as bare words.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from serving.server.status import Code, Refused

__all__ = ["outputs_body", "results_body"]


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
    finite = all(map(_is_finite, values.values()))
    whole = next(iter(values.values())) if len(values) == 1 else None
    if not row:
        return _dump({"outputs": values if whole is None else whole}, finite)
    if whole is not None:
        return _dump({"predictions": whole}, finite)
    items = [dict(zip(values, item, strict=True)) for item in zip(*values.values(), strict=True)]
    return _dump({"predictions": items}, finite)


def _plain(name: str, array: np.ndarray) -> Any:
    """Nested lists of text, or an array (a NumPy scalar without dimensions) of which JSON knows what it is."""
    if array.dtype.kind in "OSU":
        return _text(array.tolist(), as_b64=name.endswith("_bytes"))
    if array.dtype.kind == "c":
        raise _invalid(f"Failed to write JSON value for tensor type: {array.dtype.name}")
    if array.dtype.name in ("bfloat16", "float16"):
        array = array.astype(np.float32)
    return np.ascontiguousarray(array) if array.ndim else array[()]


def _text(value: Any, *, as_b64: bool) -> Any:
    if isinstance(value, list):
        return [_text(item, as_b64=as_b64) for item in value]
    if as_b64:
        return {"b64": base64.b64encode(value).decode()}
    return value.decode("utf-8", "replace")


def _is_finite(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", "") != "f" or bool(np.isfinite(value).all())


def _dump(value: Any, finite: bool) -> bytes:
    """JSON bytes: 0.2 and not 0.20000000298023224 for a float32; NaN and Infinity as bare words, as of TF Serving."""
    if finite:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(value, default=_listed).encode()


def _listed(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype == np.float32:
        array = array.astype(str).astype(np.float64)  # by way of the shortest decimals
    return array.tolist()


def results_body(response: Any) -> bytes:
    """The answer to a classify or regress request."""
    result = response.result
    if hasattr(result, "classifications"):
        scores = [
            np.array([one.score for one in item.classes], np.float32) for item in result.classifications
        ]
        rows = [
            [[one.label, score] for one, score in zip(item.classes, row, strict=True)]
            for item, row in zip(result.classifications, scores, strict=True)
        ]
        return _dump({"results": rows}, all(map(_is_finite, scores)))
    values = np.array([item.value for item in result.regressions], np.float32)
    return _dump({"results": values}, _is_finite(values))
