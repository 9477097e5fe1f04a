"""Where the features of a schema lie in a block of rows; standard library only, for writers and readers.

See trainers.records.blocks for what a block is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from trainers.records.errors import InvalidOption
from trainers.records.schema import MISSING_VALUES, Feature, Schema

__all__ = ["PACKED", "BlockShape", "missing_value"]

PACKED = ("float32", "int64")
"""Kinds of numbers that lie side by side in one feature of a block, named after the kind."""


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """How the features of a schema lie in a block: packed numbers with their first column, and the others."""

    packed: dict[str, tuple[tuple[Feature, int], ...]]
    widths: dict[str, int]
    raw: tuple[Feature, ...]
    texts: tuple[Feature, ...]

    @classmethod
    def of(cls, schema: Schema) -> BlockShape:
        """The shape of a schema's blocks; InvalidOption for one with lists of any length."""
        ragged = [feature.name for feature in schema if feature.ragged]
        if ragged:
            raise InvalidOption(
                "layout",
                f"be rows for a schema with lists of any length ({', '.join(ragged)}), which no block can hold; "
                "or give a schema in which they have a fixed shape",
                "blocks",
            )
        packed: dict[str, list[tuple[Feature, int]]] = {kind: [] for kind in PACKED}
        widths = dict.fromkeys(PACKED, 0)
        for feature in schema:
            if feature.encoding == "plain" and feature.type in PACKED:
                packed[feature.type].append((feature, widths[feature.type]))
                widths[feature.type] += feature.size
        others = [f for f in schema if f.encoding != "plain" or f.type not in PACKED]
        return cls(
            {kind: tuple(found) for kind, found in packed.items() if found},
            {kind: width for kind, width in widths.items() if width},
            tuple(f for f in others if f.encoding == "raw"),
            tuple(f for f in others if f.encoding != "raw"),
        )


def missing_value(feature: Feature) -> Any:
    """What a reader gets where a row lacks the feature."""
    return MISSING_VALUES[feature.type] if feature.default is None else feature.default
