# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Rows refused by the schema's rules and by the user's own checks, a batch at a time.

Rules are told in records.limits. A check is a function of the user's, named as "module:function":

    def arrives_after_it_leaves(batch: pa.RecordBatch) -> pa.Array:
        return pc.greater(batch["arrival"], batch["departure"])

It is called with batches of mapped columns (see records.convert) and gives a value a row: a bool, true for a good
row (null counts as good), or a string, the reason why the row is refused and null for a good one. What a check
says must depend on the row alone: how rows fall into batches is no promise.

`unique` holds within a unit of the source (a file, or a row group of Parquet): the first row with a value stays.
Up to 16 million values a unit are remembered, by a hash of 64 bits; beyond that new ones are no longer checked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from trainers.job.errors import UserError
from trainers.records.errors import InvalidOption
from trainers.records.schema import Feature, Schema
from trainers.records.split import hash_values
from trainers.records.splits import SplitRule

__all__ = ["CheckFailed", "Rules", "check_name", "load_checks"]

_REMEMBERED = 16_000_000  # hashes, 128 MB
_SHOWN = 60  # characters of a refused value in its reason

Check = Callable[[pa.RecordBatch], Any]
Reasons = dict[int, tuple[str, str]]  # row of the batch -> column, reason


class CheckFailed(UserError):
    """A user's check raised an error, or gave something else than a value a row; `check` names it."""

    code = "records.check"

    def __init__(self, check: str, problem: str) -> None:
        super().__init__(
            f"check {check} {problem}",
            hint="a check takes a pyarrow.RecordBatch and gives a bool or a reason a row",
        )
        self.check = check


def load_checks(names: Sequence[str]) -> list[tuple[str, Check]]:
    """Import the functions of "module:function" names; InvalidOption names the one that can't be."""
    found = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            check = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as e:
            raise InvalidOption("checks", f"be a function that can be imported ({e})", name) from e
        if not callable(check):
            raise InvalidOption("checks", "be a function", name)
        found.append((name, check))
    return found


def check_name(check: str) -> str:
    """The function of a "module:function" name: what a quarantined row's reason starts with."""
    return check.partition(":")[2]


class Rules:
    """The rules and checks of one unit of the source."""

    def __init__(
        self, schema: Schema, checks: Sequence[tuple[str, Check]] = (), split: SplitRule | None = None
    ) -> None:
        """`split` says how rows are dealt: a column that names the split must name one."""
        rules = {f.name: dict(f.rules or {}) for f in schema}
        if split and split.by == "given":
            rules[split.column] |= {"values": list(split.splits)}
        self._features = [(f, rules[f.name]) for f in schema if rules[f.name]]
        self._checks = tuple(checks)
        self._seen = {f.name: _Seen() for f, rules in self._features if rules.get("unique")}
        for feature, rules in self._features:
            if "regex" in rules:
                _try_regex(feature, rules["regex"])

    def __bool__(self) -> bool:
        return bool(self._features or self._checks)

    def refuse(self, batch: pa.RecordBatch) -> Reasons:
        """Which rows break a rule, with the column and the reason; the first one a row."""
        reasons: Reasons = {}
        for feature, rules in self._features:
            column = batch.column(feature.name)
            for name, value in rules.items():
                if name != "unique":
                    for row in np.flatnonzero(_broken(column, name, value)).tolist():
                        reasons.setdefault(row, (feature.name, _reason(column[row], name, value)))
        for name, check in self._checks:
            for row, reason in _checked(name, check, batch).items():
                reasons.setdefault(row, ("", reason))
        # Last, so that a row that is refused anyway doesn't take a value away from a good one.
        for name, seen in self._seen.items():
            column = batch.column(name)
            skip = np.array(column.is_null().to_numpy(zero_copy_only=False))
            skip[list(reasons)] = True
            for row in seen.again(hash_values(column), skip):
                reasons.setdefault(row, (name, f"{_shown(column[row])} is there twice"))
        return reasons


class _Seen:
    """Hashes of the values that were there: sorted, and looked up a batch at a time."""

    def __init__(self) -> None:
        self._old = np.zeros(0, np.uint64)
        self._new: list[np.ndarray] = []

    def again(self, hashes: np.ndarray, skip: np.ndarray) -> list[int]:
        rows = np.flatnonzero(~skip)
        mine = hashes[rows]
        _, first = np.unique(mine, return_index=True)
        twice = np.ones(len(mine), bool)
        twice[first] = False
        for known in (self._old, *self._new):
            if len(known):
                at = np.minimum(np.searchsorted(known, mine), len(known) - 1)
                twice |= known[at] == mine
        fresh = np.sort(mine[~twice])
        if len(fresh) and len(self._old) + sum(map(len, self._new)) < _REMEMBERED:
            self._new.append(fresh)
            if len(self._new) > 16:
                self._old = np.sort(np.concatenate([self._old, *self._new]))
                self._new = []
        return rows[twice].tolist()


def _try_regex(feature: Feature, regex: str) -> None:
    try:
        pc.match_substring_regex(pa.array([""]), regex)
    except pa.ArrowInvalid as e:
        raise InvalidOption("schema", f"have a regex of RE2 for {feature.name} ({e})", regex) from e


def _broken(column: pa.Array, name: str, value: Any) -> np.ndarray:
    """Which rows break a rule; missing values break none."""
    if name in ("min_values", "max_values"):
        lengths = pc.list_value_length(column)
        return _mask(pc.less(lengths, value) if name == "min_values" else pc.greater(lengths, value))
    if pt.is_large_list(column.type):
        parents = pc.list_parent_indices(column).to_numpy()
        out = np.zeros(len(column), bool)
        out[parents[_broken(column.flatten(), name, value)]] = True
        return out
    if name == "min":
        return _mask(pc.less(column, value))
    if name == "max":
        return _mask(pc.greater(column, value))
    if name == "values":
        known = pc.is_in(column, value_set=pa.array(value).cast(column.type))
        return _mask(pc.and_(pc.invert(known), column.is_valid()))
    if name == "regex":
        return _mask(pc.invert(pc.match_substring_regex(column, f"^(?:{value})$")))
    lengths = pc.binary_length(column)
    return _mask(pc.less(lengths, value) if name == "min_length" else pc.greater(lengths, value))


def _mask(broken: pa.Array) -> np.ndarray:
    return broken.fill_null(False).to_numpy(zero_copy_only=False)


def _reason(value: pa.Scalar, name: str, rule: Any) -> str:
    shown = _shown(value)
    if name == "values":
        return f"{shown} is none of {_short(', '.join(repr(v) for v in rule))}"
    if name == "regex":
        return f"{shown} doesn't match {_short(rule)}"
    at, _, what = name.partition("_")
    of = {"length": "bytes", "values": "values"}.get(what, "")
    return f"{shown} is {'below' if at == 'min' else 'above'} {rule:g} {of}".rstrip()


def _shown(value: pa.Scalar) -> str:
    return _short(repr(value.as_py()))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _checked(name: str, check: Check, batch: pa.RecordBatch) -> dict[int, str]:
    """Rows that a check refuses, and why."""
    try:
        found = check(batch)
    except Exception as e:
        raise CheckFailed(name, f"raised {type(e).__name__}: {e}") from e
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    if isinstance(found, np.ndarray) and found.dtype == bool:
        found = pa.array(found)
    if not isinstance(found, pa.Array):
        raise CheckFailed(name, f"gave {type(found).__name__}, not an array")
    if len(found) != batch.num_rows:
        raise CheckFailed(name, f"gave {len(found)} values for {batch.num_rows} rows")
    if pt.is_boolean(found.type):
        bad = np.flatnonzero(~found.fill_null(True).to_numpy(zero_copy_only=False))
        return dict.fromkeys(bad.tolist(), f"{check_name(name)} refuses it")
    if pt.is_null(found.type):
        return {}
    if pt.is_string(found.type) or pt.is_large_string(found.type):
        bad = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
        return {row: f"{check_name(name)}: {found[row].as_py()}" for row in bad.tolist()}
    raise CheckFailed(name, f"gave {found.type}, not bool or string")
