# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Which split and shard a row belongs to: a hash of its key, the same for ever.

A row never moves between train and eval: not when data is added or taken away, not when the number of shards
changes, not from version to version of this code. So the hash is fixed, and written down here:

    mix(x)        SplitMix64's step: x += 0x9E3779B97F4A7C15; x ^= x >> 30; x *= 0xBF58476D1CE4E5B9;
                  x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31          (64 bits, unsigned)
    fold(words)   h = mix(len); for each word: h = mix(h ^ word)
    an integer    fold([x as two's complement of 64 bits])        of any width, so int32 and int64 agree
    bytes, text   h = mix(number of bytes), then a mix for each 8 bytes, little-endian, the last filled with 0
    a float       fold([its float64 bits]), -0.0 as 0.0, every NaN as 0x7FF8000000000000
    a list        fold([hash of each value])
    a null        0

    eval          when hash < eval_fraction * 2**64, so a greater fraction only moves rows from train to eval
    test          when not eval, and hash < (eval + test) * 2**64
    shard         mix(hash ^ 0xD1B54A32D192ED03) modulo the number of shards

Source of mix: G. Steele, D. Lea, C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from trainers.records.errors import ColumnError
from trainers.records.schema import Schema
from trainers.records.splits import SplitRule

__all__ = ["Dealer", "hash_keys", "hash_rows", "hash_text", "hash_values", "is_eval", "mix", "shard_of"]

_MASK = (1 << 64) - 1
_NAN_BITS = np.uint64(0x7FF8000000000000)
_SHARD_SALT = np.uint64(0xD1B54A32D192ED03)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's step on uint64 values."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def is_eval(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which rows are for evaluation."""
    limit = int(fraction * 2.0**64)
    return np.ones(len(hashes), bool) if limit > _MASK else hashes < np.uint64(limit)


class Dealer:
    """Deals rows to the splits of a rule."""

    def __init__(self, rule: SplitRule, schema: Schema) -> None:
        self._rule = rule
        self._bounds = rule.bounds(schema[rule.column]) if rule.by == "time" else ()

    def __call__(self, batch: pa.RecordBatch, hashes: np.ndarray) -> np.ndarray:
        """The index of each row's split among `rule.splits`; the column must be there and hold no null."""
        rule = self._rule
        if rule.by == "time":
            times = batch.column(rule.column).to_numpy(zero_copy_only=False)
            return np.searchsorted(np.array(self._bounds), times, side="right")
        if rule.by == "given":
            return pc.index_in(batch.column(rule.column), pa.array(rule.splits)).to_numpy().astype(np.int64)
        evals = is_eval(hashes, rule.eval)
        if not rule.test:
            return evals.astype(np.int64)
        # Test lies next to eval, so that no share moves when the other is changed within their sum.
        tests = is_eval(hashes, rule.eval + rule.test) & ~evals
        return evals * 1 + tests * (len(rule.splits) - 1)


def shard_of(hashes: np.ndarray, shards: int) -> np.ndarray:
    """The shard of each row; independent of its split."""
    return (mix(hashes ^ _SHARD_SALT) % np.uint64(shards)).astype(np.int64)


def hash_text(texts: list[str]) -> np.ndarray:
    """Hashes of some strings."""
    return _hash_values(pa.array(texts, pa.large_string()))


def hash_keys(name: str, keys: pa.Array) -> np.ndarray:
    """Hashes of a key column; ColumnError for a type that is no key."""
    kind = keys.type
    if not (pt.is_integer(kind) or pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind)):
        raise ColumnError(
            name,
            f"has type {kind}, which makes no key",
            hint="name a key of integers, text, dates or bytes",
        )
    return _hash_values(keys)


def hash_values(values: pa.Array) -> np.ndarray:
    """Hashes of numbers, text or bytes; 0 for nulls."""
    return _hash_values(values)


def hash_rows(batch: pa.RecordBatch) -> np.ndarray:
    """Hashes of whole rows, from columns in the order of their names."""
    hashes = mix(np.full(batch.num_rows, batch.num_columns, np.uint64))
    for name, column in sorted(
        zip(batch.schema.names, batch.columns, strict=True), key=lambda c: c[0].encode()
    ):
        hashes = mix(hashes ^ _hash_name(name))
        hashes = mix(hashes ^ _hash_column(column))
    return hashes


@functools.lru_cache(maxsize=4096)
def _hash_name(name: str) -> np.uint64:
    return hash_text([name])[0]


def _hash_column(array: pa.Array) -> np.ndarray:
    if pt.is_large_list(array.type):
        lengths = np.diff(array.offsets.to_numpy())
        first = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        items = _hash_values(array.flatten())
        hashes = _fold(lengths, lambda rows, i: items[first[rows] + i])
        return _zero_nulls(hashes, array)
    return _hash_values(array)


def _zero_nulls(hashes: np.ndarray, array: pa.Array) -> np.ndarray:
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _hash_values(array: pa.Array) -> np.ndarray:
    kind = array.type
    if pt.is_floating(kind):
        values = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
        bits = (values + 0.0).view(np.uint64).copy()  # adding 0.0 makes -0.0 a 0.0
        bits[np.isnan(values)] = _NAN_BITS
        hashes = mix(mix(np.ones(len(bits), np.uint64)) ^ bits)
    elif pt.is_integer(kind):
        values = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        hashes = mix(mix(np.ones(len(values), np.uint64)) ^ values.view(np.uint64))
    else:
        hashes = _hash_bytes(array.cast(pa.large_binary()))
    return _zero_nulls(hashes, array)


def _hash_bytes(array: pa.Array) -> np.ndarray:
    if not len(array):
        return np.zeros(0, np.uint64)
    offsets = np.frombuffer(array.buffers()[1], "<i8", len(array) + 1, array.offset * 8)
    low, high = int(offsets[0]), int(offsets[-1])
    # Eight zero bytes more, so that the last word of the last value can be read whole.
    data = np.zeros(high - low + 8, np.uint8)
    if high > low:
        data[: high - low] = np.frombuffer(array.buffers()[2], np.uint8, high - low, low)
    words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    starts, lengths = offsets[:-1] - low, np.diff(offsets)

    def word(rows: np.ndarray, i: int) -> np.ndarray:
        left = lengths[rows] - 8 * i
        unused = np.where(left < 8, 64 - 8 * left, 0).astype(np.uint64)
        return words[starts[rows] + 8 * i] & (np.uint64(_MASK) >> unused)

    return _fold(lengths, word, (lengths + 7) // 8)


def _fold(
    lengths: np.ndarray, word: Callable[[np.ndarray, int], np.ndarray], counts: np.ndarray | None = None
) -> np.ndarray:
    """Fold `counts` words a row into a hash that starts from the row's length."""
    counts = lengths if counts is None else counts
    hashes = mix(lengths.astype(np.uint64))
    rows = np.flatnonzero(counts > 0)
    i = 0
    while len(rows):
        hashes[rows] = mix(hashes[rows] ^ word(rows, i))
        i += 1
        rows = rows[counts[rows] > i]
    return hashes
