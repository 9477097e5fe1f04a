"""NumPy arrays <-> TensorProto, without TensorFlow.

Reads both ways in which servers write values (`tensor_content` and the typed fields), and writes
`tensor_content`: 5 to 100 times quicker than TensorFlow's own helpers, which matters at one request a call.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = [
    "DTYPES",
    "STRING",
    "TensorError",
    "datatype_of",
    "dtype_name",
    "from_proto",
    "numpy_dtype",
    "to_proto",
]

STRING = 7  # DT_STRING
MAX_RANK = 64  # of NumPy; TensorFlow could do more, models do not
_STRING_BYTES = 32  # of an empty string in memory, here and in TensorFlow: a few bytes may claim very many
_BFLOAT16 = 14
_COMPLEX = {8: "scomplex_val", 18: "dcomplex_val"}
_HALVES = (_BFLOAT16, 19)

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    4: np.dtype(np.uint8),
    5: np.dtype(np.int16),
    6: np.dtype(np.int8),
    STRING: np.dtype(object),
    8: np.dtype(np.complex64),
    9: np.dtype(np.int64),
    10: np.dtype(np.bool_),
    17: np.dtype(np.uint16),
    18: np.dtype(np.complex128),
    19: np.dtype(np.float16),
    22: np.dtype(np.uint32),
    23: np.dtype(np.uint64),
}
_ENUMS = {dtype: enum for enum, dtype in DTYPES.items()}
_FIELDS = {
    1: "float_val",
    2: "double_val",
    3: "int_val",
    4: "int_val",
    5: "int_val",
    6: "int_val",
    9: "int64_val",
    10: "bool_val",
    17: "int_val",
    22: "uint32_val",
    23: "uint64_val",
}
_NAMES = {1: "float", 2: "double", STRING: "string", _BFLOAT16: "bfloat16", 19: "half", 10: "bool"}


class TensorError(ValueError):
    """A tensor message can't be an array: unknown type, impossible shape, or too few bytes."""


def numpy_dtype(enum: int) -> np.dtype[Any]:
    """The NumPy type of a DataType value; raises TensorError where there is none."""
    known = DTYPES.get(enum)
    if known is None and enum == _BFLOAT16:
        import ml_dtypes  # comes with TensorFlow; imported only for models that speak bfloat16

        known = DTYPES[_BFLOAT16] = np.dtype(ml_dtypes.bfloat16)
        _ENUMS[known] = _BFLOAT16
    if known is None:
        raise TensorError(f"data type {enum} is not supported")
    return known


def dtype_name(enum: int) -> str:
    """TensorFlow's name of a DataType value: 1 -> "float", 9 -> "int64"."""
    if enum in _NAMES:
        return _NAMES[enum]
    return DTYPES[enum].name if enum in DTYPES else f"type {enum}"


def datatype_of(dtype: np.dtype[Any]) -> int:
    """The DataType value of a NumPy type; strings of any kind are DT_STRING."""
    if dtype.kind in "OSU":
        return STRING
    enum = _ENUMS.get(dtype.newbyteorder("="))
    if enum is None and dtype.name == "bfloat16":
        numpy_dtype(_BFLOAT16)
        enum = _BFLOAT16
    if enum is None:
        raise TensorError(f"arrays of {dtype} can't be sent as a tensor")
    return enum


def from_proto(proto: Any, *, max_bytes: int | None = None) -> np.ndarray:
    """The array in a TensorProto; strings come as an object array of bytes.

    Fewer typed values than the shape has room for repeat the last one, as in TensorFlow; `max_bytes` bounds
    the array that this may grow into. Raises TensorError on anything that is not one whole tensor.
    """
    dtype = numpy_dtype(proto.dtype)
    if proto.tensor_shape.unknown_rank:
        raise TensorError("the shape must be known, got unknown rank")
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if len(shape) > MAX_RANK:
        raise TensorError(f"{len(shape)} dimensions are too many, {MAX_RANK} are possible")
    if any(size < 0 for size in shape):
        raise TensorError(f"dimensions must be 0 or more, got {shape}")
    count = math.prod(shape)
    width = _STRING_BYTES if proto.dtype == STRING else dtype.itemsize
    if max_bytes is not None and count * width > max_bytes:
        raise TensorError(f"a tensor of shape {shape} is over the limit of {max_bytes} bytes")
    content = proto.tensor_content
    if content and proto.dtype != STRING:
        if len(content) != count * dtype.itemsize:
            raise TensorError(
                f"tensor_content must hold {count * dtype.itemsize} bytes for shape {shape}, got {len(content)}"
            )
        return np.frombuffer(content, dtype).reshape(shape)
    values = _values(proto, dtype)
    if values.size > count:
        raise TensorError(f"{values.size} values don't fit into shape {shape}")
    if values.size < count:
        last: Any = values[-1] if values.size else (b"" if proto.dtype == STRING else 0)
        padded = np.full(count, last, dtype)
        padded[: values.size] = values
        values = padded
    return values.reshape(shape)


def _values(proto: Any, dtype: np.dtype[Any]) -> np.ndarray:
    if proto.dtype == STRING:
        strings = np.empty(len(proto.string_val), object)
        strings[:] = list(proto.string_val)
        return strings
    if proto.dtype in _HALVES:
        return np.array(proto.half_val, np.uint16).view(dtype)
    if proto.dtype in _COMPLEX:
        part = np.float32 if proto.dtype == 8 else np.float64
        parts = np.array(getattr(proto, _COMPLEX[proto.dtype]), part)
        if parts.size % 2:
            raise TensorError("complex values must come in pairs")
        return parts.view(dtype)
    values = np.array(getattr(proto, _FIELDS[proto.dtype]))
    if values.size and _FIELDS[proto.dtype] == "int_val" and dtype.itemsize < 4:
        limits = np.iinfo(dtype)  # int_val holds int32: what does not fit must not wrap around in silence
        if values.min() < limits.min or values.max() > limits.max:
            raise TensorError(f"a value is out of the range of {dtype.name}")
    return values.astype(dtype)


def to_proto(value: Any, proto: Any, *, as_content: bool = True) -> None:
    """Fill an empty TensorProto with an array (or nested lists, numbers, strings).

    `as_content=False` writes the typed fields instead, as TF Serving does by default.
    """
    array = np.asarray(value)
    enum = datatype_of(array.dtype)
    proto.dtype = enum
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if enum == STRING:
        proto.string_val.extend(_as_bytes(item) for item in array.ravel().tolist())
    elif as_content or enum not in _FIELDS:
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("="))
        proto.tensor_content = array.tobytes()
    else:
        getattr(proto, _FIELDS[enum]).extend(array.ravel().tolist())


def _as_bytes(item: Any) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode()
    raise TensorError(f"string tensors must hold str or bytes, got {type(item).__name__}")
