"""extract_sql: the rows of a database query as raw data for `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import task

from trainyard.failing import RetryByClass, explained
from trainyard.settings import storage_path

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["extract_sql"]


@task(multiple_outputs=True, retries=3, retry_policy=RetryByClass())
@explained
def _extract(
    conn_id: str, sql: str, output: str, parameters: dict[str, Any], chunk_rows: int, refresh: bool
) -> dict[str, Any]:
    from airflow.sdk import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException

    from trainers.job.errors import ConfigError
    from trainyard.sql import engine_of, extract

    try:
        connection = Connection.get(conn_id)
    except AirflowNotFoundException as e:
        raise ConfigError(
            f"there is no Airflow connection {conn_id}", hint="add it under Admin, Connections"
        ) from e
    return extract(
        engine_of(connection),
        sql,
        storage_path(output),
        parameters=parameters,
        chunk_rows=chunk_rows,
        refresh=refresh,
    )


def extract_sql(
    sql: str,
    *,
    conn_id: str,
    output: str,
    parameters: Mapping[str, Any] | None = None,
    chunk_rows: int = 65_536,
    refresh: bool = False,
    task_id: str = "extract",
) -> XComArg:
    """The rows of a query as Parquet files under the storage root: {"source", "rows", "files"}.

    The task runs in Airflow's worker, so that the connection's secret never leaves it. `sql` has named parameters,
    `:since`, whose values are given by `parameters`: never put values into the text. Both may hold templates, as
    may `output`, "storage://raw/orders/{{ data_interval_start | ds }}": a place for each query. The same query finds
    its rows there again; `refresh` asks for them anew. Memory is bounded by `chunk_rows`.

    Example:
        raw = extract_sql("SELECT ...", conn_id="shop", output="storage://raw/orders")
        records = prepare(raw["source"], name="orders", label="returned")
    """
    return _extract.override(task_id=task_id)(
        conn_id, sql, output, dict(parameters or {}), chunk_rows, refresh
    )
