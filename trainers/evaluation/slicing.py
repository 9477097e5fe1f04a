"""Which examples belong to which slice: one pass over batches, four bytes an example and feature.

Values are counted as they come; beyond 10,000 different ones of a feature, new ones are among the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainers.evaluation.slices import TOP, Bins, Cross, Quantiles, SliceSpec, Values
from trainers.job.errors import InvalidSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MOST_GROUPS", "Group", "Slicer"]

MOST_GROUPS = 50
"""Groups of one spec that are shown, the largest; a cross of many values has more."""

_MOST_VALUES = 10_000
_OTHER = -1
_AUTOMATIC_QUANTILES = 4


class Group(NamedTuple):
    """The examples of one slice: its name ("carrier=UA"), the text of its spec, and the rows [n]."""

    name: str
    of: str
    rows: NDArray


class Slicer:
    """Gathers the groups of `specs`; `statistics` are those of the records' train split, for quantiles."""

    def __init__(self, specs: Sequence[SliceSpec], statistics: Mapping[str, Any]) -> None:
        self._specs = list(specs)
        self._columns: dict[str, _Column] = {
            str(part): _Column(part, statistics) for spec in specs for part in _parts(spec)
        }
        self.not_shown: dict[str, int] = {}

    def update(self, features: Mapping[str, Any]) -> None:
        """Take one batch of features; InvalidSpec names one that is not there or has no slices."""
        for column in self._columns.values():
            name = column.part.feature
            if name not in features:
                raise InvalidSpec(
                    "slices", f"name features of the batches: {', '.join(sorted(features))}", name
                )
            column.update(features[name])

    def groups(self) -> Iterator[Group]:
        """All groups that have examples, spec by spec, the largest first (bins in their order)."""
        for spec in self._specs:
            parts = [self._columns[str(part)].finish() for part in _parts(spec)]
            if not parts[0].names:
                continue
            sizes = [len(part.names) for part in parts]
            codes = np.ravel_multi_index([part.codes for part in parts], sizes)
            counts = np.bincount(codes, minlength=int(np.prod(sizes)))
            order = np.argsort(-counts, kind="stable") if len(parts) > 1 else np.arange(len(counts))
            order = [int(code) for code in order if counts[code]]
            if len(order) > MOST_GROUPS:
                self.not_shown[str(spec)] = len(order) - MOST_GROUPS
                order = order[:MOST_GROUPS]
            for code in order:
                which = np.unravel_index(code, sizes)
                name = " & ".join(part.names[i] for part, i in zip(parts, which, strict=True))
                yield Group(name, str(spec), np.flatnonzero(codes == code))


def _parts(spec: SliceSpec) -> tuple[Values | Bins | Quantiles, ...]:
    return spec.parts if isinstance(spec, Cross) else (spec,)


class _Coded(NamedTuple):
    names: list[str]
    codes: NDArray  # [n], indices of names


class _Column:
    """The codes of one feature's examples."""

    def __init__(self, part: Values | Bins | Quantiles, statistics: Mapping[str, Any]) -> None:
        self.part = part
        self._statistics = statistics
        self._edges: NDArray | None = None
        if isinstance(part, Bins):
            self._edges = np.asarray(part.edges, np.float64)
        elif isinstance(part, Quantiles):
            self._edges = self._quantiles(part.parts)
        self._codes: list[NDArray] = []
        self._values: dict[Any, int] = {}

    def update(self, tensor: Any) -> None:
        ragged = hasattr(tensor, "to_tensor")  # lists of any length
        values = np.zeros((0, 0)) if ragged else np.asarray(tensor)
        values = values.reshape(-1) if values.ndim and values.size == values.shape[0] else values
        if values.ndim != 1:
            raise InvalidSpec("slices", "be of features that have one value an example", self.part.feature)
        if self._edges is None and isinstance(self.part, Values) and values.dtype.kind == "f":
            self._edges = self._quantiles(_AUTOMATIC_QUANTILES)
        if self._edges is not None:
            if values.dtype.kind not in "fiub":
                raise InvalidSpec("slices", "have bins of numbers only", str(self.part))
            values = values.astype(np.float64)
            codes = np.searchsorted(self._edges, values, side="right")
            self._codes.append(np.where(np.isnan(values), len(self._edges) + 1, codes).astype(np.int32))
            return
        distinct, inverse = np.unique(values, return_inverse=True)
        codes = np.full(len(distinct), _OTHER, np.int32)
        for i, value in enumerate(distinct.tolist()):
            if value not in self._values and len(self._values) < _MOST_VALUES:
                self._values[value] = len(self._values)
            codes[i] = self._values.get(value, _OTHER)
        self._codes.append(codes[inverse.reshape(-1)])

    def finish(self) -> _Coded:
        codes = np.concatenate(self._codes) if self._codes else np.zeros(0, np.int32)
        return self._by_value(codes) if self._edges is None else self._by_edge(codes)

    def _by_value(self, codes: NDArray) -> _Coded:
        feature = self.part.feature
        known = list(self._values)
        counts = np.bincount(codes[codes >= 0], minlength=len(known))
        most = (self.part.top if isinstance(self.part, Values) else None) or TOP
        # Of equally many the first by name, so that two evaluations show the same.
        order = sorted(range(len(known)), key=lambda i: (-counts[i], _said(known[i])))[:most]
        names = [f"{feature}={_said(known[i])}" for i in order] + [f"{feature}=(other)"]
        to = np.full(len(known) + 1, len(order), np.int64)  # the last one takes _OTHER
        to[order] = np.arange(len(order))
        return _Coded(names if len(codes) else [], to[codes])

    def _by_edge(self, codes: NDArray) -> _Coded:
        feature = self.part.feature
        edges = [f"{edge:.12g}" for edge in self._edges] if self._edges is not None else []
        between = [f"{low}<={feature}<{high}" for low, high in itertools.pairwise(edges)]
        names = [f"{feature}<{edges[0]}", *between, f"{feature}>={edges[-1]}", f"{feature}=(missing)"]
        return _Coded(names, codes.astype(np.int64))

    def _quantiles(self, parts: int) -> NDArray:
        feature = self.part.feature
        known = (self._statistics.get(feature) or {}).get("quantiles")
        if not known:
            raise InvalidSpec(
                "slices",
                "have quantiles of numbers in the records' statistics only; give edges instead",
                feature,
            )
        shares, values = zip(*known, strict=True)
        edges = np.interp(np.arange(1, parts) / parts, shares, values)
        edges = np.unique([float(f"{edge:.6g}") for edge in edges])
        # An edge at the least value would leave the part below it empty.
        return edges[edges > values[0]] if (edges > values[0]).any() else edges[-1:]


def _said(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if text else "(missing)"
