"""Buckets and hashes of many numbers by stats.c; records.sketch does the same with numpy where it isn't there."""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import numpy as np

__all__ = ["Summed", "hashes_below", "summed"]

# Fields of the C struct `facts`, all of 8 bytes, in its order.
_FACTS = np.dtype(
    [
        *((name, "<i8") for name in ("shift", "n", "zeros", "nan", "infinite", "low", "high")),
        ("low_float", "<f8"),
        ("high_float", "<f8"),
    ]
)
_room = threading.local()


class Summed(NamedTuple):
    """Some numbers: `n` finite ones, their range (None of nothing), and buckets as records.sketch has them."""

    n: int
    zeros: int
    nan: int
    infinite: int
    low: int | float | None
    high: int | float | None
    shift: int
    keys: np.ndarray
    counts: np.ndarray


def summed(library: ctypes.CDLL, values: np.ndarray, shift: int, most: int) -> Summed:
    """Count float32 or int64 values by buckets of `shift` bits or, where there are more than `most`, of more."""
    values = _checked(values)
    room = _scratch(len(values))
    facts = np.zeros(1, _FACTS)
    facts["shift"] = shift
    floats = values.dtype == np.float32
    count = library.ty_buckets_of_floats if floats else library.ty_buckets_of_ints
    size = count(values.ctypes.data, len(values), most, facts.ctypes.data, *(row.ctypes.data for row in room))
    _, n, zeros, nan, infinite, low, high, low_float, high_float = facts[0].item()
    if floats:
        low, high = low_float, high_float
    return Summed(
        n, zeros, nan, infinite, low if n else None, high if n else None, int(facts["shift"][0]),
        room[2][:size].copy(), room[3][:size].astype(np.int64),
    )  # fmt: skip


def hashes_below(library: ctypes.CDLL, values: np.ndarray, limit: int) -> np.ndarray:
    """Hashes of float32 or int64 values that are no greater than `limit`."""
    values = _checked(values)
    out = _scratch(len(values))[0]
    kept = library.ty_hashes_below(
        values.ctypes.data, len(values), values.dtype.itemsize, limit, out.ctypes.data
    )
    return out[:kept].copy()


def _checked(values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 or not len(values) or values.dtype not in (np.float32, np.int64):
        raise TypeError(f"values must be some float32 or int64, got {values.dtype} of shape {values.shape}")
    return np.ascontiguousarray(values)


def _scratch(count: int) -> np.ndarray:
    """Four rows of at least `count` words, this thread's own."""
    found: np.ndarray | None = getattr(_room, "rows", None)
    if found is None or found.shape[1] < count:
        found = _room.rows = np.empty((4, count), np.uint64)
    return found
