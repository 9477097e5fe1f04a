# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Logged requests as rows of features: PredictionLog records of TensorFlow Serving and of the embedded server.

A request is either serialised Examples, of Predict, Classify, Regress or MultiInference, or tensors by name. Both
become the features of the dataset's schema that the model takes; a value that stands for "missing" in a tensor
(NaN, -1, "") is missing again where the schema says that it may be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from trainers.records.frames import Damage, frames
from trainers.records.schema import MISSING_VALUES, Feature, Schema
from trainers.records.source import Batch
from trainers.records.statistics import Statistics
from trainers.records.tfrecords import batch_of
from trainers.records.validate import clean

__all__ = ["Counts", "Logged", "count_requests", "read_log", "watched"]

_BATCH_ROWS = 8192
_BATCH_BYTES = 32 << 20
_KINDS = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.string(), "bytes": pa.binary()}


@dataclasses.dataclass
class Counts:
    """What was seen: requests, rows in them, requests and rows that could not be understood, damaged files."""

    requests: int = 0
    rows: int = 0
    odd_requests: int = 0
    odd_rows: int = 0
    damaged: int = 0
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    def odd(self, reason: str, rows: int = 0) -> None:
        """Count a request, or rows, that can't be understood."""
        self.odd_rows += rows
        self.odd_requests += not rows
        if reason in self.reasons or len(self.reasons) < 20:
            self.reasons[reason] = self.reasons.get(reason, 0) + (rows or 1)


@dataclasses.dataclass(frozen=True)
class Logged:
    """One request: Examples, or tensors by name; and the answers by name, where they are tensors."""

    examples: Sequence[bytes] | None
    tensors: Mapping[str, Any]
    outputs: Mapping[str, Any]


def watched(schema: Schema, label: str, takes: Sequence[str]) -> Schema | None:
    """The features that requests are compared by: those that the model takes, of the dataset's."""
    names = set(takes) & set(schema.names) or set(schema.names)
    found = tuple(f for f in schema if f.name in names and f.name != label)
    return Schema(found) if found else None


def read_log(path: Path, counts: Counts) -> Iterator[Logged]:
    """The requests of a file; what is damaged or of a kind that holds no features is counted."""
    from tensorflow_serving.apis import prediction_log_pb2

    for frame in frames(path):
        if isinstance(frame, Damage):
            counts.damaged += 1
            counts.odd(f"{path.name} is damaged: {frame.problem}")
            return
        counts.requests += 1
        try:
            found = _logged(prediction_log_pb2.PredictionLog.FromString(frame))
        except DecodeError as e:
            counts.odd(f"no PredictionLog: {e}")
            continue
        if found is None:
            counts.odd("a request without features")
        else:
            yield found


def _logged(log: Any) -> Logged | None:
    kind = log.WhichOneof("log_type")
    if kind == "predict_log":
        inputs, outputs = log.predict_log.request.inputs, dict(log.predict_log.response.outputs)
        if len(inputs) == 1:
            only = next(iter(inputs.values()))
            if only.dtype == 7 and "examples" in next(iter(inputs)):
                return Logged(list(only.string_val), {}, outputs)
        return Logged(None, dict(inputs), outputs)
    if kind in ("classify_log", "regress_log", "multi_inference_log"):
        given = getattr(log, kind).request.input
        if given.WhichOneof("kind") == "example_list_with_context":
            listed = given.example_list_with_context
            return Logged([_with(listed.context, e) for e in listed.examples], {}, {})
        return Logged([e.SerializeToString() for e in given.example_list.examples], {}, {})
    return None


def _with(context: Any, example: Any) -> bytes:
    merged = type(example)()
    merged.CopyFrom(context)
    for name, feature in example.features.feature.items():
        merged.features.feature[name].CopyFrom(feature)
    return bytes(merged.SerializeToString())


def count_requests(
    files: Sequence[Path], schema: Schema, statistics: Statistics, answers: Any, counts: Counts
) -> None:
    """Put the requests of some files into `statistics` (of the schema), and their answers into `answers`."""
    examples: list[tuple[int, bytes]] = []
    tensors = _Tensors(schema, statistics, counts)
    size = 0
    for path in files:
        for logged in read_log(path, counts):
            for example in logged.examples or ():
                counts.rows += 1
                examples.append((counts.rows, example))
                size += len(example)
            if len(examples) >= _BATCH_ROWS or size > _BATCH_BYTES:
                _take(batch_of(path.name, examples, schema), schema, statistics, counts)
                examples, size = [], 0
            if logged.examples is None:
                tensors.add(logged.tensors)
            if answers is not None and logged.outputs:
                answers.add(logged.outputs)
    if examples:
        _take(batch_of("requests", examples, schema), schema, statistics, counts)
    tensors.flush()


def _take(batch: Batch, schema: Schema, statistics: Statistics, counts: Counts) -> None:
    data, rejects = clean(batch, schema, ())
    for reject in rejects:
        counts.odd(f"{reject.column or 'row'} {reject.reason}"[:120], 1)
    if data.num_rows:
        statistics.add(data)


class _Tensors:
    """Gathers requests of a few rows each: statistics are made of thousands at once."""

    def __init__(self, schema: Schema, statistics: Statistics, counts: Counts) -> None:
        self._schema, self._statistics, self._counts = schema, statistics, counts
        self._waiting: list[Mapping[str, np.ndarray]] = []
        self._rows = self._bytes = 0

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Take in a request's inputs."""
        import tensorflow as tf

        try:
            arrays = {n: tf.make_ndarray(proto) for n, proto in tensors.items() if n in self._schema}
            if not arrays:
                self._counts.odd("tensors that are none of the features")
                return
            if (
                len({len(a) if a.ndim else -1 for a in arrays.values()}) != 1
                or not next(iter(arrays.values())).ndim
            ):
                self._counts.odd("tensors of different lengths")
                return
            for name, array in arrays.items():
                _check(array, self._schema[name])
        except (ValueError, TypeError) as e:
            self._counts.odd(f"tensors that don't fit: {e}"[:120])
            return
        if self._waiting and _kinds(self._waiting[0]) != _kinds(arrays):
            self.flush()
        self._waiting.append(arrays)
        self._rows += len(next(iter(arrays.values())))
        self._bytes += sum(array.nbytes for array in arrays.values())
        if self._rows >= _BATCH_ROWS or self._bytes > _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put what waits into the statistics."""
        if not self._waiting:
            return
        whole = {name: np.concatenate([a[name] for a in self._waiting]) for name in self._waiting[0]}
        count, self._waiting, self._rows, self._bytes = self._rows, [], 0, 0
        self._counts.rows += count
        try:
            data = pa.RecordBatch.from_pydict({n: _column(a, self._schema[n]) for n, a in whole.items()})
        except (ValueError, TypeError, pa.ArrowException) as e:
            self._counts.odd(f"tensors that don't fit: {e}"[:120], count)
            return
        batch = Batch("requests", np.arange(1, count + 1), data)
        _take(batch, self._schema, self._statistics, self._counts)


def _kinds(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}


def _check(array: np.ndarray, feature: Feature) -> None:
    found = f"{feature.name} is {array.dtype} {list(array.shape[1:])}"
    if feature.encoding == "raw" and (array.dtype != np.uint8 or array[:1].size not in (0, feature.size)):
        raise ValueError(found)
    if feature.type == "uint8" and feature.encoding != "raw":
        raise ValueError(found)
    if not feature.shape and feature.encoding != "raw" and array.size != len(array):
        raise ValueError(found)


def _column(array: np.ndarray, feature: Feature) -> pa.Array:
    if feature.encoding == "raw":
        flat = np.ascontiguousarray(array).reshape(len(array), -1)
        return pa.array([row.tobytes() for row in flat], pa.binary(feature.size))
    kind = _KINDS[feature.type]
    if feature.shape:
        return pa.array([_plain(row) for row in array.reshape(len(array), -1)], pa.large_list(kind))
    values = _plain(array.reshape(-1))
    if feature.presence != "required":
        stands_for = MISSING_VALUES[feature.type] if feature.default is None else feature.default
        values = [None if _same(value, stands_for) else value for value in values]
    return pa.array(values, kind)


def _plain(array: np.ndarray) -> list[Any]:
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in array.tolist()]


def _same(value: Any, other: Any) -> bool:
    if isinstance(other, float) and math.isnan(other):
        return isinstance(value, float) and math.isnan(value)
    return bool(value == other)
