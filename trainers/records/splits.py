"""How rows are dealt to splits: by hash of a key, by time, or as a column says.

Standard library only. What `prepare(split=...)` takes:

    {"by": "hash", "eval": 0.2, "test": 0.1}        shares of keys (see records.split); a row never moves
    {"by": "time", "column": "ts", "eval_from": "2013-03-01", "test_from": "2013-04-01T00:00:00+00:00"}
                                                    rows of that time and later; the rest is for training
    {"by": "given", "column": "split"}              the column holds "train" or "eval"; "test" too with
                                                    "splits": ["train", "eval", "test"]

By time, a row never moves as long as the times stay: later data adds to the last split only. Times are dates or
ISO 8601 (without a zone they are UTC), or numbers for a column of numbers.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from trainers.records.errors import ColumnError, InvalidOption
from trainers.records.manifest import SPLITS
from trainers.records.schema import Feature, Schema

__all__ = ["SplitRule"]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_FIELDS = {
    "hash": {"by", "eval", "test"},
    "time": {"by", "column", "eval_from", "test_from"},
    "given": {"by", "column", "splits"},
}


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """Which split a row belongs to; see the module's text."""

    by: str = "hash"
    column: str = ""
    eval: float = 0.0
    test: float = 0.0
    eval_from: str | int | float | None = None
    test_from: str | int | float | None = None
    given: tuple[str, ...] = ("train", "eval")

    @classmethod
    def parse(cls, rule: Any, eval_fraction: float) -> SplitRule:
        """The rule of JSON values, or the share that `eval_fraction` says; InvalidOption names what is wrong."""
        if rule is None:
            return cls(eval=float(eval_fraction))
        if not isinstance(rule, Mapping) or rule.get("by") not in _FIELDS:
            raise InvalidOption("split", 'be an object whose "by" is hash, time or given', rule)
        unknown = sorted(set(rule) - _FIELDS[rule["by"]])
        if unknown:
            fields = ", ".join(sorted(_FIELDS[rule["by"]]))
            raise InvalidOption("split", f"have no fields but {fields}", ", ".join(unknown))
        values = dict(rule)
        if "splits" in values:
            values["given"] = values.pop("splits")
        found = cls(**values)
        found._check()
        return found

    def _check(self) -> None:
        if self.by == "hash":
            for name in ("eval", "test"):
                value = getattr(self, name)
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
                    raise InvalidOption(f"split.{name}", "be at least 0 and below 1", value)
            if self.eval + self.test >= 1:
                raise InvalidOption("split", "leave a share for train", f"{self.eval} + {self.test}")
            return
        if not isinstance(self.column, str) or not self.column:
            raise InvalidOption("split.column", "be the name of a column", self.column)
        if self.by == "given":
            named = self.given if isinstance(self.given, (list, tuple)) else [self.given]
            if "train" not in named or not set(named) <= set(SPLITS):
                raise InvalidOption(
                    "split.splits", f"be train and some of {', '.join(SPLITS[1:])}", self.given
                )
        if self.by == "time":
            if self.eval_from is None:
                raise InvalidOption("split.eval_from", "say from when on rows are for evaluation", None)
            for name in ("eval_from", "test_from"):
                _checked_time(f"split.{name}", getattr(self, name))

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that rows may go to, in order."""
        if self.by == "given":
            return tuple(split for split in SPLITS if split in self.given)
        wanted = {"train", *(["eval"] if self.eval or self.eval_from is not None else [])}
        wanted |= {"test"} if self.test or self.test_from is not None else set()
        return tuple(split for split in SPLITS if split in wanted)

    def check(self, schema: Schema) -> None:
        """Raise ColumnError or InvalidOption unless the column can be split by."""
        if self.by == "time":
            self.bounds(schema[self.column])
        if self.by == "given" and (schema[self.column].type != "string" or schema[self.column].shape):
            raise ColumnError(
                self.column,
                f"holds {schema[self.column].type}, not the names of splits",
                hint="name a column of text",
            )

    def bounds(self, feature: Feature) -> tuple[float, ...]:
        """Of a split by time, the least value of eval and of test as the feature holds times.

        ColumnError for a column that holds no times; InvalidOption for bounds in the wrong order.
        """
        if feature.type not in ("int64", "float32") or feature.shape:
            raise ColumnError(
                feature.name,
                f"holds {feature.type}, which can't be split by time",
                hint="name a column of dates, timestamps or numbers",
            )
        found = [_in_units_of(feature, time) for time in (self.eval_from, self.test_from) if time is not None]
        if sorted(set(found)) != found:
            raise InvalidOption(
                "split.test_from", f"be later than eval_from, {self.eval_from}", self.test_from
            )
        return tuple(found)

    def content(self) -> dict[str, Any]:
        """The rule as JSON values, as `parse` takes them."""
        values = {name: getattr(self, name) for name in _FIELDS[self.by] - {"splits"}}
        if self.by == "given":
            values["splits"] = list(self.splits)
        return {name: value for name, value in sorted(values.items()) if value is not None}


def _checked_time(option: str, time: Any) -> None:
    if time is None or (isinstance(time, (int, float)) and not isinstance(time, bool)):
        return
    try:
        _instant(time)
    except (ValueError, TypeError) as e:
        raise InvalidOption(option, "be a date, a time by ISO 8601, or a number", time) from e


def _instant(time: str) -> dt.datetime:
    found = dt.datetime.fromisoformat(time.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)


def _in_units_of(feature: Feature, time: str | int | float) -> float:
    """Days for a column of dates, microseconds for timestamps, as records.convert makes them."""
    if not isinstance(time, str):
        return time
    since = _instant(time) - _EPOCH
    if feature.source.startswith("date"):
        return since.days
    if feature.source.startswith("timestamp"):
        return since // dt.timedelta(microseconds=1)
    raise ColumnError(
        feature.name,
        f"holds {feature.source or feature.type}, which can't be compared with {time!r}",
        hint="give eval_from and test_from as numbers, or the column as dates or timestamps",
    )
