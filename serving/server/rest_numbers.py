"""The plain case of a predict request, `{"instances": [[0.1, ...], ...]}`, read without a Python object a number.

A body whose `instances` or `inputs` is nested lists of nothing but numbers goes from simdjson's tape straight into an
array: a quarter of the time for a flat row of 784, a twentieth where each number is a list of its own, as images have
them, and nothing for the garbage collector to walk. Whatever else a body is, or what is wrong with it, is not decided
here but by `rest_json`, which knows all formats and all messages.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np
import simdjson

from serving import tensors
from serving.server import rest_json
from serving.server.rest_json import EXACT
from serving.server.servable import Signature

__all__ = ["PlainNumbers", "plain_numbers"]

_NAME = rb'"signature_name"\s*:\s*"(?P<name>[^"\\]*)"'
_HEAD = re.compile(rb"\s*\{\s*(?:" + _NAME + rb'\s*,\s*)?"(?P<format>instances|inputs)"\s*:\s*(?=\[)')
_TAIL = re.compile(rb"\s*(?:,\s*" + _NAME + rb"\s*)?\}\s*")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_INT64 = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"}


class PlainNumbers(NamedTuple):
    """A predict request of plain numbers, in the format of rows or of columns."""

    body: bytes
    values: simdjson.Array
    shape: tuple[int, ...]
    signature_name: str
    row: bool

    def feeds(self, signature: Signature) -> dict[str, np.ndarray]:
        """Arrays by input name; raises Refused."""
        if len(signature.feeds) == 1:
            (name,) = signature.feeds
            array = self.array(signature.inputs[name].dtype)
            if array is not None:
                return {name: array}
        return rest_json.feeds(rest_json.parse(self.body), signature)

    def array(self, enum: int) -> np.ndarray | None:
        """The numbers as a tensor of a DataType; None where they may not be taken as they are.

        A whole number that a float can't hold exactly is refused by TF Serving and a fraction rounded: which of the
        two a large value was is no longer to be seen here.
        """
        try:
            dtype = tensors.numpy_dtype(enum)
        except tensors.TensorError:
            return None
        if enum not in EXACT and dtype.name not in _INT64:
            return None
        try:
            buffer = self.values.as_buffer(of_type="d" if enum in EXACT else "i")
        except (TypeError, ValueError):  # something else among them, or a number out of range
            return None
        raw = np.frombuffer(buffer, np.float64 if enum in EXACT else np.int64)
        if raw.size != math.prod(self.shape):
            return None
        least, most = (-EXACT[enum], EXACT[enum]) if enum in EXACT else _limits(dtype)
        if raw.min() < least or raw.max() > most:
            return None
        return raw.astype(dtype).reshape(self.shape)


def _limits(dtype: np.dtype) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def plain_numbers(body: bytes) -> PlainNumbers | None:
    """What a body asks for, if it may be plain numbers; None for all others."""
    head = _HEAD.match(body)
    if head is None:
        return None
    end = body.rfind(b"]") + 1
    tail = _TAIL.fullmatch(body, end)
    if tail is None or (head["name"] is not None and tail["name"] is not None):
        return None
    shape = _even_shape(body[head.end() : end].translate(None, _NO_STRUCTURE))
    if shape is None:
        return None
    try:
        # A parser of its own: one must not be used again while somebody reads what it has parsed.
        values = simdjson.Parser().parse(body)[head["format"].decode()]
        name = (head["name"] or tail["name"] or b"").decode()
    except (ValueError, RuntimeError):  # no JSON, or nested too deeply
        return None
    return PlainNumbers(body, values, shape, name, head["format"] == b"instances")


def _even_shape(structure: bytes) -> tuple[int, ...] | None:
    """The shape of lists by their brackets and commas alone, None where they are uneven.

    A list of one number and an empty list look alike here: there must be as many numbers as the shape says.
    """
    rank = len(structure) - len(structure.lstrip(b"["))
    if not 0 < rank <= tensors.MAX_RANK:
        return None
    shape: list[int] = []
    unit = b""  # a number
    for level in range(1, rank + 1):
        # The first list of this level: from its bracket to where as many are closed.
        length = structure.find(b"]" * level) + level - (rank - level)
        items, rest = divmod(length - 1, len(unit) + 1)
        if rest or items < 1:
            return None
        shape.append(items)
        unit = b"[" + b",".join([unit] * items) + b"]"
    return tuple(reversed(shape)) if unit == structure else None
