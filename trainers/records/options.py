"""The options of `prepare`, checked, and the fingerprint of what a dataset is made from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from trainers.job.files import sha256_of_file
from trainers.records.errors import InvalidOption
from trainers.records.format import Format, check_partitions
from trainers.records.schema import Schema
from trainers.records.splits import SplitRule

__all__ = ["CODE_VERSION", "COMPRESSIONS", "LAYOUTS", "SCHEMES", "Options", "fingerprint", "local_path"]

LAYOUTS = ("rows", "blocks")

# Raised whenever the same input and options would give other bytes or another manifest: then datasets that
# were prepared before are prepared anew instead of being taken for the same.
CODE_VERSION = "trainyard.records/2"

COMPRESSIONS = ("", "GZIP", "ZLIB")  # of shards, as TensorFlow names them

# Where raw data may lie besides local disks; each is a file system of fsspec.
SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hdfs", "http", "https", "memory")
_SECRET = re.compile(r"(?i)sig|token|key|secret|passw|credential|auth")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECK = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SPAN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,39})?")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to make a dataset; see `trainers.records.build.prepare`."""

    source: Path | str  # a URL is text
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
    compression: str = ""
    format: Format = dataclasses.field(default_factory=Format)
    partitions: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    layout: str = "rows"
    block_rows: int = 1024
    processes: int | None = None
    split: Mapping[str, Any] | None = None
    checks: Sequence[str] = ()
    statistics: bool = True
    baseline: str = ""

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
        self._check_whole_numbers()
        if not isinstance(self.span, str) or not _SPAN.fullmatch(self.span):
            raise InvalidOption(
                "span", "be up to 40 letters, digits, '.', '_' or '-', like 2013-01", self.span
            )
        if self.image not in ("raw", "encoded"):
            raise InvalidOption("image", "be raw or encoded", self.image)
        self._check_quality()
        SplitRule.parse(self.split, self.eval_fraction)
        if self.compression not in COMPRESSIONS:
            raise InvalidOption("compression", "be empty, GZIP or ZLIB", self.compression)
        if self.layout not in LAYOUTS:
            raise InvalidOption("layout", f"be one of {', '.join(LAYOUTS)}", self.layout)

    def _check_whole_numbers(self) -> None:
        limits = {"shards": 99_999, "batch_rows": 1 << 20, "block_rows": 1 << 16, "processes": 256}
        for option, most in limits.items():
            value = getattr(self, option)
            if option == "processes" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidOption(option, f"be a whole number from 1 to {most}", value)

    @classmethod
    def parse(
        cls,
        *,
        source: str | Path,
        output: str | Path,
        schema: str | Path | None = None,
        format: Any = None,
        partitions: Any = None,
        baseline: str | Path | None = None,
        **options: Any,
    ) -> Options:
        """Options from plain values: paths or URLs, the path of a schema.json, objects of JSON."""
        for name, value in (("source", source), ("output", output)):
            if not value or not isinstance(value, (str, Path)):
                raise InvalidOption(name, "be a path or a file:// URI", value)
        loaded = Schema.load(local_path("schema", schema)) if schema else None
        return cls(
            _source(source),
            local_path("output", output),
            schema=loaded,
            format=Format.parse(format),
            partitions=check_partitions(partitions),
            baseline=_baseline(baseline),
            **options,
        )

    def _check_quality(self) -> None:
        object.__setattr__(self, "checks", _checks(self.checks))
        if not isinstance(self.statistics, bool):
            raise InvalidOption("statistics", "be true or false", self.statistics)
        if self.baseline == "previous" and not self.span:
            raise InvalidOption("baseline", "be a manifest where there is no span", self.baseline)

    @property
    def rule(self) -> SplitRule:
        """How rows are dealt to splits."""
        return SplitRule.parse(self.split, self.eval_fraction)

    def content(self) -> dict[str, Any]:
        """Those options that shape what is written."""
        content: dict[str, Any] = {
            **({"span": self.span} if self.span else {}),
            "name": self.name,
            "label": self.label,
            "key": self.key,
            "eval_fraction": float(self.eval_fraction),
            "shards": self.shards,
            "image": self.image,
            "schema": self.schema.digest if self.schema else None,
            # Left out for rows: datasets from before there were blocks stay what they are.
            **({"layout": self.layout, "block_rows": self.block_rows} if self.layout == "blocks" else {}),
        }
        # Only when given, so that datasets from before there were these options are still found.
        if self.compression:
            content["compression"] = self.compression
        if hints := self.format.content():
            content["format"] = hints
        if self.partitions:
            content["partitions"] = {name: list(values) for name, values in self.partitions.items()}
        if self.split is not None:
            content["split"] = self.rule.content()
        if self.checks:
            content["checks"] = [[check, _code_of(check)] for check in self.checks]
        if not self.statistics:
            content["statistics"] = False
        return content


def _baseline(baseline: str | Path | None) -> str:
    if not baseline or baseline == "previous":
        return baseline or ""
    if not isinstance(baseline, (str, Path)):
        raise InvalidOption("baseline", 'be the path of a manifest, or "previous"', baseline)
    return str(local_path("baseline", baseline))


def _checks(checks: Any) -> tuple[str, ...]:
    names = (checks,) if isinstance(checks, str) and checks else checks or ()
    if not isinstance(names, (list, tuple)):
        raise InvalidOption("checks", 'be "module:function" or a list of them', checks)
    for name in names:
        if not isinstance(name, str) or not _CHECK.fullmatch(name):
            raise InvalidOption("checks", 'be "module:function" or a list of them', name)
    return tuple(names)


def _code_of(check: str) -> str | None:
    """SHA-256 of the file of a check's module: another check refuses other rows."""
    found = find_spec(check.partition(":")[0])
    if found is None or not found.origin or not Path(found.origin).is_file():
        return None
    return sha256_of_file(Path(found.origin))


def find_spec(module: str) -> Any:
    """Where a module is, without importing it but its packages; None when it is nowhere."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def fingerprint(options: Options, files: Iterable[tuple[str, int, str]]) -> str:
    """SHA-256 over the code's version, the options, and each file's name, bytes and version."""
    made_from = [CODE_VERSION, options.content(), [list(file) for file in files]]
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _source(uri: str | Path) -> Path | str:
    """A local path (which may hold wildcards), or a URL without secrets in it."""
    if isinstance(uri, Path) or "://" not in uri or uri.startswith("file://"):
        return local_path("source", uri)
    scheme = uri.partition("://")[0]
    if scheme not in SCHEMES:
        raise InvalidOption("source", f"be a path, or a URL of one of {', '.join(SCHEMES)}", scheme + "://")
    parts = urlsplit(uri)
    secret = any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    if parts.password or (parts.username and scheme in ("http", "https")) or secret:
        # The URL itself is not repeated: it would end in a log.
        raise InvalidOption(
            "source",
            "hold no credentials: they come from the environment or fsspec's configuration",
            f"{scheme}://...",
        )
    return uri


def local_path(option: str, uri: str | Path) -> Path:
    """An absolute path, so that whoever is handed a result finds it from anywhere."""
    if "://" in str(uri) and not str(uri).startswith("file://"):
        raise InvalidOption(option, "be a local path or start with file://", str(uri))
    return Path(str(uri).removeprefix("file://")).absolute()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
