"""JSON bodies of REST requests -> arrays and messages.

Row format (`instances`), column format (`inputs`), `{"b64": ...}` for bytes, NaN and Infinity as bare words,
as strict about types as TF Serving, with its messages where a body is wrong. Raises Refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import orjson

from serving import tensors
from serving.server.servable import Signature
from serving.server.status import Code, Refused

__all__ = [
    "EXACT",
    "MAX_FLOAT32",
    "b64_bytes",
    "feeds",
    "invalid",
    "is_b64",
    "is_row",
    "lossy",
    "parse",
    "show",
    "signature_name",
    "type_name",
]

_printer = json.JSONEncoder(default=str, indent=4)
_FLOAT32 = 1
_FLOAT64 = 2
MAX_FLOAT32 = float(np.finfo(np.float32).max)
EXACT = {_FLOAT32: (1 << 24) - 1, _FLOAT64: (1 << 53) - 1}
"""The largest whole number that TF Serving takes for exact, by DataType."""
# Kinds of NumPy arrays that JSON values may make, by the kind of the tensor they are for.
_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


def invalid(message: str) -> Refused:
    """A refusal with INVALID_ARGUMENT."""
    return Refused(Code.INVALID_ARGUMENT, message)


def show(value: Any, limit: int = 120) -> str:
    """A value in TF Serving's way of printing it, cut short: the body is known to who sent it."""
    text = ""
    for part in _printer.iterencode(value):  # piece by piece: no need to print megabytes to cut them off
        text += part
        if len(text) > limit:
            return f"{text[:limit]}..."
    return text


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError:
            document = json.loads(body)  # slower, but takes NaN and Infinity as TF Serving does
            if b"\\u" in body:
                json.dumps(document, ensure_ascii=False).encode()  # refuses half a surrogate pair
    except RecursionError as e:
        raise invalid("JSON Parse error: the document is nested too deeply") from e
    except UnicodeEncodeError as e:
        raise invalid("JSON Parse error: The surrogate pair in string is invalid.") from e
    except ValueError as e:
        at = f" at offset: {e.pos}" if isinstance(e, json.JSONDecodeError) else ""
        raise invalid(f"JSON Parse error: Invalid value.{at}") from e
    if not isinstance(document, dict):
        raise invalid(f"JSON Value: {show(document)} Is not object")
    return document


def signature_name(document: Mapping[str, Any]) -> str:
    """The signature a request names, "" for the default one."""
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(
            f"JSON Value: {show(document)} not formatted correctly. 'signature_name' key must be a string value."
        )
    return name


def is_row(document: Mapping[str, Any]) -> bool:
    """True for the row format, False for columns; refuses both or neither."""
    if "instances" in document and "inputs" in document:
        raise invalid(
            f"JSON Value: {show(document)} Not formatted correctly expecting only one of 'inputs' or "
            "'instances' keys to exist "
        )
    if "instances" not in document and "inputs" not in document:
        raise invalid("Missing 'inputs' or 'instances' key")
    return "instances" in document


def feeds(document: Mapping[str, Any], signature: Signature) -> dict[str, np.ndarray]:
    """Arrays by input name of a predict request."""
    if not signature.inputs:
        raise invalid(f"Failed to get input map for signature: {signature.name}")
    if is_row(document):
        return _rows(document, signature)
    return _columns(document["inputs"], signature)


def _rows(document: Mapping[str, Any], signature: Signature) -> dict[str, np.ndarray]:
    instances = document["instances"]
    if not isinstance(instances, list):
        raise invalid(f"JSON Value: {show(document)} Excepting 'instances' to be an list/array")
    if not instances:
        raise invalid(f"JSON Value: {show(document)} No values in 'instances' array")
    names = signature.feeds
    if not _is_object(instances[0]):
        if len(names) > 1:
            raise invalid(
                "instances is a plain list, but expecting list of objects as multiple input tensors required "
                "as per tensorinfo_map"
            )
        for at, item in enumerate(instances):
            if _is_object(item):
                raise invalid(f"Expecting value/list but got object at item {at} of input list")
        return {names[0]: _batch(instances, signature.inputs[names[0]].dtype, "")}
    for at, item in enumerate(instances):
        if not _is_object(item):
            raise invalid(f"Expecting object but got list at item {at} of input list")
        for key in item:
            if key not in signature.inputs:
                raise invalid(
                    f"Failed to process element: {at} key: {key} of 'instances' list. Error: INVALID_ARGUMENT: "
                    f"JSON object: does not have named input: {key}"
                )
        if len(item) != len(names):
            raise invalid(
                f"Failed to process element: {at} of 'instances' list. JSON object: {show(item)} keys must be "
                f"equal to: {','.join(names)}"
            )
    return {
        name: _batch([item[name] for item in instances], signature.inputs[name].dtype, f" key: {name}")
        for name in names
    }


def _batch(items: list[Any], enum: int, key: str) -> np.ndarray:
    """The items of a row request as one tensor; where that fails, the message names the first bad item."""
    try:
        return _array(items, enum)
    except Refused as whole:
        first = None
        for at, item in enumerate(items):
            where = f"Failed to process element: {at}{key} of 'instances' list. Error: "
            try:
                array = _array(item, enum)
            except Refused as e:
                raise Refused(Code.INVALID_ARGUMENT, f"{where}{e.code.name}: {e.message}") from whole
            if first is None:
                first = array
            elif array.size != first.size:
                raise invalid(
                    f"{where}INVALID_ARGUMENT: Expecting tensor size: {first.size} but got: {array.size}"
                ) from whole
            elif array.shape != first.shape:
                raise invalid(
                    f"{where}INVALID_ARGUMENT: Expecting shape {_dims(first)} but got: {_dims(array)}"
                ) from whole
        raise


def _dims(array: np.ndarray) -> str:
    return f"[{','.join(map(str, array.shape))}]"


def _columns(inputs: Any, signature: Signature) -> dict[str, np.ndarray]:
    names = signature.feeds
    if not _is_object(inputs):
        if len(names) > 1:
            raise invalid(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required as "
                "per tensorinfo_map"
            )
        return {names[0]: _array(inputs, signature.inputs[names[0]].dtype)}
    for name in names:
        if name not in inputs:
            raise invalid(f"Missing named input: {name} in 'inputs' object.")
    return {name: _array(inputs[name], signature.inputs[name].dtype) for name in names}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not is_b64(value)


def is_b64(value: Any) -> bool:
    """True for {"b64": "..."} and nothing else."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def _array(value: Any, enum: int) -> np.ndarray:
    """A tensor of nested lists, as strict about types as TF Serving."""
    try:
        if enum == tensors.STRING:
            return _strings(value)
        return _numbers(value, enum)
    except RecursionError as e:
        raise invalid("JSON value is nested too deeply") from e


def _strings(value: Any) -> np.ndarray:
    shape = _shape(value)
    flat: list[bytes] = []
    _collect_strings(value, flat)
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)


def _collect_strings(value: Any, flat: list[bytes]) -> None:
    if isinstance(value, list):
        for item in value:
            _collect_strings(item, flat)
    elif isinstance(value, str):
        flat.append(value.encode())
    elif is_b64(value):
        flat.append(b64_bytes(value))
    elif isinstance(value, dict):
        raise invalid(f"JSON Value: {show(value)} not formatted correctly for base64 data")
    else:
        raise _type_error(value, "string")


def b64_bytes(value: dict[str, str]) -> bytes:
    """The bytes of {"b64": "..."}."""
    text = value["b64"]
    try:  # padding is optional for TF Serving
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as e:
        raise invalid("Unable to base64 decode") from e


def _numbers(value: Any, enum: int) -> np.ndarray:
    name = tensors.dtype_name(enum)
    try:
        dtype = tensors.numpy_dtype(enum)
        kinds = _KINDS["f" if dtype.name == "bfloat16" else dtype.kind]
    except (tensors.TensorError, KeyError) as e:
        raise Refused(Code.UNIMPLEMENTED, f"Conversion of JSON Value: {show(value)} to type: {name}") from e
    try:
        raw = np.array(value)
        if raw.dtype.kind == "O" and "f" in kinds:  # whole numbers over 64 bits are floats for TF Serving
            raw = np.array(value, np.float64) if all(_leaves(value)) else raw
    except (ValueError, OverflowError) as e:
        _shape(value)  # says which list is uneven
        raise invalid(f"JSON Value: {show(value)} is not of expected type: {name}") from e
    if raw.size == 0:
        return raw.astype(dtype)
    if raw.dtype.kind not in kinds or (kinds != "b" and _has_bool(value, raw.ndim)):
        _shape(value)
        raise _type_error(next(_misfits(value, kinds), value), name)
    if raw.dtype.kind in "iu" and enum in EXACT and not _within(raw, EXACT[enum]):
        limit = EXACT[enum]
        outside = (raw > limit) | (raw < -limit if raw.dtype.kind == "i" else False)
        raise lossy(raw[outside].flat[0].item(), name)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if raw.min() < limits.min or raw.max() > limits.max:
            outside = (raw < limits.min) | (raw > limits.max)
            raise _type_error(raw[outside].flat[0].item(), name)
    with np.errstate(over="ignore"):
        array = raw.astype(dtype)
    if raw.dtype.kind == "f" and np.isinf(array).sum() != np.isinf(raw).sum():
        raise lossy(raw[np.isinf(array) & ~np.isinf(raw)].flat[0].item(), name)
    return array


def _within(array: np.ndarray, limit: int) -> bool:
    return int(array.max()) <= limit and int(array.min()) >= -limit


def _has_bool(value: Any, depth: int) -> bool:
    """NumPy takes true among numbers for 1; TF Serving does not. `depth` is how deep the even lists are nested."""
    if not depth:
        return isinstance(value, bool)
    for _ in range(depth - 1):
        value = chain.from_iterable(value)
    return bool in set(map(type, value))


def _shape(value: Any) -> tuple[int, ...]:
    """Shape of nested lists; refuses uneven ones with TF Serving's words."""
    shape: list[int] = []
    first = value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    if len(shape) > tensors.MAX_RANK:
        raise invalid(
            f"JSON value is nested too deeply: {len(shape)} levels, {tensors.MAX_RANK} are possible"
        )
    _check_level(value, shape, 0)
    return tuple(shape)


def _check_level(value: Any, shape: list[int], level: int) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise invalid(
                f"JSON Value: {show(value)} found at incorrect level: {level + 1} in the JSON DOM. "
                f"Expected at level: {len(shape)}"
            )
        return
    if level >= len(shape):
        raise invalid(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise invalid(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for item in value:
        _check_level(item, shape, level + 1)


def _leaves(value: Any) -> Iterator[bool]:
    """Of each value: is it a number?"""
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield type(value) in (int, float)


def _misfits(value: Any, kinds: str) -> Iterator[Any]:
    """Values that are not of the wanted kind, for the message."""
    if isinstance(value, list):
        for item in value:
            yield from _misfits(item, kinds)
    elif type(value) not in {"b": (bool,), "iu": (int,), "iuf": (int, float)}[kinds]:
        yield value


def _type_error(value: Any, wanted: str) -> Refused:
    return invalid(f"JSON Value: {show(value)} Type: {type_name(value)} is not of expected type: {wanted}")


def type_name(value: Any) -> str:
    """RapidJSON's name of a value's type, as TF Serving's messages have it."""
    kinds = {bool: str(value), str: "String", dict: "Object", list: "Array", int: "Number", float: "Number"}
    return kinds.get(type(value), "Null")


def lossy(value: Any, target: str) -> Refused:
    """A refusal of a number that the target type can't hold."""
    return invalid(f"Cannot convert JSON value: {_decimal(value)} to {target} without loss of precision.")


def _decimal(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
