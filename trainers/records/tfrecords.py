# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""TFRecords of tf.train.Example as raw data, plain, GZIP or ZLIB, without TensorFlow.

Types come from the first 1,000 records of each file: a feature with one value in each is one value, with the same
number in each a list of that shape, else a list of any length; bytes are text when all are UTF-8, and pictures when
all begin as PNG or JPEG. A given schema.json overrules that. An Example that can't be parsed, or doesn't hold what
the schema says, goes to the quarantine; a damaged frame is an error, since what follows it can't be trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from trainers.records.errors import ColumnError, SourceEmpty, SourceUnreadable
from trainers.records.files import SourceFile, read_errors
from trainers.records.frames import HEAD, Damage, masked_crc, read_frames
from trainers.records.schema import Feature, Schema
from trainers.records.source import Batch, Reject

__all__ = ["Examples", "batch_of"]

SAMPLE_RECORDS = 1_000
_FEW = 0.01  # of a sample may be of another type
_BATCH_BYTES = 32 << 20
_KINDS = {"int64_list": "int64", "float_list": "float32", "bytes_list": "bytes"}
_LISTS = {"int64": "int64_list", "float32": "float_list", "string": "bytes_list", "bytes": "bytes_list"}
_PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


def _example_class() -> Any:
    """tf.train.Example's message from its definition, in a pool of its own beside TensorFlow's."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="trainyard/example.proto", package="tensorflow", syntax="proto3"
    )
    for name, kind in (("BytesList", "TYPE_BYTES"), ("FloatList", "TYPE_FLOAT"), ("Int64List", "TYPE_INT64")):
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, type=kind, label="LABEL_REPEATED")
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        kind = name.title().replace("_", "")
        feature.field.add(
            name=name, number=number, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, oneof_index=0
        ).type_name = f".tensorflow.{kind}"
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value",
        number=2,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_OPTIONAL,
        type_name=".tensorflow.Feature",
    )
    features.field.add(
        name="feature",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_REPEATED,
        type_name=".tensorflow.Features.FeatureEntry",
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_OPTIONAL,
        type_name=".tensorflow.Features",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_Example = _example_class()


@dataclasses.dataclass
class _Seen:
    """What a sample of records held of a feature."""

    kind: str
    count: int = 0
    lengths: set[int] = dataclasses.field(default_factory=set)
    text: bool = True
    pictures: bool = True

    def add(self, values: Sequence[Any]) -> None:
        self.count += 1
        self.lengths.add(len(values))
        if self.kind == "bytes":
            self.text = self.text and all(_is_text(value) for value in values)
            self.pictures = self.pictures and all(value.startswith(_PICTURES) for value in values)

    def feature(self, name: str) -> Feature:
        """The narrowest feature that holds it all."""
        single = self.lengths <= {0, 1}
        same = len(self.lengths) == 1
        shape: tuple[int | None, ...] = () if single else (max(self.lengths),) if same else (None,)
        source = f"tf.train.Example {_LISTS[self.kind]}"
        if self.kind != "bytes":
            return Feature(name, self.kind, shape, source=source)
        if self.pictures and single and self.lengths == {1}:
            return Feature(name, "bytes", (), "image", source=source)
        return Feature(name, "string" if self.text else "bytes", shape, source=source)


def _most(name: str, kinds: Mapping[str, _Seen]) -> _Seen:
    """The kind of nearly all records, so that the others are bad rows; ColumnError when there is none."""
    first, *others = sorted(kinds.values(), key=lambda seen: -seen.count)
    if sum(seen.count for seen in others) > _FEW * first.count:
        raise ColumnError(
            name,
            f"is {_LISTS[first.kind]} in {first.count} records, {_LISTS[others[0].kind]} in {others[0].count}",
            hint="write it with one type in all",
        )
    return first


class Examples:
    """A source of TFRecord files."""

    def __init__(self, source: Path | str, files: Sequence[SourceFile]) -> None:
        self.source = source
        self.files = files

    def infer(self) -> Schema:
        """The features of the first records of all files."""
        seen: dict[str, dict[str, _Seen]] = {}
        for file in self.files:
            for _, data in zip(range(SAMPLE_RECORDS), _records(file), strict=False):
                example = _parse(data)
                for name, value in example.features.feature.items() if example else ():
                    kind = value.WhichOneof("kind")
                    if kind is not None:
                        found = seen.setdefault(name, {}).setdefault(kind, _Seen(_KINDS[kind]))
                        found.add(getattr(value, kind).value)
        if not seen:
            raise SourceEmpty(
                f"{self.source} holds no tf.train.Example with a feature",
                hint="check that it is the right data",
            )
        return Schema(tuple(_most(name, seen[name]).feature(name) for name in sorted(seen)))

    def units(self, most: int) -> int:
        """As many as there are files."""
        return max(1, min(most, len(self.files)))

    def unit_files(self, unit: int, units: int) -> Sequence[SourceFile]:
        """Every units-th file."""
        return self.files[unit::units]

    def read(self, unit: int, units: int, schema: Schema, batch_rows: int) -> Iterator[Batch]:
        """The records of a unit's files, numbered from 1 in each."""
        for file in self.unit_files(unit, units):
            rows: list[tuple[int, bytes]] = []
            size = 0
            for number, data in enumerate(_records(file), 1):
                rows.append((number, data))
                size += len(data)
                if len(rows) >= batch_rows or size >= _BATCH_BYTES:
                    yield batch_of(file.name, rows, schema)
                    rows, size = [], 0
            if rows:
                yield batch_of(file.name, rows, schema)


def _records(file: SourceFile) -> Iterator[bytes]:
    """The records of a file; SourceUnreadable where it is damaged."""
    hint = "write the file again"
    with read_errors(file, hint), file.stream() as raw:
        compression = "" if file.compression else _compression(file)
        known = None if file.compression else file.size
        for number, frame in enumerate(read_frames(raw, compression, known)):
            if isinstance(frame, Damage):
                file.check_unchanged()
                problem = f"is damaged at record {number}, byte {frame.offset}: {frame.problem}"
                raise SourceUnreadable(file.location, problem, hint=hint)
            yield frame


def _compression(file: SourceFile) -> str:
    """GZIP or ZLIB of a whole file, as TensorFlow writes it, which names don't tell."""
    with file.stream() as stream:
        head = stream.read(HEAD.size)
    if len(head) == HEAD.size and masked_crc(head[:8]) == HEAD.unpack(head)[1]:
        return ""
    return "GZIP" if head[:2] == b"\x1f\x8b" else "ZLIB" if head[:1] == b"\x78" else ""


def _parse(data: bytes) -> Any:
    try:
        return _Example.FromString(data)
    except DecodeError:
        return None


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def batch_of(file: str, rows: Sequence[tuple[int, bytes]], schema: Schema) -> Batch:
    """Serialised Examples with their numbers as rows of a schema."""
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    good, rejects = [], []
    for number, data in rows:
        found = _row(data, schema)
        if isinstance(found, tuple):
            rejects.append(Reject(file, number, *found))
            continue
        good.append(number)
        for name, value in found.items():
            columns[name].append(value)
    arrays = [pa.array(columns[feature.name], _arrow_type(feature)) for feature in schema]
    data = pa.RecordBatch.from_arrays(arrays, names=list(schema.names))
    return Batch(file, np.array(good, np.int64), data, rejects)


def _row(data: bytes, schema: Schema) -> dict[str, Any] | tuple[str, str]:
    """A record's values by feature, or the column and the reason why not."""
    example = _parse(data)
    if example is None:
        return "", "is no tf.train.Example"
    held = example.features.feature
    out: dict[str, Any] = {}
    for feature in schema:
        out[feature.name] = None
        if feature.name not in held:
            continue
        value = held[feature.name]
        kind = value.WhichOneof("kind")
        if kind is None:
            continue
        wanted = _LISTS.get(feature.type, "bytes_list")
        if kind != wanted and not (wanted == "float_list" and kind == "int64_list"):
            return feature.name, f"is {kind}, wants {wanted}"
        values = list(getattr(value, kind).value)
        if feature.type == "string" and not all(_is_text(item) for item in values):
            return feature.name, "is not UTF-8"
        if feature.encoding == "raw" and len(values) == 1 and len(values[0]) != feature.size:
            return feature.name, f"has {len(values[0])} bytes, wants {feature.size}"
        if feature.shape and feature.encoding != "raw":
            out[feature.name] = values
        elif len(values) > 1:
            return feature.name, f"has {len(values)} values, wants one"
        elif values:
            out[feature.name] = values[0]
    return out


def _arrow_type(feature: Feature) -> pa.DataType:
    if feature.encoding == "raw":
        return pa.binary(feature.size)
    kinds = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.string(), "bytes": pa.binary()}
    kind = kinds[feature.type]
    return pa.large_list(kind) if feature.shape else kind
