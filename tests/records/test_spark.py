"""The encoder inside Spark's mapInArrow, in local mode: a join, and the digest of one process."""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.records.build import prepare
from trainers.records.manifest import Manifest

REPO = Path(__file__).resolve().parents[2]
PYTHON = REPO / ".venv-spark" / "bin" / "python"

pytestmark = [
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no Spark here: scripts/spark-env makes .venv-spark (Java 17+)"
    ),
    pytest.mark.timeout(900),
]

SQL = "SELECT o.id, o.total, c.country, o.returned FROM orders o JOIN customers c ON o.customer = c.customer"


@pytest.fixture
def tables(tmp_path):
    rows = 5000
    rng = np.random.default_rng(2)
    orders = {
        "id": rng.permutation(rows),
        "customer": rng.integers(0, 50, rows),
        "total": rng.normal(size=rows),
        "returned": [None if i == 17 else int(i) % 2 for i in range(rows)],
    }
    (tmp_path / "orders").mkdir()
    for part in range(3):  # so that Spark has several partitions to join
        pq.write_table(pa.table(orders).slice(part * 2000, 2000), tmp_path / "orders" / f"{part}.parquet")
    customers = {"customer": range(50), "country": [f"land {i % 7}" for i in range(50)]}
    pq.write_table(pa.table({k: list(v) for k, v in customers.items()}), tmp_path / "customers.parquet")
    return {"orders": str(tmp_path / "orders"), "customers": str(tmp_path / "customers.parquet")}


def spark(arguments, log):
    """A process of Spark's own environment, as spark-submit would start it; what it printed."""
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ},
        "PYTHONPATH": str(REPO),
        "PYSPARK_PYTHON": str(PYTHON),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
        "TRAINYARD_TERMINATION_LOG": str(log),
        # One JVM in two threads, small, without the page that it would serve.
        "PYSPARK_SUBMIT_ARGS": "--master local[2] --driver-memory 1g --conf spark.ui.enabled=false "
        "--conf spark.driver.bindAddress=127.0.0.1 --conf spark.sql.shuffle.partitions=4 pyspark-shell",
    }
    run = subprocess.run([PYTHON, *arguments], env=environment, capture_output=True, text=True, timeout=420)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def test_a_join_encoded_by_spark_has_the_digest_of_one_process(tables, tmp_path):
    log = tmp_path / "log.json"
    spec = {
        "tables": tables,
        "sql": SQL,
        "order_by": ["id"],
        "units": 3,
        "output": str(tmp_path / "spark"),
        "name": "orders",
        "label": "returned",
        "key": "id",
    }
    spark(["-m", "trainers.records.spark", "--spec", json.dumps(spec)], log)
    result = json.loads(log.read_text())["result"]
    found = Manifest.load(result["manifest"])
    found.verify()
    assert sum(found.counts.values()) == 4999
    assert found.quarantined == 1

    # The same join and the same three units, but as Parquet, encoded by one process without Spark. And once more
    # by Spark, which has nothing to do.
    script = tmp_path / "units.py"
    script.write_text(
        textwrap.dedent(f"""
        import json
        from pyspark.sql import SparkSession
        from trainers.records.spark import main
        spark = SparkSession.builder.getOrCreate()
        spec = json.loads({json.dumps(json.dumps(spec))})
        for name, path in spec["tables"].items():
            spark.read.parquet(path).createOrReplaceTempView(name)
        frame = spark.sql(spec["sql"]).repartition(3, "id").sortWithinPartitions("id")
        frame.write.parquet({str(tmp_path / "units")!r})
        print("again", json.dumps(main(spec)))
        """)
    )
    said = spark([script], log)
    again = json.loads(next(line for line in said.splitlines() if line.startswith("again "))[6:])
    assert again == {**result, "reused": True}
    assert len(list((tmp_path / "units").glob("*.parquet"))) == 3
    alone = prepare(
        tmp_path / "units",
        tmp_path / "alone",
        name="orders",
        label="returned",
        key="id",
        shards=3,
        progress=print,
    )
    assert alone.digest == found.digest
    assert alone.statistics == found.statistics
    assert alone.schema().to_dict() == found.schema().to_dict()
