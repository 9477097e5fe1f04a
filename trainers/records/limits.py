"""What a schema may demand of a feature: rules that refuse rows, and thresholds of drift. Standard library only.

    "rules": {"min": 0, "max": 120}                        numbers, each value of a list too
    "rules": {"values": ["a", "b"]}                        numbers or text: nothing else
    "rules": {"regex": "[A-Z]{3}", "min_length": 1, "max_length": 80}     text; the whole of it, lengths in bytes
    "rules": {"min_values": 1, "max_values": 20}           lists
    "rules": {"unique": true}                              no value twice within a unit of the source

    "drift": {"js": {"warn": 0.05, "fail": 0.2}, "missing": {"fail": 0.1}, "new_values": {"fail": 0.0}}

Regular expressions are those of RE2 (linear time, no look-around). Measures of drift: records.drift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.records.schema import Feature

__all__ = ["MEASURES", "RULES", "check_rules", "check_thresholds"]

RULES = ("min", "max", "values", "regex", "min_length", "max_length", "min_values", "max_values", "unique")
MEASURES = ("js", "linf", "missing", "new_values", "vanished_values", "out_of_range")


def check_rules(feature: Feature) -> None:
    """ValueError for a rule that there isn't, or that doesn't go with the feature's type."""
    rules = feature.rules
    if rules is None:
        return
    where = f"rules of {feature.name!r}"
    if not isinstance(rules, Mapping):
        raise ValueError(f"{where} must be an object, got {rules!r}")
    number, text = feature.type in ("float32", "int64"), feature.type in ("string", "bytes")
    fits = {
        **dict.fromkeys(("min", "max"), number),
        "values": number or feature.type == "string",
        "regex": feature.type == "string",
        **dict.fromkeys(("min_length", "max_length"), text),
        **dict.fromkeys(("min_values", "max_values"), feature.ragged),
        "unique": not feature.shape and (feature.type in ("int64", "string")),
    }
    for name, value in rules.items():
        if name not in fits:
            raise ValueError(f"{where} must be some of {', '.join(RULES)}, got {name!r}")
        if not fits[name]:
            raise ValueError(f"{where} must fit {feature.type} {list(feature.shape)}, got {name!r}")
        _check_value(f"rule {name} of {feature.name!r}", name, value)


def _check_value(where: str, name: str, value: Any) -> None:
    if name == "unique":
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, got {value!r}")
    elif name == "values":
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} must be a list that isn't empty, got {value!r}")
    elif name == "regex":
        try:
            re.compile(value)
        except (re.error, TypeError) as e:
            raise ValueError(f"{where} must be a regular expression, got {value!r}: {e}") from e
    elif not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{where} must be a number, got {value!r}")


def check_thresholds(feature: Feature) -> None:
    """ValueError for thresholds of drift that are none."""
    where = f"drift of {feature.name!r}"
    if feature.drift is None:
        return
    if not isinstance(feature.drift, Mapping):
        raise ValueError(f"{where} must be an object, got {feature.drift!r}")
    for measure, limits in feature.drift.items():
        if measure not in MEASURES:
            raise ValueError(f"{where} must be some of {', '.join(MEASURES)}, got {measure!r}")
        check_limits(f"{where}, {measure},", limits)


def check_limits(where: str, limits: Any) -> None:
    """ValueError unless it is {"warn": number or null, "fail": number or null}."""
    if not isinstance(limits, Mapping) or not set(limits) <= {"warn", "fail"}:
        raise ValueError(f'{where} must be an object of "warn" and "fail", got {limits!r}')
    for name, limit in limits.items():
        if limit is not None and (
            not isinstance(limit, (int, float)) or isinstance(limit, bool) or limit < 0
        ):
            raise ValueError(f"{where} {name} must be a number of 0 or more, or null, got {limit!r}")
