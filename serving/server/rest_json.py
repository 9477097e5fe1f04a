"""JSON bodies of REST requests -> arrays and messages.

Row format (`instances`), column format (`inputs`), `{"b64": ...}` for bytes, NaN and Infinity as bare words,
as strict about types as TF Serving, with its messages where a body is wrong. Raises Refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from serving import tensors
from serving.server.servable import Signature
from serving.server.status import Code, Refused
from serving.stubs import input_pb2

__all__ = [
    "examples_input",
    "feeds",
    "is_row",
    "parse",
    "signature_name",
]

_decode = msgspec.json.Decoder().decode
_FLOAT32 = 1
_EXACT_FLOAT32 = (1 << 24) - 1
# Kinds of NumPy arrays that JSON values may make, by the kind of the tensor they are for.
_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


def _invalid(message: str) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, message)


def _show(value: Any, limit: int = 120) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else f"{text[:limit]}..."


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    if not body:
        raise _invalid("JSON Parse error: The document is empty")
    try:
        try:
            document = _decode(body)
        except msgspec.DecodeError:
            document = json.loads(body)  # slower, but takes NaN and Infinity as TF Serving does
    except RecursionError as e:
        raise _invalid("JSON Parse error: the document is nested too deeply") from e
    except ValueError as e:
        at = f" at offset: {e.pos}" if isinstance(e, json.JSONDecodeError) else ""
        raise _invalid(f"JSON Parse error: Invalid value.{at}") from e
    if not isinstance(document, dict):
        raise _invalid(f"JSON Value: {_show(document)} Is not object")
    return document


def signature_name(document: Mapping[str, Any]) -> str:
    """The signature a request names, "" for the default one."""
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise _invalid(
            f"JSON Value: {_show(document)} not formatted correctly. 'signature_name' key must be a string value."
        )
    return name


def is_row(document: Mapping[str, Any]) -> bool:
    """True for the row format, False for columns; refuses both or neither."""
    if "instances" in document and "inputs" in document:
        raise _invalid(
            f"JSON Value: {_show(document)} Not formatted correctly expecting only one of 'inputs' or "
            "'instances' keys to exist "
        )
    if "instances" not in document and "inputs" not in document:
        raise _invalid("Missing 'inputs' or 'instances' key")
    return "instances" in document


def feeds(document: Mapping[str, Any], signature: Signature) -> dict[str, np.ndarray]:
    """Arrays by input name of a predict request."""
    if not signature.inputs:
        raise _invalid(f"Failed to get input map for signature: {signature.name}")
    if is_row(document):
        return _rows(document["instances"], signature)
    return _columns(document["inputs"], signature)


def _rows(instances: Any, signature: Signature) -> dict[str, np.ndarray]:
    if not isinstance(instances, list):
        raise _invalid(f"JSON Value: {_show(instances)} Excepting 'instances' to be an list/array")
    if not instances:
        raise _invalid("JSON Value: [] No values in 'instances' array")
    names = signature.feeds
    if not _is_object(instances[0]):
        if len(names) > 1:
            raise _invalid(
                "instances is a plain list, but expecting list of objects as multiple input tensors required "
                "as per tensorinfo_map"
            )
        for at, item in enumerate(instances):
            if _is_object(item):
                raise _invalid(f"Expecting value/list but got object at item {at} of input list")
        return {names[0]: _array(instances, signature.inputs[names[0]].dtype)}
    for at, item in enumerate(instances):
        if not _is_object(item):
            raise _invalid(f"Expecting object but got list at item {at} of input list")
        if set(item) != set(names):
            raise _invalid(
                f"Failed to process element: {at} of 'instances' list. JSON object: {_show(item)} keys must be "
                f"equal to: {','.join(names)}"
            )
    return {name: _array([item[name] for item in instances], signature.inputs[name].dtype) for name in names}


def _columns(inputs: Any, signature: Signature) -> dict[str, np.ndarray]:
    names = signature.feeds
    if not _is_object(inputs):
        if len(names) > 1:
            raise _invalid(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required as "
                "per tensorinfo_map"
            )
        return {names[0]: _array(inputs, signature.inputs[names[0]].dtype)}
    for name in names:
        if name not in inputs:
            raise _invalid(f"Missing named input: {name} in 'inputs' object.")
    return {name: _array(inputs[name], signature.inputs[name].dtype) for name in names}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_b64(value)


def _is_b64(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def _array(value: Any, enum: int) -> np.ndarray:
    """A tensor of nested lists, as strict about types as TF Serving."""
    try:
        if enum == tensors.STRING:
            return _strings(value)
        return _numbers(value, enum)
    except RecursionError as e:
        raise _invalid("JSON value is nested too deeply") from e


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
    elif _is_b64(value):
        flat.append(_bytes(value))
    else:
        raise _type_error(value, "string")


def _bytes(value: dict[str, str]) -> bytes:
    text = value["b64"]
    try:  # padding is optional for TF Serving
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as e:
        raise _invalid("Unable to base64 decode") from e


def _numbers(value: Any, enum: int) -> np.ndarray:
    name = tensors.dtype_name(enum)
    try:
        dtype = tensors.numpy_dtype(enum)
        kinds = _KINDS["f" if dtype.name == "bfloat16" else dtype.kind]
    except (tensors.TensorError, KeyError) as e:
        raise Refused(Code.UNIMPLEMENTED, f"Conversion of JSON Value: {_show(value)} to type: {name}") from e
    try:
        raw = np.array(value)
    except (ValueError, OverflowError) as e:
        _shape(value)  # says which list is uneven
        raise _invalid(f"JSON Value: {_show(value)} is not of expected type: {name}") from e
    if raw.size == 0:
        return raw.astype(dtype)
    if raw.dtype.kind not in kinds or (kinds != "b" and _has_bool(value)):
        _shape(value)
        raise _type_error(next(_misfits(value, kinds), value), name)
    if raw.dtype.kind in "iu" and enum == _FLOAT32 and np.abs(raw).max() > _EXACT_FLOAT32:
        raise _invalid(f"Cannot convert JSON value: {raw.max()} to float without loss of precision.")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if raw.min() < limits.min or raw.max() > limits.max:
            raise _invalid(f"JSON Value: {_show(value)} is out of the range of type: {name}")
    with np.errstate(over="ignore"):
        array = raw.astype(dtype)
    if raw.dtype.kind == "f" and np.isinf(array).sum() != np.isinf(raw).sum():
        raise _invalid(f"Cannot convert JSON value: {_show(value)} to {name} without loss of precision.")
    return array


def _has_bool(value: Any) -> bool:
    """NumPy takes true among numbers for 1; TF Serving does not."""
    if not isinstance(value, list):
        return isinstance(value, bool)
    if value and isinstance(value[0], list):
        return any(map(_has_bool, value))
    return bool in set(map(type, value))


def _shape(value: Any) -> tuple[int, ...]:
    """Shape of nested lists; refuses uneven ones with TF Serving's words."""
    shape: list[int] = []
    first = value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    if len(shape) > tensors.MAX_RANK:
        raise _invalid(
            f"JSON value is nested too deeply: {len(shape)} levels, {tensors.MAX_RANK} are possible"
        )
    _check_level(value, shape, 0)
    return tuple(shape)


def _check_level(value: Any, shape: list[int], level: int) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise _invalid(
                f"JSON Value: {_show(value)} found at incorrect level: {level + 1} in the JSON DOM. "
                f"Expected at level: {len(shape)}"
            )
        return
    if level >= len(shape):
        raise _invalid(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise _invalid(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for item in value:
        _check_level(item, shape, level + 1)


def _misfits(value: Any, kinds: str) -> Iterator[Any]:
    """Values that are not of the wanted kind, for the message."""
    if isinstance(value, list):
        for item in value:
            yield from _misfits(item, kinds)
    elif type(value) not in {"b": (bool,), "iu": (int,), "iuf": (int, float)}[kinds]:
        yield value


def _type_error(value: Any, wanted: str) -> Refused:
    kinds = {bool: str(value), str: "String", dict: "Object", list: "Array", int: "Number", float: "Number"}
    kind = kinds.get(type(value), "Null")
    return _invalid(f"JSON Value: {_show(value)} Type: {kind} is not of expected type: {wanted}")


def examples_input(document: Mapping[str, Any]) -> Any:
    """The Input message of a classify or regress request."""
    message = input_pb2.Input()
    with_context = "context" in document
    if with_context:
        _example(document["context"], message.example_list_with_context.context)
    if "examples" not in document:
        raise _invalid(
            f"JSON Value: {_show(document)} When method is classify, key 'examples' is expected and was not found"
        )
    examples = document["examples"]
    if not isinstance(examples, list):
        raise _invalid(f"JSON Value: {_show(document)} Expecting 'examples' value to be an list/array")
    if not examples:
        raise _invalid(f"JSON Value: {_show(document)} 'examples' value is an empty array")
    listed = message.example_list_with_context if with_context else message.example_list
    for item in examples:
        _example(item, listed.examples.add())
    return message


def _example(value: Any, example: Any) -> None:
    if not isinstance(value, dict):
        raise _invalid(f"Example must be JSON object but got JSON {_show(value)}")
    for name, content in value.items():
        items = content if isinstance(content, list) else [content]
        feature = example.features.feature[name]
        kinds = {_kind(name, item) for item in items}
        if len(kinds) > 1:
            raise _invalid(f"Unexpected element type in feature: {name} expecting type: {sorted(kinds)[0]}")
        try:
            if kinds == {"bytes"}:
                feature.bytes_list.value.extend(
                    item.encode() if isinstance(item, str) else _bytes(item) for item in items
                )
            elif kinds == {"float"}:
                feature.float_list.value.extend(items)
            elif kinds == {"int64"}:
                feature.int64_list.value.extend(int(item) for item in items)
        except ValueError as e:
            raise _invalid(f"Feature: {name} has an element out of the range of int64") from e


def _kind(name: str, item: Any) -> str:
    if isinstance(item, str) or _is_b64(item):
        return "bytes"
    if isinstance(item, (bool, int)):
        return "int64"
    if isinstance(item, float):
        return "float"
    raise _invalid(f"Feature: {name} has element with unexpected JSON type: {type(item).__name__}")
