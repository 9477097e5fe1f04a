# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""The rows of a part: what the model is given, what is passed through, and rows that can't be given.

Tables go the way of training: each row is mapped to the schema of the dataset that the version was trained on, is made
a tf.train.Example, and the model's own signature of Examples does the rest; without that dataset or signature, columns
go to the inputs of the same names. A dataset's records are parsed as in training.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainers.job.errors import DataError
from trainers.records.encode import FRAME_HEAD, FRAME_TAIL, Encoder
from trainers.records.manifest import Manifest
from trainers.records.schema import Schema
from trainers.records.source import Reject
from trainers.records.tables import Table
from trainers.records.validate import clean
from trainers.released import Released
from trainers.scoring.plan import Plan, shards_of

__all__ = ["Rows", "ScoringSource", "open_source"]

FILE, ROW = "source_file", "source_row"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows for the model by input, `keys` and passed columns for the result, and rows that are not taken."""

    inputs: Mapping[str, Any]
    kept: Mapping[str, pa.Array]
    rejects: Sequence[Reject] = ()

    def __len__(self) -> int:
        return len(self.kept[ROW])


class ScoringSource:
    """Reads parts; `signature` is the one that its rows are for."""

    signature = "serving_default"

    def read(self, part: int) -> Iterator[Rows]:
        """The rows of a part, in an order that never changes."""
        raise NotImplementedError


def open_source(plan: Plan) -> ScoringSource:
    """The source of a plan."""
    released = Released.open(plan.options.name, plan.options.model)
    return _Records(plan, released) if plan.kind == "records" else _Tables(plan, released)


def _missing(what: str, missing: Sequence[str], there: Sequence[str]) -> DataError:
    return DataError(f"{what} {', '.join(missing)} not in the source", hint=f"it holds {', '.join(there)}")


class _Tables(ScoringSource):
    def __init__(self, plan: Plan, released: Released) -> None:
        options = plan.options
        self._plan, self._table = plan, Table(options.source, plan.files, plan.kind)
        inferred = self._table.infer()
        absent = [name for name in options.columns if name not in inferred]
        if absent:
            raise _missing("the columns to be passed through are", absent, inferred.names)
        manifest = released.records(options.records) if options.records else None
        examples = {"examples", *((options.signature,) if options.signature else ())}
        known = next((s for s in sorted(examples) if "examples" in released.inputs(s)), "")
        self._encoder: Encoder | None = None
        if manifest is not None and known and options.signature in ("", known):
            self.signature = known
            takes = set(released.inputs()) or set(manifest.schema().names)
            wanted = [f for f in manifest.schema() if f.name in takes and f.name != manifest.label]
            self._encoder = Encoder()
        else:
            self.signature = options.signature or "serving_default"
            names = list(released.inputs(self.signature))
            lacking = [name for name in names if name not in inferred]
            if lacking or not names:
                raise _missing("the model's inputs are", lacking, inferred.names)
            wanted = [dataclasses.replace(inferred[name], presence="required") for name in names]
        lacking = [
            f.name
            for f in wanted
            if f.presence == "required" and f.default is None and f.name not in inferred
        ]
        if lacking:
            raise _missing("the features that the model takes are", lacking, inferred.names)
        self._schema = Schema(tuple(wanted))
        self._required = {f.name for f in wanted if f.presence == "required"}
        self._read = Schema((*wanted, *(inferred[c] for c in options.columns if c not in self._schema)))

    def read(self, part: int) -> Iterator[Rows]:
        options = self._plan.options
        for batch in self._table.read(part, self._plan.parts, self._read, options.batch_rows):
            data, rejects = clean(batch, self._schema, self._required)
            refused = {reject.row for reject in rejects}
            keep = np.array([int(row) not in refused for row in batch.rows], bool)
            rows = batch.rows[keep]
            if not len(rows):
                yield Rows({}, {FILE: pa.array([], pa.string()), ROW: pa.array([], pa.int64())}, rejects)
                continue
            passed = batch.data.filter(pa.array(keep))
            kept = {FILE: pa.array([batch.file] * len(rows), pa.string()), ROW: pa.array(rows, pa.int64())}
            kept |= {name: passed.column(name) for name in options.columns}
            yield Rows(self._inputs(data), kept, rejects)

    def _inputs(self, data: pa.RecordBatch) -> dict[str, Any]:
        if self._encoder is None:
            return {
                name: _tensor(column) for name, column in zip(data.schema.names, data.columns, strict=True)
            }
        encoded = self._encoder.encode(data)
        view, at = memoryview(encoded.data), encoded.offsets.tolist()
        out = np.empty(len(encoded), object)
        out[:] = [bytes(view[a + FRAME_HEAD : b - FRAME_TAIL]) for a, b in itertools.pairwise(at)]
        return {"examples": out}


def _tensor(column: pa.Array) -> Any:
    if pa.types.is_large_list(column.type):
        return np.array(column.to_pylist())
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "O":
        return np.array([v.encode() if isinstance(v, str) else v for v in values], object)
    return values


class _Records(ScoringSource):
    def __init__(self, plan: Plan, released: Released) -> None:
        from trainers.records.read import RecordsDataset

        self._plan = plan
        self._records = RecordsDataset.open(Path(plan.options.source.removeprefix("file://")))
        self.signature = plan.options.signature or "serving_default"
        self._names = list(released.inputs(self.signature))
        there = self._records.schema.names
        absent = [name for name in plan.options.columns if name not in there]
        if absent:
            raise _missing("the columns to be passed through are", absent, there)
        lacking = [name for name in self._names if name not in there]
        if lacking or not self._names:
            raise _missing(f"the inputs of {self.signature} are", lacking, there)

    def read(self, part: int) -> Iterator[Rows]:
        from trainers.task import dense

        manifest: Manifest = self._records.manifest
        split, index, of = shards_of(manifest, self._plan.options.split)[part]
        file = [shard for shard in manifest.split(split) if shard.records][index].file
        at = 1
        with self._records.reading():
            # As many workers as there are shards: each has one to itself.
            for batch in self._records.dataset(split, self._plan.options.batch_rows, shard=(index, of)):
                inputs = {name: dense(batch[name]) for name in self._names}
                count = int(next(iter(inputs.values())).shape[0])
                rows = np.arange(at, at + count)
                at += count
                kept = {FILE: pa.array([file] * count, pa.string()), ROW: pa.array(rows, pa.int64())}
                kept |= {name: _passed(batch[name]) for name in self._plan.options.columns}
                yield Rows(inputs, kept)


def _passed(tensor: Any) -> pa.Array:
    if hasattr(tensor, "to_list"):
        return pa.array(tensor.to_list())
    array = tensor.numpy()
    if array.ndim > 1:
        flat = np.ascontiguousarray(array).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), array[0].size)
    return pa.array(array.tolist(), pa.binary()) if array.dtype.kind == "O" else pa.array(array)
