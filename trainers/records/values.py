# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""How often each text was there: exactly while there are not too many different ones, then bounds of the frequent ones.

Up to `MAX_DISTINCT` different values, of `MAX_TEXT` bytes in all, each is counted. Beyond that `HEAVY` counters are
left, as J. Misra and D. Gries have them (Finding repeated elements, Science of Computer Programming 2, 1982), merged
as P. Agarwal and others show (Mergeable summaries, PODS 2012): counters of the same value are added up, and when there
are more than `HEAVY`, the count of the first one too many is taken from all. What has been taken is summed up in
`error`: a value was there at least as often as its count, and at most `error` times more often; one without a counter
at most `error` times. As long as texts are short, the
error is at most the number of all values by `HEAVY` + 1, a thousandth.

Exact counts are the same in any cut and order. Bounds always hold, but how tight they are depends on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainers.records.split import hash_values

__all__ = ["HEAVY", "MAX_DISTINCT", "ValueCounts"]

MAX_DISTINCT = 10_000  # more different values than this are no vocabulary
MAX_TEXT = 2 << 20  # bytes of different values, likewise
HEAVY = 1024
_ROWS, _BYTES = 65_536, 4 << 20  # of texts that are counted together


class ValueCounts:
    """Counts of texts; `hashes` of the different ones have to be kept elsewhere from when it isn't `exact`."""

    def __init__(self) -> None:
        self.exact = True
        self.error = 0
        self._waiting: list[pa.Array] = []
        self._rows = self._bytes = 0
        self._parts: list[pa.Table] = []
        self._unhashed: list[pa.Array] = []
        self._state: dict[str, Any] | None = None  # until more comes

    def add(self, array: pa.Array, size: int) -> None:
        """Count the values of a batch, `size` bytes in all."""
        self._state = None
        self._waiting.append(array)
        self._rows += len(array)
        self._bytes += size
        if self._rows >= _ROWS or self._bytes >= _BYTES:
            self._count()

    def _count(self) -> None:
        if self._waiting:
            counts = pc.value_counts(pa.chunked_array(self._waiting))
            self._waiting, self._rows, self._bytes = [], 0, 0
            self._take(counts.field("values"), counts.field("counts"))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in another's `state`."""
        self._state = None
        self._count()
        values, counts = pa.array(state["values"], pa.string()), pa.array(state["counts"], pa.int64())
        self.error += state["error"]
        if not state["exact"]:
            self._overflow()
        self._take(values, counts, hashed=not state["exact"])

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as JSON values: values in their order."""
        if self._state is None:
            self.settle()
            table = self._parts[0].sort_by("values") if self._parts else None
            values, counts = [table[name].to_pylist() for name in table.column_names] if table else ([], [])
            self._state = {"exact": self.exact, "error": self.error, "values": values, "counts": counts}
        return self._state

    def settle(self) -> None:
        """Sum up all that came."""
        self._count()
        self._sum_up()

    @property
    def different(self) -> int:
        """Values with a count of their own, once settled."""
        return sum(map(len, self._parts))

    def new_hashes(self) -> np.ndarray:
        """Hashes of values that no longer are told apart here, each once at least; none while counts are exact."""
        none = np.zeros(0, np.uint64)
        if self.exact:
            return none
        found, self._unhashed = self._unhashed, []
        return np.concatenate([none, *map(hash_values, found)])

    def _take(self, values: pa.Array, counts: pa.Array, *, hashed: bool = False) -> None:
        values = values.cast(pa.string())
        self._parts.append(pa.table({"values": values, "counts": counts}))
        if not self.exact and not hashed:
            self._unhashed.append(values)
        few = sum(map(len, self._parts)) <= 4 * MAX_DISTINCT
        if not (few and sum(map(_text, self._parts)) <= 4 * MAX_TEXT):
            self._sum_up()

    def _sum_up(self) -> None:
        if len(self._parts) > 1:
            groups = pa.concat_tables(self._parts).group_by("values", use_threads=False)
            table = groups.aggregate([("counts", "sum")]).select(["values", "counts_sum"])
            self._parts = [table.rename_columns(["values", "counts"])]
        if self._parts and self.exact:
            table = self._parts[0]
            if len(table) > MAX_DISTINCT or _text(table) > MAX_TEXT:
                self._overflow()
        if self._parts and not self.exact:
            self._cut()

    def _overflow(self) -> None:
        """No more counts of all values from here on; what is there so far is to be hashed."""
        if self.exact:
            self.exact = False
            self._unhashed += [chunk for part in self._parts for chunk in part["values"].chunks]

    def _cut(self) -> None:
        """Leave at most `HEAVY` counters, of `MAX_TEXT` bytes: take the greatest count that can't stay from all."""
        (table,) = self._parts
        counts = table["counts"].to_numpy()
        if len(counts) <= HEAVY and _text(table) <= MAX_TEXT:
            return
        order = np.argsort(-counts, kind="stable")
        sizes = pc.binary_length(table["values"]).to_numpy()[order]
        stay = min(HEAVY, int(np.searchsorted(np.cumsum(sizes), MAX_TEXT, "right")))
        taken = int(counts[order[stay]]) if stay < len(counts) else 0
        self.error += taken
        kept = np.flatnonzero(counts > taken)
        left = pa.table({"values": table["values"].take(pa.array(kept)), "counts": counts[kept] - taken})
        self._parts = [left.combine_chunks()]


def _text(counts: pa.Table) -> int:
    """Bytes of the values of some counts."""
    return pc.sum(pc.binary_length(counts["values"])).as_py() or 0
