"""What raw files are, where their names don't say it: the option `format` of `prepare`.

Standard library only: specs are checked before Arrow is imported.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.records.errors import InvalidOption

__all__ = ["KINDS", "NULLS", "Format", "check_partitions"]

KINDS = ("parquet", "csv", "jsonl", "images", "arrays", "tfrecord")

# What means "missing" in a CSV field without quotes.
NULLS = ("", "NA", "N/A", "NULL", "null", "\\N")


@dataclasses.dataclass(frozen=True)
class Format:
    """Hints on how to read files.

    `kind` is one of KINDS, where suffixes don't tell or a folder holds several; `encoding` is that of CSV, as
    Python names it; `delimiter` is one character, tab for .tsv and comma otherwise; `nulls` are the CSV fields
    that mean missing. `labels` is the label table of a folder of pictures, relative to the folder: a CSV or
    Parquet file whose column `file_column` names pictures and whose column of the label's name holds labels.
    """

    kind: str = ""
    encoding: str = "utf-8"
    delimiter: str = ""
    nulls: Sequence[str] = NULLS
    labels: str = ""
    file_column: str = "file"

    def __post_init__(self) -> None:
        for field in ("kind", "encoding", "delimiter", "labels", "file_column"):
            if not isinstance(getattr(self, field), str):
                raise InvalidOption(f"format.{field}", "be text", getattr(self, field))
        if self.kind and self.kind not in KINDS:
            raise InvalidOption("format.kind", f"be one of {', '.join(KINDS)}", self.kind)
        try:
            name = codecs.lookup(self.encoding).name
            "".encode(name)  # codecs that aren't of text ("zlib") are refused
        except LookupError as e:
            raise InvalidOption(
                "format.encoding", "be a text encoding that Python knows", self.encoding
            ) from e
        object.__setattr__(self, "encoding", name)
        if self.delimiter and (
            len(self.delimiter) != 1 or self.delimiter in '"\r\n' or not self.delimiter.isascii()
        ):
            raise InvalidOption(
                "format.delimiter", 'be one ASCII character other than " and line ends', self.delimiter
            )
        if isinstance(self.nulls, str) or not all(isinstance(text, str) for text in self.nulls):
            raise InvalidOption("format.nulls", "be a list of texts", self.nulls)
        object.__setattr__(self, "nulls", tuple(self.nulls))
        if self.labels and (self.labels.startswith("/") or ".." in self.labels.split("/")):
            raise InvalidOption("format.labels", "be a path below the source, without ..", self.labels)
        if not self.file_column:
            raise InvalidOption("format.file_column", "be the name of a column", self.file_column)

    @classmethod
    def parse(cls, value: Any) -> Format:
        """A Format from the mapping of a spec, or nothing."""
        if value is None or isinstance(value, Format):
            return value or cls()
        if not isinstance(value, Mapping):
            raise InvalidOption("format", "be an object", value)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise InvalidOption("format", f"have keys from {', '.join(known)}", ", ".join(unknown))
        return cls(**value)

    def content(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON values."""
        out = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                out[field.name] = list(value) if isinstance(value, tuple) else value
        return out


def check_partitions(value: Any) -> dict[str, tuple[str, ...]]:
    """A filter on partitions, {"dt": ["2013-01", "2013-02"]}, with all values as text; {} for no filter."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidOption("partitions", 'be an object such as {"dt": ["2013-01"]}', value)
    out = {}
    for name, wanted in value.items():
        values = [wanted] if isinstance(wanted, (str, int)) else wanted
        if (
            not isinstance(values, Sequence)
            or not values
            or not all(isinstance(v, (str, int)) for v in values)
        ):
            raise InvalidOption(f"partitions[{name!r}]", "be a list of values that isn't empty", wanted)
        out[str(name)] = tuple(dict.fromkeys(str(v) for v in values))
    return out
