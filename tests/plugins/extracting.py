"""Running the task that `extract_sql` makes, and reading what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from airflow.sdk import DAG
from trainyard import extract_sql

__all__ = ["extracted", "rows_of"]


def extracted(sql: str, context_of: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """What the task of `extract_sql` returns, by the connection `shop`."""
    with DAG("pipeline") as dag:
        extract_sql(sql, **{"conn_id": "shop", "output": "storage://raw/orders", **options})
    task = dag.get_task("extract")
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context_of(task))
    return dict(task.python_callable(*task.op_args))


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all files, in their order."""
    files = sorted(Path(result["source"]).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]
