"""What a record holds: names, types, shapes, encodings, presence and domains of its features.

Standard library only: Airflow, trainers and exporters read schemas. A dataset's schema lies beside its
manifest as schema.json, which is meant to be read, edited and given back to `prepare(schema=...)`:

    {"version": 1, "features": [
      {"name": "image", "type": "uint8", "shape": [8, 8, 1], "encoding": "raw", "presence": "required",
       "domain": {"min": 0, "max": 255}},
      {"name": "label", "type": "int64", "shape": [], "encoding": "plain", "presence": "required",
       "domain": {"min": 0, "max": 9, "names": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]}}]}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.records.errors import ColumnError, DatasetCorrupt, DatasetMissing
from trainers.records.limits import check_rules, check_thresholds

__all__ = ["ENCODINGS", "MISSING_VALUES", "TYPES", "Feature", "Schema"]

VERSION = 1

# A feature's type as training sees it.
TYPES = ("float32", "int64", "string", "bytes", "uint8")

# How values lie in the record.
ENCODINGS = (
    "plain",  # one value or list of the Example's own kind
    "raw",  # all values of a row packed into one bytes value, row-major, little-endian
    "image",  # one bytes value: a PNG or JPEG file as it is
)

# What a reader puts where an optional scalar is missing. There is no right number for "unknown": these are
# ones that training notices (a NaN loss, an index out of range) rather than learns from without a word.
MISSING_VALUES: Mapping[str, Any] = {"float32": float("nan"), "int64": -1, "string": "", "bytes": ""}


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a record.

    `shape` is () for one value, (8, 8, 1) for a fixed number of values, (None,) for a list of any length.
    `domain` is what the data held, not a rule: {"min", "max"} for numbers, {"values"} for strings of few
    distinct values, {"names"} for a class index. `source` says what the raw data called the type.

    `default` is what readers put where an optional value is missing, or where a dataset was written before the
    feature was added. `rules` refuse rows (see records.rules), `drift` sets thresholds (see records.drift).
    """

    name: str
    type: str
    shape: tuple[int | None, ...] = ()
    encoding: str = "plain"
    presence: str = "required"
    domain: Mapping[str, Any] | None = None
    source: str = ""
    default: int | float | str | None = None
    rules: Mapping[str, Any] | None = None
    drift: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a string that isn't empty, got {self.name!r}")
        if self.type not in TYPES:
            raise ValueError(f"type of {self.name!r} must be one of {', '.join(TYPES)}, got {self.type!r}")
        if self.encoding not in ENCODINGS:
            raise ValueError(
                f"encoding of {self.name!r} must be one of {', '.join(ENCODINGS)}, got {self.encoding!r}"
            )
        if self.presence not in ("required", "optional"):
            raise ValueError(f"presence of {self.name!r} must be required or optional, got {self.presence!r}")
        if self.shape != (None,) and not all(isinstance(d, int) and d > 0 for d in self.shape):
            raise ValueError(
                f"shape of {self.name!r} must be [null] or a list of integers above 0, got {list(self.shape)}"
            )
        if (self.encoding == "raw") != (self.type == "uint8"):
            raise ValueError(
                f"type uint8 and encoding raw go together, got {self.type!r}, {self.encoding!r} "
                f"for {self.name!r}"
            )
        if self.encoding == "raw" and (not self.shape or self.ragged):
            raise ValueError(f"shape of {self.name!r} must be fixed for encoding raw, got {list(self.shape)}")
        if self.encoding == "image" and (self.type != "bytes" or self.shape):
            raise ValueError(f"{self.name!r} with encoding image must have type bytes and shape []")
        self._check_default()
        check_rules(self)
        check_thresholds(self)

    def _check_default(self) -> None:
        kinds: Mapping[str, Any] = {"float32": (int, float), "int64": int, "string": str}
        if self.default is None:
            return
        if self.type not in kinds or self.ragged:
            raise ValueError(f"default of {self.name!r} must not be set for {self.type} {list(self.shape)}")
        if not isinstance(self.default, kinds[self.type]) or isinstance(self.default, bool):
            raise ValueError(f"default of {self.name!r} must be {self.type}, got {self.default!r}")

    @property
    def ragged(self) -> bool:
        """Whether rows have any number of values."""
        return self.shape == (None,)

    @property
    def size(self) -> int:
        """Values a row; 0 for any number."""
        if self.ragged:
            return 0
        count = 1
        for dimension in self.shape:
            count *= dimension or 0
        return count

    @property
    def names(self) -> tuple[str, ...] | None:
        """Class names in the order of their index, for a label that was made from names."""
        names = (self.domain or {}).get("names")
        return tuple(names) if names else None

    def to_dict(self) -> dict[str, Any]:
        """The feature as JSON values."""
        out = {
            "name": self.name,
            "type": self.type,
            "shape": list(self.shape),
            "encoding": self.encoding,
            "presence": self.presence,
        }
        if self.domain is not None:
            out["domain"] = dict(self.domain)
        if self.source:
            out["source"] = self.source
        if self.default is not None:
            out["default"] = self.default
        for name in ("rules", "drift"):
            if getattr(self, name):
                out[name] = dict(getattr(self, name))
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Feature:
        """The feature of JSON values; ValueError names a field that is wrong, missing or unknown."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"feature {data.get('name')!r} has unknown fields: {', '.join(unknown)}")
        missing = sorted({"name", "type"} - set(data))
        if missing:
            raise ValueError(f"feature {data.get('name')!r} lacks {', '.join(missing)}")
        return cls(**data)


@dataclasses.dataclass(frozen=True)
class Schema:
    """The features of a record, in the order of the raw data."""

    features: tuple[Feature, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))
        if not self.features:
            raise ValueError("features must hold at least one feature, got none")
        names = [feature.name for feature in self.features]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"names of features must differ, got more than one {', '.join(twice)}")

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

    def __contains__(self, name: object) -> bool:
        return any(feature.name == name for feature in self.features)

    def __getitem__(self, name: str) -> Feature:
        for feature in self.features:
            if feature.name == name:
                return feature
        raise ColumnError(name, "isn't in the schema", hint=f"it holds {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all features."""
        return tuple(feature.name for feature in self.features)

    @property
    def digest(self) -> str:
        """SHA-256 of the schema's JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def replace(self, features: Iterable[Feature]) -> Schema:
        """The schema with some features exchanged for those of the same name."""
        new = {feature.name: feature for feature in features}
        return Schema(tuple(new.get(feature.name, feature) for feature in self.features))

    def to_dict(self) -> dict[str, Any]:
        """The schema as JSON values."""
        return {"version": VERSION, "features": [feature.to_dict() for feature in self.features]}

    @classmethod
    def from_dict(cls, data: Any) -> Schema:
        """The schema of JSON values; ValueError says what is wrong with it."""
        if not isinstance(data, Mapping) or not isinstance(data.get("features"), list):
            raise ValueError("a schema must be an object with a list of features")
        if data.get("version") != VERSION:
            raise ValueError(f"version must be {VERSION}, got {data.get('version')!r}")
        return cls(tuple(Feature.from_dict(feature) for feature in data["features"]))

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema.json; DatasetMissing or DatasetCorrupt when it isn't one."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except FileNotFoundError as e:
            raise DatasetMissing(f"no schema at {path}", hint="give the path of a schema.json") from e
        except (ValueError, TypeError) as e:
            raise DatasetCorrupt(str(path), f"is not a schema: {e}") from e
