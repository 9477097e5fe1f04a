# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""The encoder in C, where it is there: the same bytes as `encode.Encoder`, several times as fast.

The library holds the counting of numbers for statistics too: see native/numbers.py.

`scripts/build-native` compiles encode.c and stats.c with the machine's C compiler to a library beside them; `make
install` calls it and goes on without where there is no compiler. `make_encoder` takes the library if it was made from
these very sources, else numpy's road, and logs which once. The environment's TRAINYARD_NATIVE decides otherwise:

    TRAINYARD_NATIVE=off      numpy's road
    TRAINYARD_NATIVE=PATH     that library, or an error (tests give one built with sanitizers)

The library is called through ctypes, which lets go of the interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainers.records.encode import Encoded, Encoder
from trainers.records.errors import NativeUnavailable
from trainers.records.native.describe import Description, Layout

__all__ = ["LIBRARY", "NativeEncoder", "chosen", "load", "make_encoder"]

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libencode.so")
VARIABLE = "TRAINYARD_NATIVE"

# Bytes encoded at once by `pieces`: they are still in a CPU's own cache when they are written.
_PIECE = 512 << 10
_PROBLEMS = {-2: "an offset leads out of its buffer", -3: "no memory", -4: "bad column"}


@functools.cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """The library; NativeUnavailable says why there is none."""
    from trainers.records.native import compile  # not above: it is run as a module, too

    try:
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.ty_source.restype = ctypes.c_char_p
        library.ty_bound.restype = library.ty_encode.restype = number
        library.ty_bound.argtypes = [pointer, number, number]
        library.ty_encode.argtypes = [pointer, *[number] * 3, pointer, number, pointer, ctypes.c_int]
        library.ty_crc32c.restype = ctypes.c_uint32
        library.ty_crc32c.argtypes = [ctypes.c_char_p, number, ctypes.c_int]
        for name in ("ty_buckets_of_floats", "ty_buckets_of_ints"):
            getattr(library, name).restype = number
            getattr(library, name).argtypes = [pointer, number, number, *[pointer] * 5]
        library.ty_hashes_below.restype = number
        library.ty_hashes_below.argtypes = [pointer, number, ctypes.c_int, ctypes.c_uint64, pointer]
        made_from = library.ty_source().decode()
    except (OSError, AttributeError) as e:
        raise NativeUnavailable(f"no native encoder at {path}: {e}", hint="run scripts/build-native") from e
    if made_from != compile.source_digest():
        raise NativeUnavailable(f"{path} is of another version", hint="run scripts/build-native again")
    return library


def make_encoder() -> Encoder:
    """The fastest encoder there is here; all write the same bytes."""
    library = chosen()
    return Encoder() if library is None else NativeEncoder(library)


def chosen() -> ctypes.CDLL | None:
    """The library that is used here; None for numpy's road."""
    return _chosen(os.environ.get(VARIABLE, ""))


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
        self._layout: Layout | None = None  # of the last batch; mostly all have one schema

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode every row of a batch of mapped columns, as `Encoder.encode` does."""
        columns = self._describe(batch)
        room = _checked(self._library.ty_bound(columns.address, columns.count, batch.num_rows))
        return self._encode(columns, 0, batch.num_rows, self._room(room if batch.num_rows else 0))

    def pieces(self, batch: pa.RecordBatch) -> Iterator[Encoded]:
        """The same records, some at a time: they are still in the CPU's cache when they are written."""
        columns = self._describe(batch)
        first, room = 0, _PIECE
        while first < batch.num_rows:
            piece = self._encode(columns, first, batch.num_rows, self._room(room))
            if len(piece):
                first += len(piece)
                yield piece
            else:
                room *= 2

    def _describe(self, batch: pa.RecordBatch) -> Description:
        if self._layout is None or not self._layout.schema.equals(batch.schema):
            self._layout = Layout(batch.schema)
        return self._layout.describe(batch)

    def _encode(self, columns: Description, first: int, rows: int, out: np.ndarray) -> Encoded:
        """Rows from `first` on, as many as there is room for."""
        offsets = np.empty(rows - first + 1, np.int64)
        done = _checked(
            self._library.ty_encode(
                columns.address, columns.count, first, rows, out.ctypes.data, len(out), offsets.ctypes.data,
                self._hardware,
            )
        )  # fmt: skip
        offsets = offsets[: done + 1]
        return Encoded(out[: offsets[-1]], offsets)


def _checked(answer: int) -> int:
    if answer < 0:
        raise ValueError(f"a batch must have sound columns, got {_PROBLEMS[answer]}")
    return answer
