"""Label tables: a CSV or Parquet file beside pictures that names each one's label.

Labels of text become class numbers in the order of their names, with the names in the schema's domain; numbers stay
numbers. Names are those of pictures below the source: one that leads out of it is refused, and never opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from trainers.records.errors import ColumnError, SourceUnreadable
from trainers.records.files import SourceFile
from trainers.records.format import Format
from trainers.records.schema import Feature
from trainers.records.source import Reject
from trainers.records.tables import Table
from trainers.records.validate import clean

__all__ = ["LabelTable", "load_labels"]

_ROWS = 65_536  # read at once


@dataclasses.dataclass(frozen=True)
class LabelTable:
    """Labels by the names of pictures, the label's feature, and rows that are of no use."""

    file: SourceFile
    feature: Feature
    labels: Mapping[str, Any]
    rejects: Sequence[Reject]


def load_labels(
    source: Path | str, file: SourceFile, format: Format, label: str, pictures: Collection[str]
) -> LabelTable:
    """Read a label table whole.

    Raises ColumnError when a column isn't there or a picture has two labels, SourceUnreadable for a name that
    leads out of the source.
    """
    kind = "parquet" if file.kind_suffix == ".parquet" else "csv"
    table = Table(source, [file], kind, format)
    schema = table.infer()
    for name in (format.file_column, label):
        if name not in schema:
            raise ColumnError(name, f"isn't in {file.location}", hint=f"it holds {', '.join(schema.names)}")
    wanted = dataclasses.replace(schema, features=(schema[format.file_column], schema[label]))
    if wanted[format.file_column].type != "string" or wanted[label].shape:
        raise ColumnError(format.file_column, f"of {file.location} must be text, and {label} one value a row")
    there = set(pictures)
    labels: dict[str, Any] = {}
    rejects: list[Reject] = []
    for batch in table.read(0, 1, wanted, _ROWS):
        data, bad = clean(batch, wanted, {format.file_column, label})
        rejects += bad
        refused = {reject.row for reject in bad}
        numbers = [number for number in batch.rows.tolist() if number not in refused]
        for number, name, value in zip(
            numbers, *(column.to_pylist() for column in data.columns), strict=True
        ):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name:
                raise SourceUnreadable(
                    file.location,
                    f"row {number} names {name[:100]!r}, which leads out of {source}",
                    hint="name files relative to the source",
                )
            name = path.as_posix()
            if name not in there:
                rejects.append(
                    Reject(file.name, number, format.file_column, f"names {name!r}, which isn't there")
                )
            elif labels.setdefault(name, value) != value:
                raise ColumnError(
                    label, f"of {name} is {labels[name]!r} and, in row {number}, {value!r}", hint="keep one"
                )
    return LabelTable(file, *_numbered(wanted[label], labels), rejects)


def _numbered(feature: Feature, labels: Mapping[str, Any]) -> tuple[Feature, Mapping[str, Any]]:
    """Text as class numbers; numbers as they are."""
    if feature.type not in ("string", "bytes"):
        return feature, labels
    classes = sorted(set(labels.values()))
    index = {name: i for i, name in enumerate(classes)}
    domain = {"min": 0, "max": max(0, len(classes) - 1), "names": [str(name) for name in classes]}
    numbered = {name: index[value] for name, value in labels.items()}
    return Feature(feature.name, "int64", domain=domain, source="label table"), numbered
