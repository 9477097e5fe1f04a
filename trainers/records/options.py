"""The options of `prepare`, checked, and the fingerprint of what a dataset is made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainers.records.errors import InvalidOption
from trainers.records.schema import Schema

__all__ = ["CODE_VERSION", "Options", "fingerprint"]

# Raised whenever the same input and options would give other bytes or another manifest: then datasets that
# were prepared before are prepared anew instead of being taken for the same.
CODE_VERSION = "trainyard.records/2"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SPAN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,39})?")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to make a dataset; see `trainers.records.build.prepare`."""

    source: Path
    output: Path
    name: str
    label: str
    key: str | None = None
    eval_fraction: float = 0.2
    shards: int = 2
    image: str = "raw"
    quarantine_threshold: float = 0.01
    batch_rows: int = 8192
    schema: Schema | None = None
    span: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidOption("name", "be 1 to 100 letters, digits, '.', '_' or '-'", self.name)
        if not isinstance(self.label, str) or not self.label:
            raise InvalidOption("label", "be the name of a column or feature", self.label)
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise InvalidOption("key", "be the name of a column, or nothing", self.key)
        for option in ("eval_fraction", "quarantine_threshold"):
            value = getattr(self, option)
            if not _is_number(value) or not 0 <= value < 1:
                raise InvalidOption(option, "be at least 0 and below 1", value)
        for option, most in (("shards", 99_999), ("batch_rows", 1 << 20)):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidOption(option, f"be a whole number from 1 to {most}", value)
        if not isinstance(self.span, str) or not _SPAN.fullmatch(self.span):
            raise InvalidOption(
                "span", "be up to 40 letters, digits, '.', '_' or '-', like 2013-01", self.span
            )
        if self.image not in ("raw", "encoded"):
            raise InvalidOption("image", "be raw or encoded", self.image)

    @classmethod
    def parse(
        cls,
        *,
        source: str | Path,
        output: str | Path,
        schema: str | Path | None = None,
        **options: Any,
    ) -> Options:
        """Options from plain values: paths or file:// URIs, and the path of a schema.json."""
        for name, value in (("source", source), ("output", output)):
            if not value or not isinstance(value, (str, Path)):
                raise InvalidOption(name, "be a path or a file:// URI", value)
        loaded = Schema.load(_path("schema", schema)) if schema else None
        return cls(_path("source", source), _path("output", output), schema=loaded, **options)

    def content(self) -> dict[str, Any]:
        """Those options that shape what is written."""
        return {
            **({"span": self.span} if self.span else {}),
            "name": self.name,
            "label": self.label,
            "key": self.key,
            "eval_fraction": float(self.eval_fraction),
            "shards": self.shards,
            "image": self.image,
            "schema": self.schema.digest if self.schema else None,
        }


def fingerprint(options: Options, files: Iterable[tuple[str, int, str]]) -> str:
    """SHA-256 over the code's version, the options, and each file's name, bytes and SHA-256."""
    made_from = [CODE_VERSION, options.content(), [list(file) for file in files]]
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _path(option: str, uri: str | Path) -> Path:
    """An absolute path, so that whoever is handed a result finds it from anywhere."""
    if "://" in str(uri) and not str(uri).startswith("file://"):
        raise InvalidOption(option, "be a local path or start with file://", str(uri))
    return Path(str(uri).removeprefix("file://")).absolute()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
