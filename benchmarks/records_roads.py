"""The roads of benchmarks/records.py that run in Trainyard's own environment: a process that does them one by one.

Reads a line {"road": name, "inputs": folder, "out": folder} and answers {"wall", "cpu", "rows", "bytes"}, or
{"error"}: seconds of the clock, of all CPUs (child processes too), rows, and bytes of TFRecords.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

BATCH = 16_384
READ_BATCH = 1024
EPOCHS = 4  # read at once: starting a pipeline costs a tenth of a second
ROADS: dict[str, Callable[[Path, Path], tuple[int, int]]] = {}


def road(name: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        ROADS[name] = function
        return function

    return register


def cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measured(function: Callable[[], tuple[int, int]]) -> dict[str, Any]:
    start, before = time.perf_counter(), cpu()
    rows, size = function()
    return {"wall": time.perf_counter() - start, "cpu": cpu() - before, "rows": rows, "bytes": size}


# ---- inputs as batches


def parquet(inputs: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(inputs / "table.parquet", memory_map=True, pre_buffer=False) as file:
        yield from file.iter_batches(BATCH, use_threads=False)


def csv(inputs: Path) -> Iterator[pa.RecordBatch]:
    schema = pq.read_schema(inputs / "table.parquet")
    options = pyarrow.csv.ConvertOptions(column_types=schema)
    reading = pyarrow.csv.ReadOptions(use_threads=False, block_size=8 << 20)
    with pyarrow.csv.open_csv(inputs / "table.csv", read_options=reading, convert_options=options) as reader:
        for block in reader:
            yield from (block.slice(at, BATCH) for at in range(0, block.num_rows, BATCH))


def digits(inputs: Path) -> Iterator[pa.RecordBatch]:
    images = np.load(inputs / "digits.npy", mmap_mode="r")
    labels = np.load(inputs / "labels.npy")
    for at in range(0, len(images), BATCH):
        part = np.ascontiguousarray(images[at : at + BATCH])
        column = pa.Array.from_buffers(pa.binary(784), len(part), [None, pa.py_buffer(part)])
        yield pa.RecordBatch.from_pydict({"image": column, "label": labels[at : at + BATCH]})


SOURCES = {"Parquet": parquet, "CSV": csv, "28x28": digits}


# ---- limits and the encoder alone: read, encode, write a file


def _read(source: Callable[[Path], Iterator[pa.RecordBatch]]) -> Any:
    return lambda inputs, out: (sum(batch.num_rows for batch in source(inputs)), 0)


def _encode(source: Callable[[Path], Iterator[pa.RecordBatch]], native: bool) -> Any:
    def run(inputs: Path, out: Path) -> tuple[int, int]:
        from trainers.records.encode import Encoder
        from trainers.records.native import NativeEncoder

        encoder = NativeEncoder() if native else Encoder()
        rows = 0
        with (out / "encoded.tfrecord").open("wb", buffering=0) as file:
            for batch in source(inputs):
                for piece in encoder.pieces(batch):
                    file.write(memoryview(piece.data))
                    rows += len(piece)
            return rows, file.tell()

    return run


for _name, _source in SOURCES.items():
    ROADS[f"{_name}: read only"] = _read(_source)
    ROADS[f"{_name}: encoder, numpy"] = _encode(_source, False)
    ROADS[f"{_name}: encoder, native"] = _encode(_source, True)


@road("disk: write only")
def write_only(inputs: Path, out: Path) -> tuple[int, int]:
    data = memoryview(b"x" * (512 << 10))
    with (out / "written").open("wb", buffering=0) as file:
        for _ in range(300):
            file.write(data)
        return 0, file.tell()


@road("JPEG: read only")
def read_files(inputs: Path, out: Path) -> tuple[int, int]:
    files = sorted((inputs / "jpeg").rglob("*.jpg"))
    return len(files), sum(len(path.read_bytes()) for path in files)


# ---- the whole of prepare


def _prepare(source: str, label: str, native: str = "", **options: Any) -> Any:
    def run(inputs: Path, out: Path) -> tuple[int, int]:
        from trainers.records import native as chooser
        from trainers.records.build import prepare

        os.environ["TRAINYARD_NATIVE"] = native
        chooser._chosen.cache_clear()
        manifest = prepare(
            inputs / source, out / "dataset", name="b", label=label, shards=4, progress=lambda line: None,
            **options,
        )  # fmt: skip
        return sum(manifest.counts.values()), sum(shard.bytes for shard in manifest.shards)

    return run


TABLE = {"label": "i00", "key": "i09", "processes": 1}
ROADS |= {
    "Parquet: prepare, numpy, no statistics": _prepare(
        "table.parquet", native="off", statistics=False, **TABLE
    ),
    "Parquet: prepare, native, no statistics": _prepare("table.parquet", statistics=False, **TABLE),
    "Parquet: prepare, native": _prepare("table.parquet", **TABLE),
    "Parquet: prepare, native, 2 processes": _prepare("table.parquet", **{**TABLE, "processes": 2}),
    "Parquet: prepare, blocks, no statistics": _prepare(
        "table.parquet", layout="blocks", statistics=False, **TABLE
    ),
    "Parquet: prepare, blocks": _prepare("table.parquet", layout="blocks", **TABLE),
    "CSV: prepare, native": _prepare("table.csv", **TABLE),
    "JPEG: prepare, encoded": _prepare("jpeg", "label", image="encoded", processes=1),
    "JPEG: prepare, encoded, 2 processes": _prepare("jpeg", "label", image="encoded", processes=2),
}


# ---- the usual way: Python's tf.train.Example


def _examples(inputs: Path, out: Path, batches: Iterator[pa.RecordBatch]) -> tuple[int, int]:
    import tensorflow as tf

    path = out / "examples.tfrecord"
    rows = 0
    with tf.io.TFRecordWriter(str(path)) as writer:
        for batch in batches:
            for row in batch.to_pylist():
                features = {}
                for name, value in row.items():
                    if isinstance(value, float):
                        kind = {"float_list": tf.train.FloatList(value=[value])}
                    elif isinstance(value, int):
                        kind = {"int64_list": tf.train.Int64List(value=[value])}
                    else:
                        data = value.encode() if isinstance(value, str) else value
                        kind = {"bytes_list": tf.train.BytesList(value=[data])}
                    features[name] = tf.train.Feature(**kind)
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
                rows += 1
    return rows, path.stat().st_size


def _first(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, rows)
        rows -= batch.num_rows
        if rows <= 0:
            return


ROADS["Parquet: Python tf.train.Example"] = lambda i, o: _examples(i, o, _first(parquet(i), 10_000))
ROADS["CSV: Python tf.train.Example"] = lambda i, o: _examples(i, o, _first(csv(i), 10_000))
ROADS["28x28: Python tf.train.Example"] = lambda i, o: _examples(i, o, _first(digits(i), 30_000))


@road("JPEG: Python tf.train.Example")
def jpeg_examples(inputs: Path, out: Path) -> tuple[int, int]:
    files = sorted((inputs / "jpeg").rglob("*.jpg"))
    rows = ({"image": p.read_bytes(), "label": int(p.parent.name), "key": p.name} for p in files)
    return _examples(inputs, out, iter([pa.RecordBatch.from_pylist(list(rows))]))


# ---- reading, consumed inside the graph as a training step does


def _drain(data: Any, rows: int) -> tuple[int, int]:
    import tensorflow as tf

    def count(total: Any, batch: Any) -> Any:
        first = batch["i00"] if isinstance(batch, dict) else batch
        return total + tf.shape(first)[0]

    found = int(data.reduce(tf.constant(0), count))
    if found != rows:
        raise ValueError(f"reading must give {rows} rows, got {found}")
    return rows, 0


def _dataset(inputs: Path, layout: str) -> Any:
    from trainers.records.read import Dataset

    (manifest,) = (inputs / layout).glob("*/manifest.json")
    return Dataset.open(manifest, verify=False)


def _reading(layout: str, **options: Any) -> Any:
    made: dict[Path, Any] = {}  # traced once, as in training

    def run(inputs: Path, out: Path) -> tuple[int, int]:
        data = _dataset(inputs, layout)
        batches = EPOCHS * data.batches("train", READ_BATCH)
        if inputs not in made:
            made[inputs] = data.dataset("train", READ_BATCH, repeat=True, **options).take(batches)
        return _drain(made[inputs], EPOCHS * data.count("train"))

    return run


@road("read: TFRecordDataset alone")
def records_alone(inputs: Path, out: Path) -> tuple[int, int]:
    import tensorflow as tf

    data = _dataset(inputs, "rows")
    files = [str(data.manifest.folder / shard.file) for shard in data.manifest.split("train")]
    records = tf.data.TFRecordDataset(files).repeat(EPOCHS)
    return _drain(records.batch(READ_BATCH), EPOCHS * data.count("train"))


@road("read: rows, parsed one by one")
def one_by_one(inputs: Path, out: Path) -> tuple[int, int]:
    import tensorflow as tf

    data = _dataset(inputs, "rows")
    spec = data.feature_spec()
    files = [str(data.manifest.folder / shard.file) for shard in data.manifest.split("train")]
    rows = min(20_000, data.count("train"))
    records = tf.data.TFRecordDataset(files).take(rows)
    return _drain(records.map(lambda r: tf.io.parse_single_example(r, spec)).batch(READ_BATCH), rows)


ROADS |= {
    "read: rows, batch then parse": _reading("rows"),
    "read: blocks": _reading("blocks"),
    "read: rows, shuffled": _reading("rows", shuffle=True, seed=1),
    "read: blocks, shuffled": _reading("blocks", shuffle=True, seed=1),
}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        inputs, out = Path(asked["inputs"]), Path(asked["out"])
        out.mkdir(parents=True, exist_ok=True)
        try:
            answer = measured(functools.partial(ROADS[asked["road"]], inputs, out))
        except Exception:  # noqa: BLE001 - told to the parent, who prints it
            answer = {"error": traceback.format_exc()}
        shutil.rmtree(out)  # not in the measurement: a road writes new files, it doesn't truncate old ones
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
