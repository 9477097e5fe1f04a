"""Records of a join that fits no machine: Spark joins and encodes, and what it wrote is handed on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import dag, task
from trainyard import storage_path

import trainers

NAME = "orders"
ANSWER = "records/orders/joined.json"
TRAINERS = Path(trainers.__file__).parent
SPARK = Path(os.environ.get("SPARK_HOME", "/opt/spark"))  # of the pinned requirements-spark.txt


@dag(schedule=None, catchup=False)
def orders_by_spark() -> None:
    """Join, then take the manifest: train(records=...) would take it too."""

    @task
    def spec() -> str:
        raw = storage_path("raw/orders")
        join = "SELECT o.id, o.total, c.country, o.returned FROM orders o JOIN customers c ON o.customer = c.customer"
        return json.dumps(
            {
                "tables": {"orders": str(raw / "orders"), "customers": str(raw / "customers.parquet")},
                "sql": join,
                "order_by": ["id"],  # a key
                "units": 3,
                "output": str(storage_path("records") / NAME),
                "answer": str(storage_path(ANSWER)),
                **{"name": NAME, "label": "returned", "key": "id"},
            }
        )

    joined = SparkSubmitOperator(
        task_id="join",
        conn_id="spark_default",
        spark_binary=str(SPARK / "bin" / "spark-submit"),
        application=str(TRAINERS / "records" / "spark.py"),
        application_args=["--spec", spec()],
        env_vars={"PYTHONPATH": str(TRAINERS.parent)},
        conf={"spark.sql.shuffle.partitions": "4", "spark.ui.enabled": "false"},
    )

    @task
    def records() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(storage_path(ANSWER).read_text())
        return found

    joined >> records()


orders_by_spark()
