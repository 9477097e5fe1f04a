"""The peers of benchmarks/records.py that need tfx-bsl: runs in an environment of its own, see make_tfx.py.

The protocol is that of benchmarks/records_roads.py.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

BATCH = 16_384
warnings.simplefilter("ignore")
sys.stdout, answers = sys.stderr, sys.stdout  # Beam and TensorFlow print


def cpu() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Every value as a list of one, as tfx-bsl wants columns; without a copy."""
    offsets = pa.array(np.arange(batch.num_rows + 1), pa.int64())
    columns = []
    for column in batch.columns:
        if pa.types.is_string(column.type) or pa.types.is_fixed_size_binary(column.type):
            column = column.cast(pa.large_binary())
        columns.append(pa.LargeListArray.from_arrays(offsets, column))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def table(inputs: Path, kind: str):
    if kind == "CSV":
        schema = pq.read_schema(inputs / "table.parquet")
        options = pyarrow.csv.ConvertOptions(column_types=schema)
        reading = pyarrow.csv.ReadOptions(use_threads=False, block_size=8 << 20)
        with pyarrow.csv.open_csv(inputs / "table.csv", read_options=reading, convert_options=options) as r:
            for block in r:
                yield from (block.slice(at, BATCH) for at in range(0, block.num_rows, BATCH))
    elif kind == "28x28":
        images = np.load(inputs / "digits.npy", mmap_mode="r")
        labels = np.load(inputs / "labels.npy")
        for at in range(0, len(images), BATCH):
            part = np.ascontiguousarray(images[at : at + BATCH])
            column = pa.Array.from_buffers(pa.binary(784), len(part), [None, pa.py_buffer(part)])
            yield pa.RecordBatch.from_pydict({"image": column, "label": labels[at : at + BATCH]})
    else:
        with pq.ParquetFile(inputs / "table.parquet", memory_map=True, pre_buffer=False) as file:
            yield from file.iter_batches(BATCH, use_threads=False)


def encoder(inputs: Path, out: Path, kind: str) -> tuple[int, int]:
    import tensorflow as tf
    from tfx_bsl.coders import example_coder

    path, rows = out / "tfx.tfrecord", 0
    coder = example_coder.RecordBatchToExamplesEncoder()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for batch in table(inputs, kind):
            for record in coder.encode(lists(batch)):
                writer.write(record)
            rows += batch.num_rows
    return rows, path.stat().st_size


def beam(inputs: Path, out: Path) -> tuple[int, int]:
    import apache_beam
    from tfx_bsl.coders import example_coder

    coder = example_coder.RecordBatchToExamplesEncoder()
    rows = pq.read_metadata(inputs / "table.parquet").num_rows
    with apache_beam.Pipeline("DirectRunner") as pipeline:
        batches = pipeline | apache_beam.io.ReadFromParquetBatched(str(inputs / "table.parquet"))
        records = batches | apache_beam.FlatMap(
            lambda t: [r for b in t.to_batches(BATCH) for r in coder.encode(lists(b))]
        )
        records | apache_beam.io.WriteToTFRecord(str(out / "beam"))
    return rows, sum(path.stat().st_size for path in out.glob("beam*"))


ROADS = {
    "Parquet: tfx-bsl": lambda i, o: encoder(i, o, "Parquet"),
    "CSV: tfx-bsl": lambda i, o: encoder(i, o, "CSV"),
    "28x28: tfx-bsl": lambda i, o: encoder(i, o, "28x28"),
    "Parquet: Beam + tfx-bsl": beam,
}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        out = Path(asked["out"])
        out.mkdir(parents=True, exist_ok=True)
        try:
            start, before = time.perf_counter(), cpu()
            rows, size = ROADS[asked["road"]](Path(asked["inputs"]), out)
            answer = {"wall": time.perf_counter() - start, "cpu": cpu() - before, "rows": rows, "bytes": size}
        except Exception:  # noqa: BLE001 - told to the parent, who prints it
            answer = {"error": traceback.format_exc()}
        shutil.rmtree(out)  # not in the measurement, as with ours
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
