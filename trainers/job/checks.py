"""Checks that the values of a job make on construction; each refusal names the field as in the form."""

from __future__ import annotations

import copyreg
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainers.job.errors import InvalidSpec

__all__ = ["check", "frozen_map", "is_number", "is_whole", "json_map", "members", "sequence", "spec_fields"]


def check(ok: bool, field: str, must: str, got: object, hint: str = "") -> None:
    """Refuse a value: "FIELD must MUST, got GOT"."""
    if not ok:
        raise InvalidSpec(field, must, got, hint=hint)


def is_whole(value: object) -> bool:
    """Whether it is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is an int or a finite float; True and False are not."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _proxy(value: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(value)


# Airflow deep-copies operators with all they hold, and Python knows how to copy a mapping proxy only if told.
copyreg.pickle(MappingProxyType, lambda proxy: (_proxy, (dict(proxy),)))


def frozen_map(field: str, value: Any) -> Mapping[str, Any]:
    """A read-only copy."""
    check(isinstance(value, Mapping), field, "be a mapping", value)
    return MappingProxyType(dict(value))


def json_map(field: str, value: Any) -> Mapping[str, Any]:
    """A read-only copy as JSON would give it back: a plan must equal its own record, so (1, 2) is [1, 2]."""
    try:
        return frozen_map(field, json.loads(json.dumps(dict(frozen_map(field, value)), allow_nan=False)))
    except (TypeError, ValueError) as e:
        if isinstance(e, InvalidSpec):
            raise
        raise InvalidSpec(field, "be JSON values", value, hint=str(e)) from e


def members(cls: type[Any], data: Any, field: str) -> dict[str, Any]:
    """The members of a JSON object that becomes a `cls`; InvalidSpec for unknown or missing ones."""
    check(isinstance(data, Mapping), field, "be a JSON object", data)
    fields = dataclasses.fields(cls)
    known = sorted(f.name for f in fields)
    unknown = sorted(set(data) - set(known))
    check(not unknown, field, f"have no fields but {known}", unknown)
    missing = dataclasses.MISSING
    for f in fields:
        if f.default is missing and f.default_factory is missing:
            check(f.name in data, f"{field}.{f.name}", "be given", None)
    return dict(data)


def spec_fields(cls: type[Any], spec: Mapping[str, Any], needed: Sequence[str]) -> dict[str, Any]:
    """The fields of a step's spec that become a `cls`; InvalidSpec for unknown ones, or empty ones of `needed`."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(spec) - known)
    check(not unknown, "spec", f"have no fields but {', '.join(sorted(known))}", unknown)
    missing = [name for name in needed if not spec.get(name)]
    check(not missing, "spec", f"have {', '.join(missing)}", sorted(spec))
    return dict(spec)


def sequence(field: str, value: Any) -> Sequence[Any]:
    """The list or tuple itself; text is neither."""
    check(isinstance(value, (list, tuple)), field, "be a list", value)
    return value  # type: ignore[no-any-return]
