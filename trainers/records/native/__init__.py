# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""The encoder in C, where it is there: the same bytes as `encode.Encoder`, several times as fast.

`scripts/build-native` compiles encode.c with the machine's C compiler to a library beside it; `make install`
calls it and goes on without where there is no compiler. `make_encoder` takes the library if it was made from
this very encode.c, else numpy's road, and logs which once. The environment's TRAINYARD_NATIVE decides otherwise:

    TRAINYARD_NATIVE=off      numpy's road
    TRAINYARD_NATIVE=PATH     that library, or an error (tests give one built with sanitizers)

The library is called through ctypes, which lets go of the interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from trainers.records.columns import is_bytes
from trainers.records.encode import Encoded, Encoder
from trainers.records.errors import NativeUnavailable

__all__ = ["LIBRARY", "SOURCE", "NativeEncoder", "load", "make_encoder", "source_digest"]

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("encode.c")
LIBRARY = Path(__file__).with_name("libencode.so")
VARIABLE = "TRAINYARD_NATIVE"

_FLOAT, _INT64, _BYTES = range(3)
_PROBLEMS = {
    -1: "the room is too small",
    -2: "an offset leads out of its buffer",
    -3: "no memory",
    -4: "bad column",
}

# Fields of the C struct `column`, all of 8 bytes, in its order.
_FIELDS = (
    "value", "data", "data_size", "offsets", "offset_width", "size", "items", "is_list", "list_offsets",
    "list_width", "list_size", "valid", "valid_at", "key", "key_size",
)  # fmt: skip
_COLUMN = np.dtype([(name, "<i8") for name in _FIELDS])


def source_digest() -> str:
    """The first 16 hex digits of encode.c's SHA-256, which a library of this version carries."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


@functools.cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """The library; NativeUnavailable says why there is none."""
    try:
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.ty_source.restype = ctypes.c_char_p
        library.ty_bound.restype = library.ty_encode.restype = number
        library.ty_bound.argtypes = [pointer, number, number]
        library.ty_encode.argtypes = [pointer, number, number, pointer, number, pointer, ctypes.c_int]
        library.ty_crc32c.restype = ctypes.c_uint32
        library.ty_crc32c.argtypes = [ctypes.c_char_p, number, ctypes.c_int]
        made_from = library.ty_source().decode()
    except (OSError, AttributeError) as e:
        raise NativeUnavailable(f"no native encoder at {path}: {e}", hint="run scripts/build-native") from e
    if made_from != source_digest():
        raise NativeUnavailable(f"{path} is of another version", hint="run scripts/build-native again")
    return library


def make_encoder() -> Encoder:
    """The fastest encoder there is here; all write the same bytes."""
    library = _chosen(os.environ.get(VARIABLE, ""))
    return Encoder() if library is None else NativeEncoder(library)


@functools.cache
def _chosen(setting: str) -> ctypes.CDLL | None:
    if setting == "off":
        log.info("records are encoded by numpy: %s=off", VARIABLE)
        return None
    if setting:
        return load(Path(setting))
    try:
        library = load()
    except NativeUnavailable as e:
        log.info("records are encoded by numpy: %s", e)
        return None
    log.info("records are encoded by %s", LIBRARY)
    return library


class NativeEncoder(Encoder):
    """`Encoder` in C. `hardware=False` computes checksums without the CPU's instruction, for tests."""

    def __init__(self, library: ctypes.CDLL | None = None, *, hardware: bool = True) -> None:
        super().__init__()
        self._library = load() if library is None else library
        self._hardware = int(hardware)

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode every row of a batch of mapped columns, as `Encoder.encode` does."""
        count = batch.num_rows
        named = sorted(zip(batch.schema.names, batch.columns, strict=True), key=lambda c: c[0].encode())
        columns = np.zeros(len(named), _COLUMN)
        keep: list[object] = []  # what the addresses point into
        for i, (name, array) in enumerate(named):
            columns[i] = _describe(name, array, keep)
        if not count:
            return Encoded(np.empty(0, np.uint8), np.zeros(1, np.int64))
        room = self._library.ty_bound(columns.ctypes.data, len(columns), count)
        if room < 0:
            raise ValueError(f"a batch must have sound columns, got {_PROBLEMS[room]}")
        out = self._room(room)
        offsets = np.empty(count + 1, np.int64)
        written = self._library.ty_encode(
            columns.ctypes.data,
            len(columns),
            count,
            out.ctypes.data,
            len(out),
            offsets.ctypes.data,
            self._hardware,
        )
        if written < 0:
            raise ValueError(f"a batch must have sound columns, got {_PROBLEMS[written]}")
        del keep
        return Encoded(out[:written], offsets)


def _describe(name: str, array: pa.Array, keep: list[object]) -> tuple[int, ...]:
    """The fields of a column; TypeError for a type that has no place in an Example, as in `columns`."""
    key = name.encode()
    keep.append(key)
    kind, found = array.type, dict.fromkeys(_FIELDS, 0)
    found["key"] = ctypes.cast(ctypes.c_char_p(key), ctypes.c_void_p).value or 0
    found["key_size"] = len(key)
    buffers = array.buffers()
    keep.append(buffers)
    if array.null_count and buffers[0] is not None:
        found["valid"], found["valid_at"] = buffers[0].address, array.offset
        _check_size(name, buffers[0], (array.offset + len(array) + 7) // 8)
    items = array
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        found["is_list"] = 1
        if pt.is_fixed_size_list(kind):
            items = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
            found["list_size"] = kind.list_size
        else:
            items = array.values
            found["list_width"] = 8 if pt.is_large_list(kind) else 4
            found["list_offsets"] = _address(name, buffers[1], array, found["list_width"], len(array) + 1)
        if items.null_count and array.flatten().null_count:
            raise TypeError(f"column {name!r} has a null inside a list, which an Example can't hold")
    elif items.type not in (pa.float32(), pa.int64()) and not is_bytes(items.type):
        raise TypeError(f"column {name!r} has type {kind}, which must be mapped first: see records.convert")
    _describe_items(name, items, found, keep)
    return tuple(found.values())


def _describe_items(name: str, items: pa.Array, found: dict[str, int], keep: list[object]) -> None:
    kind, count = items.type, len(items)
    buffers = items.buffers()
    keep.append((items, buffers))
    found["items"] = count
    if kind in (pa.float32(), pa.int64()):
        width = 4 if kind == pa.float32() else 8
        found["value"] = _FLOAT if width == 4 else _INT64
        found["data"] = _address(name, buffers[1], items, width, count)
        found["data_size"] = width * count
    elif pt.is_fixed_size_binary(kind):
        found["value"], found["size"] = _BYTES, kind.byte_width
        found["data"] = _address(name, buffers[1], items, kind.byte_width, count)
        found["data_size"] = kind.byte_width * count
    elif is_bytes(kind):
        found["value"] = _BYTES
        found["offset_width"] = 8 if pt.is_large_string(kind) or pt.is_large_binary(kind) else 4
        found["offsets"] = _address(name, buffers[1], items, found["offset_width"], count + 1 if count else 0)
        if buffers[2] is not None:
            found["data"], found["data_size"] = buffers[2].address, buffers[2].size
    else:
        raise TypeError(f"column {name!r} is a list of {kind}, which must be mapped first")


def _address(name: str, buffer: pa.Buffer | None, array: pa.Array, width: int, count: int) -> int:
    """Where `count` values of an array start in its buffer, which must hold them."""
    if buffer is None or not count:
        return 0
    _check_size(name, buffer, (array.offset + count) * width)
    return buffer.address + array.offset * width


def _check_size(name: str, buffer: pa.Buffer, size: int) -> None:
    if buffer.size < size:
        raise ValueError(f"column {name!r} must have a buffer of {size} bytes, got {buffer.size}")
