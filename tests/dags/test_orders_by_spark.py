"""The docs' pipeline of a join: its SparkSubmitOperator really runs Spark, in local mode; the digest of one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from trainers.records.build import prepare
from trainers.records.frames import frames
from trainers.records.manifest import Manifest
from trainers.records.read import Dataset

REPO = Path(__file__).resolve().parents[2]
SPARK = REPO / ".venv-spark"

pytestmark = [
    pytest.mark.skipif(
        not (SPARK / ".installed").exists(),
        reason="no Spark here: scripts/spark-env makes .venv-spark (Java 17+)",
    ),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]


@pytest.fixture
def dag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline over some raw tables."""
    from airflow.dag_processing.dagbag import DagBag

    (home,) = SPARK.glob("lib/python3*/site-packages/pyspark")
    environment = {
        "TRAINYARD_STORAGE": str(tmp_path),
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": str(SPARK / "bin" / "python"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    rng = np.random.default_rng(4)
    rows = 2000
    orders = {
        "id": rng.permutation(rows),
        "customer": rng.integers(0, 50, rows),
        "total": rng.normal(size=rows),
        "returned": rng.integers(0, 2, rows),
    }
    raw = tmp_path / "raw" / "orders"
    (raw / "orders").mkdir(parents=True)
    for part in range(2):
        pq.write_table(pa.table(orders).slice(part * 1000, 1000), raw / "orders" / f"{part}.parquet")
    customers = {"customer": list(range(50)), "country": [f"land {i % 7}" for i in range(50)]}
    pq.write_table(pa.table(customers), raw / "customers.parquet")
    bag = DagBag(dag_folder=str(REPO / "docs" / "examples" / "orders_by_spark.py"))
    assert bag.import_errors == {}
    return bag.dags["orders_by_spark"]


def test_the_operator_submits_the_join_and_the_digest_is_that_of_one_process(
    dag: Any, tmp_path: Path
) -> None:
    join = dag.get_task("join")
    assert join.upstream_task_ids == {"spec"}
    assert dag.get_task("records").upstream_task_ids == {"join"}
    assert "application_args" in join.template_fields  # Airflow puts the spec's text there
    join.application_args = ["--spec", dag.get_task("spec").python_callable()]
    join.durable = False
    join.execute({"ti": SimpleNamespace(task_id="join"), "task": join})
    answer = dag.get_task("records").python_callable()
    found = Manifest.load(answer["manifest"])
    found.verify()
    assert sum(found.counts.values()) == 2000
    assert answer["reused"] is False

    raw = tmp_path / "raw" / "orders"
    orders = pa.concat_tables([pq.read_table(file) for file in sorted((raw / "orders").iterdir())])
    joined = orders.join(pq.read_table(raw / "customers.parquet"), "customer").sort_by("id")
    joined = joined.select(["id", "total", "country", "returned"])
    # The same rows in the same three units, by what each unit that Spark wrote holds.
    units: dict[int, list[int]] = {}
    records = Dataset.open(found.path)
    for split in ("train", "eval"):
        for number, shard in enumerate(found.split(split)):
            rows = tf.constant(list(frames(found.folder / shard.file)))
            ids = records.parse(rows)["id"].numpy().tolist()
            assert ids == sorted(ids)
            units.setdefault(number, []).extend(ids)
    (tmp_path / "units").mkdir()
    for number, ids in units.items():
        mine = joined.take(pa.array(sorted(ids)))  # ids are 0 to 1,999, and sorted
        pq.write_table(mine, tmp_path / "units" / f"{number}.parquet")
    alone = prepare(
        tmp_path / "units", tmp_path / "alone", name="orders", label="returned", key="id", shards=3,
        progress=lambda line: None,
    )  # fmt: skip
    assert alone.digest == found.digest
