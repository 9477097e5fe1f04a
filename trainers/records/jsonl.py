# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""JSON Lines: an object a line, read in blocks by Arrow; a bad line costs that line and not its block."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from trainers.records.errors import SourceUnreadable
from trainers.records.schema import Feature, Schema
from trainers.records.source import Batch, Reject, SourceFile

__all__ = ["infer_json", "read_json_lines"]

SAMPLE_ROWS = 10_000  # from which types are inferred
_BLOCK = 8 << 20
_LINE = 64 << 20  # the longest line taken


def _arrow_type(feature: Feature) -> pa.DataType:
    """What JSON is read as: wide numbers, so that what doesn't fit is seen and refused, not lost."""
    kinds = {"float32": pa.float64(), "int64": pa.int64(), "string": pa.string(), "bytes": pa.string()}
    kind = kinds[feature.type]
    if feature.type == "int64" and feature.source == "bool":
        kind = pa.bool_()
    if feature.type == "int64" and feature.source.startswith("timestamp"):
        kind = pa.timestamp("us")
    return pa.list_(kind) if feature.shape else kind


def _parse_json(data: bytes, schema: pa.Schema | None) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(data),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(data), 1)),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
        ),
    )


def _lines(file: SourceFile) -> Iterator[list[bytes]]:
    """Blocks of whole lines."""
    rest, first = b"", True
    with file.stream() as stream:
        while block := stream.read(_BLOCK):
            if first:
                first, block = False, block.removeprefix(codecs.BOM_UTF8)
            end = block.rfind(b"\n") + 1
            if not end:
                rest += block
                if len(rest) > _LINE:
                    raise SourceUnreadable(
                        file.location,
                        f"has a line of more than {_LINE >> 20} MB",
                        hint="write one JSON object a line, not one array",
                    )
                continue
            lines = block[:end].split(b"\n")
            lines[0] = rest + lines[0]
            rest = block[end:]
            yield [line + b"\n" for line in lines[:-1]]
    if rest:
        yield [rest]


def infer_json(file: SourceFile) -> pa.Schema:
    """The types of a file's first lines."""
    sample: list[bytes] = []
    for lines in _lines(file):
        sample = lines[:SAMPLE_ROWS]
        break
    try:
        return _parse_json(b"".join(sample), None).schema
    except pa.ArrowInvalid:
        # Some line isn't like the others; let Arrow infer from those that are.
        values = [value for value in map(_load, sample) if isinstance(value, dict)]
        columns = dict.fromkeys(name for value in values for name in value)
        return pa.schema([(name, _json_type([v.get(name) for v in values])) for name in columns])


def _load(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _json_type(values: list[Any]) -> pa.DataType:
    """The type that most values of a column have."""
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        present = [value for value in values if value is not None]
        kinds = [type(value) for value in present]
        most = max(kinds, key=kinds.count)
        try:
            return pa.array([value for value in present if type(value) is most]).type
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.string()


def read_json_lines(file: SourceFile, schema: Schema, batch_rows: int) -> Iterator[Batch]:
    """The rows of a file; rows are numbered by line."""
    wanted = pa.schema([(feature.name, _arrow_type(feature)) for feature in schema])
    line = 0
    for lines in _lines(file):
        for first in range(0, len(lines), batch_rows):
            chunk = lines[first : first + batch_rows]
            numbers = np.arange(line + 1, line + 1 + len(chunk))
            line += len(chunk)
            full = np.array([bool(text.strip()) for text in chunk], bool)
            numbers = numbers[full]
            chunk = [text for text in chunk if text.strip()]
            yield _json_batch(file.name, numbers, chunk, wanted)


def _json_batch(file: str, numbers: np.ndarray, lines: list[bytes], wanted: pa.Schema) -> Batch:
    if lines:
        data = b"".join(lines)
        try:
            data.decode()  # Arrow doesn't look
            table = _parse_json(data, wanted).select(wanted.names).combine_chunks()
            # A line that holds two objects, or an object over two lines, would shift the numbers.
            if table.num_rows == len(lines):
                return Batch(file, numbers, _one_batch(table))
        except (pa.ArrowInvalid, UnicodeDecodeError):
            pass  # some line is bad: look at each
    columns: dict[str, list[Any]] = {name: [] for name in wanted.names}
    good: list[int] = []
    rejects: list[Reject] = []
    for number, line in zip(numbers.tolist(), lines, strict=True):
        bad = _check_line(line, wanted)
        if isinstance(bad, tuple):
            rejects.append(Reject(file, number, *bad))
            continue
        good.append(number)
        for name in wanted.names:
            columns[name].append(bad[name])
    arrays = [pa.concat_arrays([*columns[f.name], pa.array([], f.type)]) for f in wanted]
    return Batch(file, np.array(good, np.int64), pa.RecordBatch.from_arrays(arrays, schema=wanted), rejects)


def _check_line(line: bytes, wanted: pa.Schema) -> tuple[str, str] | dict[str, pa.Array]:
    """One line's values, each an array of one, or the column and reason why not; as Arrow parses them."""
    value = _load(line)
    if value is None:
        return "", f"is no JSON: {line[:40].decode(errors='replace').strip()!r}"
    if not isinstance(value, dict):
        return "", f"is {type(value).__name__}, wants an object"
    try:
        table = _parse_json(line, wanted)
        return {name: table[name].combine_chunks() for name in wanted.names}
    except pa.ArrowInvalid as e:
        for field in wanted:
            try:
                one = json.dumps({field.name: value.get(field.name)}).encode()
                _parse_json(one, pa.schema([field]))
            except pa.ArrowInvalid:
                text = json.dumps(value.get(field.name))[:60]
                return field.name, f"{text} is no {field.type}"
        return "", f"can't be read: {str(e).splitlines()[0]}"


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
