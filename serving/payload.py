"""What people write as JSON for a model, as the arrays that a signature takes; and a model's answers as JSON.

    [{"x": 1.0, "y": "a"}, {"x": 2.0, "y": "b"}]      rows
    {"x": [1.0, 2.0], "y": ["a", "b"]}                columns
    [1.0, 2.0]                                        rows of a signature that takes one input
    {"instances": rows}, {"inputs": columns}          the same as TF Serving's REST API has them

Bytes are {"b64": "..."}. A signature that takes serialised tf.train.Examples is given them as such, or rows and
columns of features, which are made into Examples: by `types` where the features' types are known, else whole numbers
become int64, others float, text bytes.

What does not fit raises BadRequest, which says what the signature takes.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serving import tensors
from serving.errors import BadRequest, ModelNotFound
from serving.saved_model import Signature, TensorSpec
from serving.stubs import example_pb2

__all__ = ["arrays_of", "choose", "json_of", "takes"]

_DTYPES = {tensors.dtype_name(enum): dtype for enum, dtype in tensors.DTYPES.items()}
_EXAMPLES = ("examples", "inputs", "input_examples")  # as exporters call the input of serialised Examples


def takes(name: str, signature: Signature) -> str:
    """What a signature takes, for people."""
    inputs = "; ".join(f"{key}: {spec}" for key, spec in sorted(signature.inputs.items()))
    return f"signature {name} takes {inputs or 'nothing'}"


def choose(signatures: Mapping[str, Signature], wanted: str = "") -> str:
    """The signature asked for, else serving_default, else the only one; ModelNotFound lists what there is."""
    name = wanted or (
        "serving_default"
        if "serving_default" in signatures or len(signatures) != 1
        else next(iter(signatures))
    )
    if name not in signatures:
        there = "; ".join(takes(key, signature) for key, signature in sorted(signatures.items()))
        raise ModelNotFound(f"the model has no signature {name!r}", hint=f"it has these: {there or 'none'}")
    return name


def arrays_of(
    document: Any, name: str, signature: Signature, types: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a JSON document for a signature; raises BadRequest."""
    if not signature.inputs:
        return {}
    try:
        if isinstance(document, Mapping) and set(document) - {"signature_name"} in (
            {"instances"},
            {"inputs"},
        ):
            document = document.get("instances", document.get("inputs"))
        only = next(iter(signature.inputs)) if len(signature.inputs) == 1 else ""
        if only and _is_examples(only, signature.inputs[only]):
            found = _examples(document, only, types or {})
            if found is not None:
                return {only: found}
        columns = _columns(document, only)
        _check_names(columns, signature)
        arrays = {key: _array(key, columns[key], signature.inputs[key]) for key in signature.inputs}
        _check_rows(arrays, signature)
    except BadRequest as e:
        raise BadRequest(e.message, hint=takes(name, signature)) from e
    return arrays


def _is_examples(name: str, spec: TensorSpec) -> bool:
    return spec.dtype == "string" and name in _EXAMPLES and (spec.shape is None or len(spec.shape) == 1)


def _columns(document: Any, only: str) -> dict[str, Any]:
    if isinstance(document, Mapping) and set(document) != {"b64"}:
        if not document:
            raise BadRequest("there is no input")
        return dict(document)
    if not isinstance(document, list) or not document:
        raise BadRequest(f"the data must be rows or columns, as JSON, got {_short(document)}")
    rows = [isinstance(row, Mapping) and set(row) != {"b64"} for row in document]
    if not any(rows):
        if not only:
            raise BadRequest("rows must be objects of inputs by name, for a model that takes more than one")
        return {only: document}
    names = set(document[0]) if rows[0] else set()
    for number, (row, is_object) in enumerate(zip(document, rows, strict=True)):
        if not is_object or set(row) != names:
            got = ", ".join(sorted(row)) if is_object else _short(row)
            raise BadRequest(f"row {number} must have {', '.join(sorted(names))} as the first, got {got}")
    return {name: [row[name] for row in document] for name in document[0]}


def _check_names(columns: Mapping[str, Any], signature: Signature) -> None:
    missing = sorted(set(signature.inputs) - set(columns))
    unknown = sorted(set(columns) - set(signature.inputs))
    said = [
        f"{text} {', '.join(names)}" for text, names in (("missing", missing), ("unknown", unknown)) if names
    ]
    if said:
        raise BadRequest(f"inputs don't fit: {'; '.join(said)}")


def _check_rows(arrays: Mapping[str, np.ndarray], signature: Signature) -> None:
    batched = {
        k: len(a) for k, a in arrays.items() if (signature.inputs[k].shape or (0,))[0] is None and a.ndim
    }
    if len(set(batched.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(batched.items()))
        raise BadRequest(f"inputs must have as many rows as each other, got {counts}")


def _array(name: str, value: Any, spec: TensorSpec) -> np.ndarray:
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise BadRequest(f"input {name} is {spec.dtype}, which JSON can't give")
    shape = _shape(name, value)
    flat = list(_leaves(value))
    array = np.empty(len(flat), dtype)
    if dtype.kind == "O":
        array[:] = [_text(name, leaf) for leaf in flat]
    else:
        _fill(name, array, flat, spec)
    array = array.reshape(shape)
    wanted = spec.shape
    if wanted is not None and (
        len(wanted) != array.ndim or any(w not in (None, n) for w, n in zip(wanted, array.shape, strict=True))
    ):
        raise BadRequest(f"input {name} must be {spec}, got shape {list(array.shape)}")
    return array


def _fill(name: str, array: np.ndarray, flat: Sequence[Any], spec: TensorSpec) -> None:
    kind = array.dtype.kind
    for leaf in flat:
        number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        if not (isinstance(leaf, bool) if kind == "b" else number):
            raise BadRequest(f"input {name} must be {spec}, got {_short(leaf)}")
        if kind in "iu" and (not math.isfinite(leaf) or leaf != int(leaf)):
            raise BadRequest(f"input {name} must be whole numbers ({spec}), got {leaf!r}")
        if kind in "iu" and not np.iinfo(array.dtype).min <= leaf <= np.iinfo(array.dtype).max:
            raise BadRequest(f"input {name} must be {spec}, {leaf!r} is out of its range")
    array[:] = flat


def _shape(name: str, value: Any) -> list[int]:
    shape, level = [], value
    while isinstance(level, list):
        shape.append(len(level))
        if not level:
            break
        level = level[0]

    def check(item: Any, sizes: Sequence[int]) -> None:
        if isinstance(item, list) != bool(sizes) or (sizes and len(item) != sizes[0]):
            raise BadRequest(f"input {name} must have lists of equal lengths, got {_short(item)}")
        for inner in item if sizes else ():
            check(inner, sizes[1:])

    check(value, shape)
    return shape


def _leaves(value: Any) -> Any:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _text(name: str, leaf: Any) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode()
    if isinstance(leaf, Mapping) and set(leaf) == {"b64"} and isinstance(leaf["b64"], str):
        try:
            return base64.b64decode(leaf["b64"], validate=True)
        except binascii.Error as e:
            raise BadRequest(f"input {name} has bytes that are not base64: {e}") from e
    raise BadRequest(f'input {name} must be text, or {{"b64": "..."}}, got {_short(leaf)}')


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- features as tf.train.Example


def _examples(document: Any, only: str, types: Mapping[str, str]) -> np.ndarray | None:
    """Serialised Examples of rows or columns of features; None for Examples that are serialised already."""
    if isinstance(document, Mapping):
        if set(document) == {only} or set(document) == {"b64"}:
            return None
        lengths = {name: len(v) if isinstance(v, list) else -1 for name, v in document.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise BadRequest(f"columns of features must be lists of equal lengths, got {lengths}")
        rows = [dict(zip(document, values, strict=True)) for values in zip(*document.values(), strict=True)]
    elif isinstance(document, list) and document and all(isinstance(r, Mapping) for r in document):
        if all(set(row) in ({only}, {"b64"}) for row in document):
            return None
        rows = document
    else:
        return None
    out = np.empty(len(rows), object)
    out[:] = [_example(row, types) for row in rows]
    return out


def _example(row: Mapping[str, Any], types: Mapping[str, str]) -> bytes:
    example = example_pb2.Example()
    for name, value in row.items():
        if value is None:
            continue  # a missing feature is one that isn't there
        leaves = list(_leaves(value))
        kind = types.get(name) or _guess(leaves)
        feature = example.features.feature[name]
        try:
            if kind == "float32":
                feature.float_list.value.extend(leaves)
            elif kind == "int64":
                feature.int64_list.value.extend(leaves)
            elif kind == "uint8":  # pixels lie packed in one value
                feature.bytes_list.value.append(
                    bytes(leaves) if leaves and isinstance(leaves[0], int) else _text(name, value)
                )
            else:
                feature.bytes_list.value.extend(_text(name, leaf) for leaf in leaves)
        except (TypeError, ValueError) as e:
            raise BadRequest(f"feature {name} must be {kind}, got {_short(value)}") from e
    return example.SerializeToString(deterministic=True)


def _guess(leaves: Sequence[Any]) -> str:
    if all(isinstance(leaf, (str, Mapping)) for leaf in leaves):
        return "bytes"
    return "int64" if all(isinstance(leaf, int) for leaf in leaves) else "float32"


def json_of(array: np.ndarray) -> Any:
    """An answer as JSON values; bytes that are no text as {"b64": ...}."""
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(item) for item in value]
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                return {"b64": base64.b64encode(value).decode()}
        return value

    return shown(array.tolist())
