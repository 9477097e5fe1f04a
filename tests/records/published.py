"""What a run of prepare left: for tests to look at."""

import json

import pyarrow.csv
import pyarrow.parquet as pq

from trainers.records.frames import frames


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def quarantine(manifest):
    return pq.read_table(manifest.folder / "quarantine.parquet").to_pylist()


def records(manifest):
    return {s.file: list(frames(manifest.folder / s.file)) for s in manifest.shards}


def content(manifest):
    return {key: value for key, value in manifest.to_dict().items() if key != "created"}


def write(path, data, kind):
    if kind == "parquet":
        pq.write_table(data, path, row_group_size=30)
    elif kind == "csv":
        pyarrow.csv.write_csv(data.drop_columns(["tags"]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in data.to_pylist()))
