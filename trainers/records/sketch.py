"""Small summaries of many values that add up exactly: in any cut and in any order, to the same bits.

`NumberSketch` is a histogram that finds its own buckets. A float's bits, turned so that they sort as the
numbers do, are cut to their leading bits: one bucket a prefix. It starts with all bits, so few different values
are counted exactly, and drops a bit whenever there are more than `MAX_BUCKETS` occupied buckets. How many are
occupied depends on the values alone, not on their order, and never falls as values come: so the bits that are
left are the same whichever way the data was cut. Counts are exact; what is not known is where in its bucket a
value lies. So a quantile's bucket is exact, and its value known to within that bucket, of which there are up to
2,048 where the data is. Great outliers and small spreads on large numbers (times, years) cost nothing else.

`DistinctSketch` keeps the 1,024 smallest of a 64-bit hash of values. Source: Z. Bar-Yossef and others, Counting
distinct elements in a data stream, RANDOM 2002. Standard error 1/sqrt(1022), 3.1 %.

`Moments` are exact sums of batches' sums, as integers; only the rounding within a batch is left, about 1e-15.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from trainers.records.native import chosen
from trainers.records.native.numbers import Summed, hashes_below, summed

__all__ = ["MAX_BUCKETS", "DistinctSketch", "Moments", "NumberSketch"]

MAX_BUCKETS = 2048
_DENSE = 1 << 17  # counted in a plain array when the values' prefixes span no more than this
_SMALLEST = 1024  # hashes kept to estimate distinct values
_MOST = (1 << 64) - 1


def _keys(values: np.ndarray) -> np.ndarray:
    """Unsigned integers that sort as the floats do; -0.0 must be 0.0 already."""
    bits = values.dtype.itemsize * 8
    signed = values.view(np.int32 if bits == 32 else np.int64)
    unsigned = values.view(np.uint32 if bits == 32 else np.uint64)
    flip = (signed >> (bits - 1)).view(unsigned.dtype) | unsigned.dtype.type(1 << (bits - 1))
    return unsigned ^ flip


def _values(keys: np.ndarray, bits: int) -> np.ndarray:
    """The floats of some keys, as float64."""
    unsigned = keys.astype(np.uint32 if bits == 32 else np.uint64)
    top = unsigned.dtype.type(1 << (bits - 1))
    whole = unsigned.dtype.type((1 << bits) - 1)
    flipped = np.where(unsigned & top, unsigned ^ top, unsigned ^ whole)
    return flipped.view(np.float32 if bits == 32 else np.float64).astype(np.float64)


def _keys_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Keys of finite numbers as they are counted, uint64."""
    kind = np.float32 if bits == 32 else np.float64
    return _keys(values.astype(kind) + kind(0)).astype(np.uint64)  # makes -0.0 a 0.0


_WIDE = _keys_of(np.array([-(2**53), 2**53]), 64)  # whole numbers beyond these round to their neighbours


def _summed(values: np.ndarray, shift: int, bits: int) -> Summed:
    """Buckets of some numbers, as stats.c counts them but for their being as many as there are."""
    nan = infinite = 0
    # The sum is finite when all values are (but for an overflow): cheaper than a mask.
    if values.dtype.kind == "f" and not math.isfinite(float(np.add.reduce(values, dtype=np.float64))):
        finite = np.isfinite(values)
        nan = int(np.isnan(values).sum())
        infinite = int((~finite).sum()) - nan
        values = values[finite]
    if not len(values):
        none = np.zeros(0, np.uint64)
        return Summed(0, 0, nan, infinite, None, None, shift, none, none.astype(np.int64))
    low, high = (found.item() + 0 for found in (values.min(), values.max()))
    zeros = int(len(values) - np.count_nonzero(values))
    if bits == 64 and high - low < _DENSE:
        counts = np.bincount(values - low)
        found = np.flatnonzero(counts)
        keys, counts = _add_up(_keys_of(found + low, bits) >> np.uint64(shift), counts[found])
        return Summed(len(values), zeros, nan, infinite, low, high, shift, keys, counts)
    keys = _keys_of(values, bits) if bits == 64 else _keys(values + np.float32(0))
    if shift:
        keys = keys >> keys.dtype.type(shift)
    least = keys.min()
    if int(keys.max()) - int(least) < _DENSE:
        counts = np.bincount((keys - least).astype(np.int64))
        found = np.flatnonzero(counts)
        keys, counts = found.astype(np.uint64) + np.uint64(least), counts[found]
    else:
        keys.sort()
        first = np.flatnonzero(_first(keys))
        keys, counts = keys[first].astype(np.uint64), np.diff(first, append=len(keys))
    return Summed(len(values), zeros, nan, infinite, low, high, shift, keys, counts)


def _add_up(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts of equal neighbours together; keys must be sorted."""
    if not len(keys):
        return keys, counts
    first = np.flatnonzero(_first(keys))
    return keys[first], np.add.reduceat(counts, first)


def _first(keys: np.ndarray) -> np.ndarray:
    """Which of some sorted keys, at least one, differ from the one before."""
    return np.concatenate([[True], keys[1:] != keys[:-1]])


def packed(numbers: np.ndarray) -> str:
    """Whole numbers of 0 or more as text, "bytes each:base64": as JSON numbers tens of thousands cost seconds."""
    most = int(numbers.max(initial=0))
    width = next(n for n in (1, 2, 4, 8) if most < 1 << 8 * n)
    return f"{width}:{base64.b64encode(numbers.astype(f'<u{width}').tobytes()).decode()}"


def unpacked(text: str | Sequence[int]) -> np.ndarray:
    """The numbers of `packed`, or of a list, as older statistics have them; uint64."""
    if isinstance(text, str):
        width, _, data = text.partition(":")
        return np.frombuffer(base64.b64decode(data, validate=True), f"<u{int(width)}").astype(np.uint64)
    return np.array(text, np.uint64)


class _Part(NamedTuple):
    """Buckets of some of the values; `hashed` when these values are in the sketch of different ones."""

    shift: int
    keys: np.ndarray
    counts: np.ndarray
    hashed: bool


class NumberSketch:
    """How finite numbers are spread; `bits` is 32 for float32 and 64 for int64, which are counted as float64.

    `distinct` holds the hashes of all values as soon as buckets don't tell them apart.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.distinct = DistinctSketch()
        self._parts: list[_Part] = []
        self._buckets: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # until more comes
        self._totals: np.ndarray | None = None

    def add(self, values: np.ndarray) -> Summed:
        """Take in float32 or int64 values and tell of them; NaN and infinities are counted and left out.

        Some 60,000 at once are cheapest.
        """
        library = chosen()
        shift = max((part.shift for part in self._parts), default=0)
        if library is not None and len(values):
            found = summed(library, values, shift, MAX_BUCKETS)
        else:
            found = _summed(values, shift, self.bits)
        if found.n:
            told_apart = not found.shift and not self._too_wide(found.keys)
            if not told_apart:
                finite = values if found.n == len(values) else values[np.isfinite(values)]
                self.distinct.add_numbers(finite)
            self._take(_Part(found.shift, found.keys, found.counts, hashed=not told_apart))
        return found

    def add_counts(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Take in different whole numbers below 2**53, in their order, and how often each was there."""
        self._take(_Part(0, _keys_of(values, self.bits), counts, hashed=False))

    def _take(self, part: _Part) -> None:
        self._buckets = self._totals = None
        self._parts.append(part)
        if len(self._parts) > 1 and sum(len(part.keys) for part in self._parts) > 8 * MAX_BUCKETS:
            self._sum_up()

    def _sum_up(self) -> _Part:
        if not self._parts:
            return _Part(0, np.zeros(0, np.uint64), np.zeros(0, np.int64), hashed=False)
        if len(self._parts) == 1 and len(self._parts[0].keys) <= MAX_BUCKETS:
            return self._parts[0]
        shift = max(part.shift for part in self._parts)
        keys = np.concatenate([part.keys >> np.uint64(shift - part.shift) for part in self._parts])
        counts = np.concatenate([part.counts for part in self._parts])
        if len(self._parts) > 1:
            order = np.argsort(keys, kind="stable")
            keys, counts = keys[order], counts[order]
        keys, counts = _add_up(keys, counts)
        drop = 0
        if len(keys) > MAX_BUCKETS:
            # The highest bit in which neighbours differ says at which shift they fall together.
            apart = keys[1:] ^ keys[:-1]
            apart &= ~(apart >> np.uint64(1))  # or float64 would round 0xFFF... up to another bit
            apart = np.frexp(apart.astype(np.float64))[1]
            drop = int(np.partition(apart, -MAX_BUCKETS)[-MAX_BUCKETS])
        hashed = bool(shift + drop) or self._too_wide(keys)
        if hashed:
            for part in self._parts:
                if not part.hashed:
                    self.distinct.add_numbers(self._numbers(part.keys))
        if drop:
            keys, counts = _add_up(keys >> np.uint64(drop), counts)
        self._parts = [_Part(shift + drop, keys, counts, hashed)]
        return self._parts[0]

    def _too_wide(self, keys: np.ndarray) -> bool:
        """Whether whole numbers of sorted, uncut keys are too great for a float64 to tell apart."""
        return self.bits == 64 and bool(keys[0] <= _WIDE[0] or keys[-1] >= _WIDE[1])

    def _numbers(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of uncut keys, as they were added."""
        return _values(keys, self.bits).astype(np.float32 if self.bits == 32 else np.int64)

    def merge(self, state: Mapping[str, Any], distinct: str | Sequence[int]) -> None:
        """Take in another's `state`, and that of its `distinct`."""
        if state["bits"] != self.bits:
            raise ValueError(f"bits must be {self.bits}, got {state['bits']!r}")
        keys = np.cumsum(unpacked(state["keys"]), dtype=np.uint64)
        if not len(keys):
            return
        hashed = bool(state["shift"]) or self._too_wide(keys)
        if hashed:  # older statistics have hashes always
            self.distinct.merge(distinct)
        counts = unpacked(state["counts"]).astype(np.int64)
        self._take(_Part(state["shift"], keys, counts, hashed))

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as JSON values; keys as differences."""
        shift, keys, counts, _ = self._sum_up()
        steps = keys.copy()
        steps[1:] -= keys[:-1]
        return {"bits": self.bits, "shift": shift, "keys": packed(steps), "counts": packed(counts)}

    @property
    def exact(self) -> bool:
        """Whether each different value has a bucket of its own; greater integers than 2**53 are rounded."""
        return self._sum_up().shift == 0

    def different(self) -> int:
        """Different values; exact up to 2,048 of them, and above that within 3.1 % (standard error)."""
        part = self._sum_up()
        return self.distinct.estimate() if part.hashed else len(part.keys)

    def buckets(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each bucket's least and greatest value, both possible, and its count."""
        if self._buckets is None:
            dropped, keys, counts, _ = self._sum_up()
            shift = np.uint64(dropped)
            ends = (keys << shift) | np.uint64((1 << dropped) - 1)
            self._buckets = _values(keys << shift, self.bits), _values(ends, self.bits), counts
        return self._buckets

    def quantile_bounds(self, share: float) -> tuple[float, float]:
        """Between which two values the quantile lies: that of rank ceil(share * n), as numpy's inverted_cdf."""
        low, high, counts = self.buckets()
        if not len(low):
            return math.nan, math.nan
        if self._totals is None:
            self._totals = np.cumsum(counts)
        total = self._totals
        at = int(np.searchsorted(total, max(1, math.ceil(share * float(total[-1])))))
        return float(low[at]), float(high[at])

    def below(self, edges: Sequence[float]) -> np.ndarray:
        """How many values lie below each edge; those in an edge's own bucket by even spread over it."""
        low, high, counts = self.buckets()
        points = np.asarray(edges, np.float64)
        if not len(low):
            return np.zeros(len(points))
        total = np.concatenate([[0.0], np.cumsum(counts)])
        at = np.searchsorted(low, points, side="left")  # buckets that begin below the edge
        last = np.maximum(at - 1, 0)
        width = high[last] - low[last]
        part = np.where(width > 0, (points - low[last]) / np.where(width > 0, width, 1), 1.0)
        inside = np.clip(part, 0, 1) * counts[last]
        return np.where(at > 0, total[last] + inside, 0.0)


def _hashes(values: np.ndarray) -> np.ndarray:
    """Hashes of numbers: the finaliser of MurmurHash3 (A. Appleby), without its last step."""
    bits = np.int32 if values.dtype.itemsize == 4 else np.int64
    keys = (values + values.dtype.type(0)).view(bits).astype(np.uint64)
    keys = (keys ^ (keys >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return (keys ^ (keys >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)


class DistinctSketch:
    """About how many different values there are."""

    def __init__(self) -> None:
        self._smallest = np.zeros(0, np.uint64)

    def add(self, hashes: np.ndarray) -> None:
        """Take in 64-bit hashes of values."""
        self._add(len(hashes), lambda limit: hashes[hashes <= np.uint64(limit)])

    def add_numbers(self, values: np.ndarray) -> None:
        """Take in float32 or int64 values; equal numbers of one type are the same value."""
        library = chosen()
        if library is not None:
            self._add(len(values), lambda limit: hashes_below(library, values, limit))
        elif len(values):
            self.add(_hashes(values))

    def _add(self, count: int, below: Callable[[int], np.ndarray]) -> None:
        if not count:
            return
        limit = int(self._smallest[-1]) if not self.exact else _MOST
        # Were all values different, some four times as many as are kept would be below this: mostly enough.
        guess = min(limit, _MOST // count * (4 * _SMALLEST) if count > 4 * _SMALLEST else _MOST)
        for most in (guess, limit):
            found = np.concatenate([self._smallest, below(most)])
            found.sort()
            found = found[_first(found)] if len(found) else found
            if most == limit or int(np.searchsorted(found, np.uint64(most), "right")) >= _SMALLEST:
                self._smallest = found[:_SMALLEST].copy()
                return

    def merge(self, state: str | Sequence[int]) -> None:
        """Take in another's `state`."""
        self.add(unpacked(state))

    def state(self) -> str:
        """All that `merge` needs, as a JSON value."""
        return packed(self._smallest)

    @property
    def exact(self) -> bool:
        """Whether `estimate` is the number itself."""
        return len(self._smallest) < _SMALLEST

    def estimate(self) -> int:
        """Different values, within 3.1 % (standard error) above 1,023 of them."""
        if self.exact:
            return len(self._smallest)
        return round((_SMALLEST - 1) / (float(self._smallest[-1]) / 2.0**64))


class _Sum:
    """A sum of floats without rounding: an integer times 2**-_SCALE."""

    _SCALE = 2200  # of the smallest float's square

    def __init__(self) -> None:
        self.units = 0

    def add(self, number: float, times: int = 1, square: bool = False) -> None:
        top, bottom = float(number).as_integer_ratio()
        power = bottom.bit_length() - 1
        if square:
            top, power = top * top, 2 * power
        self.units += (top * times) << (self._SCALE - power)

    def fraction(self) -> Fraction:
        return Fraction(self.units, 1 << self._SCALE)

    def state(self) -> list[Any]:
        if not self.units:
            return ["0", 0]
        zeros = (self.units & -self.units).bit_length() - 1
        return [format(self.units >> zeros, "x"), zeros]

    def merge(self, state: Sequence[Any]) -> None:
        self.units += int(state[0], 16) << int(state[1])


class Moments:
    """Count, mean and variance of finite numbers."""

    def __init__(self) -> None:
        self.n = 0
        self._sum = _Sum()
        self._squares = _Sum()

    def add(self, values: np.ndarray) -> None:
        """Take in some finite numbers."""
        # From the batch's own mean, so that great numbers of little spread keep their digits.
        wide = values.astype(np.float64)
        mean = float(wide.mean())
        wide -= mean
        # Not by `dot`: BLAS would wake a thread a core for so little, and they spin.
        self.add_moments(len(values), mean, float(np.einsum("i,i->", wide, wide)))

    def add_moments(self, n: int, mean: float, m2: float) -> None:
        """Take in `n` numbers by their mean and the sum of squares about it."""
        self.n += n
        self._sum.add(mean, n)
        self._squares.add(m2)
        self._squares.add(mean, n, square=True)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in another's `state`."""
        self.n += state["n"]
        self._sum.merge(state["sum"])
        self._squares.merge(state["squares"])

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as JSON values."""
        return {"n": self.n, "sum": self._sum.state(), "squares": self._squares.state()}

    @property
    def mean(self) -> float:
        """The mean; NaN of nothing."""
        return float(self._sum.fraction() / self.n) if self.n else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the population; NaN of nothing."""
        if not self.n:
            return math.nan
        mean = self._sum.fraction() / self.n
        return math.sqrt(max(0.0, float(self._squares.fraction() / self.n - mean * mean)))
