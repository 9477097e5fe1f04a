# ruff: noqa: TID253 - runs under Spark only, never imported by a DAG file
"""Records of a join or a sort that fits no machine: the same encoder, inside Spark's `mapInArrow`.

    spark-submit trainers/records/spark.py --spec '{
        "tables": {"flights": "s3a://raw/flights", "weather": "s3a://raw/weather"},
        "sql": "SELECT ... FROM flights JOIN weather USING (origin, hour)",
        "order_by": ["id"], "units": 64,
        "output": "/data/records/flights", "name": "flights", "label": "arr_delay"}'

Spark joins, deals rows to units by a hash of `order_by`, and sorts each unit by it; each unit is then encoded where it
is, by the worker that has it, straight into its shards under `output`, which all workers must see. The driver merges
statistics and writes the manifest. `order_by` must tell rows apart (a key), or the order, and with it the digest,
would be Spark's chance. Then the digest is that of one process that prepares the same units from Parquet.

The rest of the spec are options of `prepare`. A table is what Spark reads as Parquet. Python and this package must be
the same on driver and workers. `answer` names a file for what the step answers, {"manifest": ...}, since
SparkSubmitOperator hands nothing back. For encoding alone take no Spark: see docs/adr/0004-no-engine-for-records.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    # spark-submit gives a file, and Python then looks beside it first: our statistics would hide Python's own.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trainers.job.errors import ConfigError
from trainers.job.files import write_json
from trainers.job.termination import run_step
from trainers.records.build import Build, Listing
from trainers.records.convert import feature_of
from trainers.records.manifest import Manifest
from trainers.records.options import CODE_VERSION, Options
from trainers.records.publishing import Prepared, Progress, publishing
from trainers.records.schema import Schema
from trainers.records.source import Batch
from trainers.records.units import UnitResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["encode_frame", "main"]

_RESULT = "unit long, result string"
_NEEDED = ("tables", "sql", "order_by", "units")
_OWN = (*_NEEDED, "answer")


class _Partitions:
    """A source whose units are partitions of a Spark frame; `batches` are those of the one that is at hand."""

    files: Sequence[Any] = ()

    def __init__(self, schema: pa.Schema, units: int, batches: Iterable[pa.RecordBatch] = ()) -> None:
        self._schema = schema
        self._units = units
        self._batches = batches

    def infer(self) -> Schema:
        return Schema(tuple(feature_of(field.name, field.type) for field in self._schema))

    def units(self, most: int) -> int:
        return self._units

    def unit_files(self, unit: int, units: int) -> Sequence[Any]:
        return ()

    def read(self, unit: int, units: int, schema: Schema, batch_rows: int) -> Iterator[Batch]:
        at = 0
        for batch in self._batches:
            yield Batch(
                f"unit-{unit:05d}", np.arange(at + 1, at + 1 + batch.num_rows), batch.select(schema.names)
            )
            at += batch.num_rows


class _FrameBuild(Build):
    """A Build whose units come from Spark."""

    def __init__(self, options: Options, listing: Listing, source: _Partitions, progress: Progress) -> None:
        self.options, self.listing, self.progress = options, listing, progress
        self.folder, self.fingerprint = listing.folder, listing.fingerprint
        self.source, self.key = source, options.key


def encode_frame(
    frame: DataFrame,
    *,
    made_from: Any,
    order_by: Sequence[str],
    units: int,
    progress: Progress = print,
    **options: Any,
) -> Prepared:
    """Turn a Spark frame into a dataset; what `prepare` takes goes into `options`.

    `made_from` is a JSON value that changes with the frame's content: its fingerprint is that, and a dataset that is
    there already is not made again. Raises the errors of `prepare`.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    if not order_by or not isinstance(units, int) or isinstance(units, bool) or units < 1:
        raise ConfigError("order_by must name columns that tell rows apart, and units be 1 or more")
    parsed = Options.parse(**{**options, "shards": max(units, options.get("shards", units))})
    text = json.dumps(
        [CODE_VERSION, "spark", parsed.content(), list(order_by), units, made_from], sort_keys=True
    )
    found = hashlib.sha256(text.encode()).hexdigest()
    listing = Listing("spark", (), found, parsed.output / found[:16])
    schema_of_frame = to_arrow_schema(frame.schema)

    def make() -> Manifest:
        build = _FrameBuild(parsed, listing, _Partitions(schema_of_frame, units), progress)
        schema = build.schema()
        planned = build.units(schema)
        dealt = frame.repartition(units, *order_by).sortWithinPartitions(*order_by)
        work = _worker(parsed, listing, schema_of_frame, schema, units)
        rows = dealt.mapInArrow(work, _RESULT).collect()
        results = {row["unit"]: UnitResult.from_dict(json.loads(row["result"])) for row in rows}
        # Spark calls nobody for a partition without rows: its shards are empty, but they must be there.
        return build.finish(
            schema, planned, [results.get(unit.index) or build.unit(unit, schema) for unit in planned]
        )

    return publishing(listing.folder, progress, make)


def _worker(
    options: Options, listing: Listing, arrow: pa.Schema, schema: Schema, units: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What Spark's Python workers run on each partition."""

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "this runs within a task of Spark"
        index = context.partitionId()
        build = _FrameBuild(options, listing, _Partitions(arrow, units, batches), lambda line: None)
        result = build.unit(build.units(schema, quiet=True)[index], schema)
        # An iterator that is left alone would leave Spark's writer with a broken pipe.
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict(
            {"unit": pa.array([index], pa.int64()), "result": pa.array([json.dumps(result.to_dict())])}
        )

    return encode


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text."""
    from pyspark.sql import SparkSession

    from trainers.records.listing import list_files

    missing = [name for name in (*_NEEDED, "output", "name", "label") if not spec.get(name)]
    if missing:
        raise ConfigError(f"the spec lacks {', '.join(missing)}")
    spark = SparkSession.builder.appName(f"records of {spec['name']}").getOrCreate()
    made_from: dict[str, Any] = {"sql": spec["sql"]}
    for name, path in spec["tables"].items():
        _, files = list_files(path, _say)
        made_from[name] = [[file.name, file.size, file.version] for file in files]
        spark.read.parquet(str(path)).createOrReplaceTempView(name)
    options = {name: value for name, value in spec.items() if name not in _OWN}
    options.setdefault("source", next(iter(spec["tables"].values())))
    answer = encode_frame(
        spark.sql(spec["sql"]),
        made_from=made_from,
        order_by=spec["order_by"],
        units=spec["units"],
        progress=_say,
        **options,
    ).answer()
    if spec.get("answer"):
        write_json(Path(spec["answer"]), answer)
    return answer


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_step(main))
