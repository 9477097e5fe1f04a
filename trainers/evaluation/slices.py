"""Slices: the parts of the held-out examples of which metrics are made too. Standard library only, for DAG files.

    "carrier"                                 the values of a feature; of a float, four quantiles
    Values("carrier", top=5)                  "carrier(5)": the five most frequent values, and the others
    Bins("distance", [500, 1000])             "distance[500,1000]": below 500, from 500 to 1000, 1000 and more
    Quantiles("dep_delay", 4)                 "dep_delay[q4]": four parts with as many examples of the train split
    Cross("carrier", Bins("distance", [500])) "carrier*distance[500]": each value with each bin

Each has the text beside it, which the trigger form and a step's spec hold; `parse` reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

from trainers.job.errors import InvalidSpec

__all__ = ["TOP", "Bins", "Cross", "Quantiles", "SliceSpec", "Values", "parse", "texts"]

TOP = 20
"""Values of a feature that have a slice of their own where nothing else is said."""

MOST_SLICES = 20  # specs of one evaluation
_MOST_PARTS = 3  # features of a cross
_MOST_BINS = 50
_NAME = r"[^\[\]()*&\s][^\[\]()*&]*"
_PART = re.compile(
    rf"\s*(?P<name>{_NAME}?)\s*(?:\((?P<top>\d+)\)|\[q(?P<parts>\d+)\]|\[(?P<edges>[^\]]*)\])?\s*"
)


def _named(feature: object) -> None:
    if not isinstance(feature, str) or not re.fullmatch(_NAME, feature):
        raise InvalidSpec("slices", "name a feature, without any of []()*&", feature)


def _whole(value: object, least: int, most: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidSpec("slices", f"have {least} to {most} {what}", value)


@dataclasses.dataclass(frozen=True)
class Values:
    """Each of the `top` most frequent values of a feature, and all others together; a float has quantiles instead."""

    feature: str
    top: int | None = None

    def __post_init__(self) -> None:
        _named(self.feature)
        if self.top is not None:
            _whole(self.top, 1, 1000, "values")

    def __str__(self) -> str:
        return self.feature if self.top is None else f"{self.feature}({self.top})"


@dataclasses.dataclass(frozen=True)
class Bins:
    """A number below the first of `edges`, between each two (the lower one included), and from the last one on."""

    feature: str
    edges: tuple[float, ...]

    def __init__(self, feature: str, edges: Iterable[float]) -> None:
        object.__setattr__(self, "feature", feature)
        object.__setattr__(self, "edges", tuple(edges))
        _named(feature)
        _whole(len(self.edges), 1, _MOST_BINS - 1, "edges")
        numbers = all(isinstance(e, (int, float)) and not isinstance(e, bool) for e in self.edges)
        if not numbers or not all(math.isfinite(e) for e in self.edges):
            raise InvalidSpec("slices", "have finite numbers for edges", list(self.edges))
        if any(a >= b for a, b in itertools.pairwise(self.edges)):
            raise InvalidSpec("slices", "have edges that rise", list(self.edges))

    def __str__(self) -> str:
        return f"{self.feature}[{','.join(f'{edge:.12g}' for edge in self.edges)}]"


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """A number in `parts` parts that hold as many examples each, by the statistics of the records' train split."""

    feature: str
    parts: int = 4

    def __post_init__(self) -> None:
        _named(self.feature)
        _whole(self.parts, 2, _MOST_BINS, "parts")

    def __str__(self) -> str:
        return f"{self.feature}[q{self.parts}]"


@dataclasses.dataclass(frozen=True)
class Cross:
    """Each slice of one feature with each of another, or of two others."""

    parts: tuple[Values | Bins | Quantiles, ...]

    def __init__(self, *parts: str | Values | Bins | Quantiles) -> None:
        object.__setattr__(self, "parts", tuple(_one(p) if isinstance(p, str) else p for p in parts))
        _whole(len(self.parts), 2, _MOST_PARTS, "features to a cross")
        for part in self.parts:
            if not isinstance(part, (Values, Bins, Quantiles)):
                raise InvalidSpec("slices", "be crosses of features", part)
        if len({part.feature for part in self.parts}) < len(self.parts):
            raise InvalidSpec("slices", "cross different features", str(self))

    def __str__(self) -> str:
        return "*".join(map(str, self.parts))


SliceSpec = Values | Bins | Quantiles | Cross


def _one(text: str) -> Values | Bins | Quantiles:
    found = _PART.fullmatch(text)
    if not found or not found["name"]:
        how = 'be like "carrier", "carrier(5)", "distance[500,1000]", "distance[q4]" or "carrier*origin"'
        raise InvalidSpec("slices", how, text)
    name = found["name"].strip()
    if found["top"] is not None:
        return Values(name, int(found["top"]))
    if found["parts"] is not None:
        return Quantiles(name, int(found["parts"]))
    if found["edges"] is None:
        return Values(name)
    try:
        edges = [float(edge) for edge in found["edges"].split(",")]
    except ValueError as e:
        raise InvalidSpec("slices", "have numbers for edges", text) from e
    return Bins(name, edges)


def parse(value: str | SliceSpec) -> SliceSpec:
    """A slice of its text; raises InvalidSpec."""
    if isinstance(value, (Values, Bins, Quantiles, Cross)):
        return value
    if not isinstance(value, str):
        raise InvalidSpec("slices", "be texts, or Values, Bins, Quantiles and Cross", value)
    parts = value.split("*")
    return _one(value) if len(parts) == 1 else Cross(*map(_one, parts))


def texts(values: Sequence[str | SliceSpec]) -> list[str]:
    """The texts of slices, each once, checked; raises InvalidSpec."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidSpec("slices", "be a list", values)
    if len(values) > MOST_SLICES:
        raise InvalidSpec("slices", f"be at most {MOST_SLICES}", len(values))
    return list(dict.fromkeys(str(parse(value)) for value in values))
