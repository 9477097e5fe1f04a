"""What a change of schema means for datasets that were written before it, and reading them all the same.

| change                                   | verdict            | the reader of an older dataset                   |
|------------------------------------------|--------------------|--------------------------------------------------|
| nothing, or only domain, rules, source   | compatible         | reads it as it is                                |
| feature removed                          | compatible         | leaves it out                                    |
| optional feature that was required       | compatible         | every row has it                                 |
| int64 that becomes float32               | compatible         | converts it; exact up to 2**24                   |
| feature added                            | with defaults      | fills in its `default`, or what stands for missing |
| required feature that was optional       | with defaults      | fills in its `default`; breaking without one     |
| required feature added without `default` | breaking           |                                                  |
| any other type, shape or encoding        | breaking           |                                                  |
| other class names, or in another order   | breaking; names added at the end are compatible        |                |

Standard library only but for `widen`, which takes and gives tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainers.records.errors import RecordsError
from trainers.records.schema import MISSING_VALUES, Feature, Schema

__all__ = [
    "BREAKING",
    "COMPATIBLE",
    "DEFAULTS",
    "Change",
    "Evolution",
    "SchemaBreaks",
    "compare",
    "stored_as",
    "widen",
]

COMPATIBLE = "compatible"
DEFAULTS = "compatible with defaults"
BREAKING = "breaking"
_ORDER = (COMPATIBLE, DEFAULTS, BREAKING)

# What stands for "missing" in an int64 on its way to a float32: no value that data is likely to hold.
_NONE = -(2**63)


class SchemaBreaks(RecordsError):
    """A dataset can't be read with a newer schema; `evolution` says why."""

    code = "records.schema_breaks"

    def __init__(self, evolution: Evolution, *, hint: str = "") -> None:
        super().__init__(
            "the newer schema breaks with the dataset's: "
            + "; ".join(change.words for change in evolution.changes if change.verdict == BREAKING),
            hint=hint or "read it with its own schema, or prepare it again with the newer one",
        )
        self.evolution = evolution


@dataclasses.dataclass(frozen=True)
class Change:
    """One feature's change: its verdict, and what it is in words."""

    feature: str
    verdict: str
    words: str

    def __post_init__(self) -> None:
        if self.verdict not in _ORDER:
            raise ValueError(f"verdict must be one of {', '.join(_ORDER)}, got {self.verdict!r}")


@dataclasses.dataclass(frozen=True)
class Evolution:
    """All changes from one schema to another, in the order of the features."""

    changes: tuple[Change, ...]

    @property
    def verdict(self) -> str:
        """The worst of the changes' verdicts."""
        return max((change.verdict for change in self.changes), key=_ORDER.index, default=COMPATIBLE)

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  {change.verdict}: {change.words}" for change in self.changes)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The verdict and the changes as JSON values."""
        return {"verdict": self.verdict, "changes": [dataclasses.asdict(change) for change in self.changes]}


def compare(older: Schema, newer: Schema) -> Evolution:
    """What it means to read data of the older schema with the newer one."""
    changes: list[Change] = []
    for feature in newer:
        name = feature.name
        if name not in older:
            changes.append(_added(feature))
            continue
        changes += [Change(name, *change) for change in _changes(older[name], feature)]
    changes += [
        Change(feature.name, COMPATIBLE, f"{feature.name} is no longer there")
        for feature in older
        if feature.name not in newer
    ]
    return Evolution(tuple(changes))


def _added(feature: Feature) -> Change:
    if feature.default is not None:
        words = f"{feature.name} is new; older rows get its default, {feature.default!r}"
        return Change(feature.name, DEFAULTS, words)
    if feature.presence == "required":
        words = f"{feature.name} is new and required, and has no default for older rows"
        return Change(feature.name, BREAKING, words)
    words = f"{feature.name} is new; it is missing in older rows"
    return Change(feature.name, DEFAULTS, words)


def _changes(old: Feature, new: Feature) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    name = new.name
    if old.type != new.type:
        wider = (old.type, new.type) == ("int64", "float32")
        words = f"{name} goes from {old.type} to {new.type}"
        found.append((COMPATIBLE if wider else BREAKING, words))
    if old.shape != new.shape:
        found.append((BREAKING, f"{name} goes from shape {list(old.shape)} to {list(new.shape)}"))
    if old.encoding != new.encoding:
        found.append((BREAKING, f"{name} goes from encoding {old.encoding} to {new.encoding}"))
    if (old.presence, new.presence) == ("required", "optional"):
        found.append((COMPATIBLE, f"{name} may be missing from now on"))
    elif old.presence != new.presence:
        if new.default is None:
            found.append((BREAKING, f"{name} is required now, and has no default for older rows without it"))
        else:
            words = f"{name} is required now; older rows without it get its default, {new.default!r}"
            found.append((DEFAULTS, words))
    if old.names and new.names != old.names:
        grown = (new.names or ())[: len(old.names)] == old.names
        more = ", ".join((new.names or ())[len(old.names) :])
        words = f"{name} has more classes: {more}" if grown else f"{name}'s class names mean other indices"
        found.append((COMPATIBLE if grown else BREAKING, words))
    found += [(COMPATIBLE, words) for words in _domain(old, new)]
    return found


def _domain(old: Feature, new: Feature) -> list[str]:
    """Changes of what the data held, which breaks nothing."""
    before, after = old.domain or {}, new.domain or {}
    words = []
    if "values" in before and "values" in after:
        for text, values in (
            ("grew by", set(after["values"]) - set(before["values"])),
            ("no longer has", set(before["values"]) - set(after["values"])),
        ):
            if values:
                words.append(f"{new.name}'s domain {text} {', '.join(sorted(values))}")
    elif (
        "min" in before and "min" in after and (before["min"], before["max"]) != (after["min"], after["max"])
    ):
        words.append(
            f"{new.name} ranges from {after['min']} to {after['max']}, before from {before['min']} to {before['max']}"
        )
    return words


def stored_as(feature: Feature, stored: Schema) -> Feature:
    """The feature as an older dataset's records hold it, for `parse_example`; then comes `widen`."""
    if feature.name not in stored:
        # No record holds it: all rows get the default.
        return dataclasses.replace(feature, presence="optional")
    old = stored[feature.name]
    if old.presence == "optional" and old.type != feature.type:
        return dataclasses.replace(old, default=_NONE)
    default = feature.default if old.type == feature.type else None
    return dataclasses.replace(old, default=default)


def widen(parsed: Mapping[str, Any], stored: Schema, newer: Schema) -> dict[str, Any]:
    """Parsed tensors of an older dataset as the newer schema has them."""
    import tensorflow as tf

    out = dict(parsed)
    for feature in newer:
        name = feature.name
        if name not in out or name not in stored or stored[name].type == feature.type:
            continue
        values = out[name]
        wide = tf.cast(values, tf.float32)
        if stored[name].presence == "optional" and not feature.ragged:
            default = MISSING_VALUES["float32"] if feature.default is None else feature.default
            wide = tf.where(values == _NONE, tf.constant(default, tf.float32), wide)
        out[name] = wide
    return out
