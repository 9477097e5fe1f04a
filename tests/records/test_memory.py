"""Memory is bounded by a batch, not by the size of files: data limited to a fraction of what is read."""

import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, WIDTH = 40_000, 8_000
RAW = ROWS * WIDTH  # bytes of text in the file, 320 MB
ALLOWED = 200 << 20  # more of data than after a small run

# A process of its own, which may hold ALLOWED bytes more than it does once everything is imported.
LIMITED = """
import json, resource, sys
from pathlib import Path
from trainers.records.build import prepare

source, folder, allowed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
quiet = lambda line: None
small = folder / f"small{''.join(source.suffixes)}"
prepare(small, folder / "warm", name="n", label="y", progress=quiet)
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, resource.RLIM_INFINITY))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manifest = prepare(source, folder / "out", name="n", label="y", key="id", progress=quiet)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
bytes = sum(shard.bytes for shard in manifest.shards)
print(json.dumps({"grown": grown, "rows": sum(manifest.counts.values()), "bytes": bytes}))
"""


def text(i):
    return f"{i:010}" + "abcdefghijklmnop" * (WIDTH // 16)


def write(path, rows):
    """A file of wide rows, written piece by piece; Parquet as one row group."""
    if path.suffix == ".parquet":
        strings = pa.array([text(i) for i in range(rows)], pa.large_string())
        data = pa.table({"id": range(rows), "s": strings, "y": [i % 2 for i in range(rows)]})
        pq.write_table(data, path, row_group_size=rows, use_dictionary=False, compression="zstd")
        assert pq.read_metadata(path).num_row_groups == 1
        return
    csv = ".csv" in path.suffixes
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 1, raw) if path.suffix == ".gz" else raw as f:
        f.write(b"id,s,y\n" if csv else b"")
        for i in range(rows):
            row = {"id": i, "s": text(i), "y": i % 2}
            line = ",".join(map(str, row.values())) if csv else json.dumps(row)
            f.write(line.encode() + b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA bounds private memory on Linux only")
@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl.gz"])
def test_a_file_larger_than_the_memory(name, tmp_path):
    path = tmp_path / name
    write(path, ROWS)
    write(tmp_path / f"small{''.join(path.suffixes)}", 100)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(tmp_path), str(ALLOWED)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["rows"] == ROWS
    assert found["bytes"] > RAW > 1.5 * ALLOWED
    assert found["grown"] < RAW  # the limit is on private data; this is all that was resident
