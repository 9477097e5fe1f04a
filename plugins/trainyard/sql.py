"""The rows of a database query as Parquet files, in chunks: what `extract_sql` does, in Airflow's worker.

The connection's secret stays in the worker: no pod, no spec, no log and no file of the result holds it. Rows come by a
server-side cursor where the database has them (PostgreSQL, MySQL; SQLite reads step by step anyhow), so memory is
bounded by a chunk, whatever the query gives. Each chunk is a file with types of its own; `prepare` finds what is
common to them, so that a column that is empty in the first chunk is no trouble.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import ConfigError, DataError, InfraError
from trainers.job.files import read_json, write_json
from trainyard.sql_types import column, types_of

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from sqlalchemy.engine import Engine

__all__ = ["DONE", "DatabaseUnreachable", "QueryEmpty", "QueryRefused", "engine_of", "extract"]

DONE = ".complete.json"
_MOST_ROWS = 1 << 20
# Airflow's types of connections, and SQLAlchemy's dialects where the names differ.
_DIALECTS = {"postgres": "postgresql", "mssql": "mssql+pymssql"}


class QueryRefused(ConfigError):
    """The database refused the query."""

    code = "sql.refused"


class QueryEmpty(DataError):
    """The query gave no row."""

    code = "sql.empty"


class DatabaseUnreachable(InfraError):
    """The database can't be reached, or went away."""

    code = "sql.unreachable"


def engine_of(connection: Connection) -> Engine:
    """The engine of an Airflow connection: its provider's where that is installed, else by SQLAlchemy's own name."""
    from airflow.exceptions import AirflowException
    from sqlalchemy import URL, create_engine
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    kind = connection.conn_type
    try:
        hook = connection.get_hook()
        if hasattr(hook, "get_sqlalchemy_engine"):
            return hook.get_sqlalchemy_engine({"hide_parameters": True})
    except (AirflowException, ImportError):  # no provider for it: SQLAlchemy may know it all the same
        pass
    dialect = _DIALECTS.get(kind, kind)
    if dialect == "sqlite":
        url = URL.create("sqlite", database=connection.host or connection.schema)
    else:
        url = URL.create(
            dialect,
            username=connection.login or None,
            password=connection.password or None,
            host=connection.host or None,
            port=connection.port,
            database=connection.schema or None,
        )
    try:
        return create_engine(url, hide_parameters=True)
    except (NoSuchModuleError, ArgumentError, ImportError) as e:
        raise ConfigError(
            f"there is no driver for connections of type {kind!r}: {e}",
            hint=f"install its provider, apache-airflow-providers-{kind}, where Airflow's workers run",
        ) from e


def extract(
    engine: Engine,
    sql: str,
    output: Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    chunk_rows: int = 65_536,
    refresh: bool = False,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write a query's rows to `output`/part-00000.parquet, ...: {"source", "rows", "files", "reused"}.

    All files appear at once, by a rename of their folder. A folder that holds this very query is left as it is,
    unless `refresh` asks for the rows again. Raises QueryRefused, QueryEmpty or DatabaseUnreachable.
    """
    from trainers.records.locks import exclusive

    if not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool) or not 1 <= chunk_rows <= _MOST_ROWS:
        raise ConfigError(f"chunk_rows must be a whole number from 1 to {_MOST_ROWS}, got {chunk_rows!r}")
    query = hashlib.sha256(json.dumps([sql, dict(parameters or {})], sort_keys=True, default=str).encode())
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = output.with_name(f".{output.name}.lock")
    with exclusive(lock, lambda: progress(f"another run writes {output}; waiting for it")):
        for stale in output.parent.glob(f".{output.name}.*.tmp"):  # of a run that was killed
            shutil.rmtree(stale)
        done = read_json(output / DONE) if output.is_dir() else None
        if done is not None and done.get("query") == query.hexdigest() and not refresh:
            progress(f"nothing to do: {output} holds this query's {done['rows']} rows")
            return {"source": str(output), "rows": done["rows"], "files": done["files"], "reused": True}
        if output.exists() and done is None:
            raise ConfigError(
                f"{output} holds files that aren't ours", hint="name a folder that is new or empty"
            )
        temp = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
        temp.mkdir()
        try:
            rows, files = _write(engine, sql, parameters, temp, chunk_rows, progress)
            write_json(temp / DONE, {"query": query.hexdigest(), "rows": rows, "files": files})
            if output.exists():
                old = temp.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
                output.rename(old)
                shutil.rmtree(old)
            temp.rename(output)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    progress(f"{rows} rows in {files} files in {output}")
    return {"source": str(output), "rows": rows, "files": files, "reused": False}


def _write(
    engine: Engine,
    sql: str,
    parameters: Mapping[str, Any] | None,
    folder: Path,
    chunk_rows: int,
    progress: Callable[[str], None],
) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    total = files = 0
    for names, types, rows in _chunks(engine, sql, parameters or {}, chunk_rows):
        try:
            columns = [column(*given) for given in zip(zip(*rows, strict=True), types, strict=True)]
        except (pa.ArrowInvalid, pa.ArrowTypeError) as e:
            raise DataError(
                f"rows {total} to {total + len(rows)} of the query have a column of mixed types: {e}",
                hint="cast it in the query",
            ) from e
        pq.write_table(pa.table(columns, names=names), folder / f"part-{files:05d}.parquet")
        total, files = total + len(rows), files + 1
        progress(f"{total} rows")
    if not total:
        raise QueryEmpty("the query gave no row", hint="check its conditions and parameters")
    return total, files


def _chunks(
    engine: Engine, sql: str, parameters: Mapping[str, Any], chunk_rows: int
) -> Iterator[tuple[list[str], list[Any], Sequence[Sequence[Any]]]]:
    """Names and types of columns, and some rows, until there are no more."""
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

    values = dict(parameters)
    try:
        with engine.connect() as connection:
            options = {"stream_results": True, "max_row_buffer": chunk_rows}
            # Closed by name: a server-side cursor must not outlive what reads it, however that ends.
            with contextlib.closing(
                connection.execution_options(**options).execute(text(sql), values)
            ) as found:
                names = list(found.keys())
                twice = sorted({name for name in names if names.count(name) > 1})
                if twice:
                    raise QueryRefused(
                        f"the query gives {twice[0]!r} twice", hint='name one otherwise by "AS"'
                    )
                types: list[Any] = []
                while rows := found.fetchmany(chunk_rows):
                    if not types:  # a server-side cursor knows them with its first rows
                        types = types_of(
                            engine.dialect.name, found.cursor.description if found.cursor else None
                        )
                    yield names, types or [None] * len(names), rows
    except SQLAlchemyError as e:
        reason = str(getattr(e, "orig", None) or e).splitlines()[0]
        gone = isinstance(e, InterfaceError) or (isinstance(e, DBAPIError) and e.connection_invalidated)
        # SQLite calls a missing table "operational": there, nothing is far away that could be out of reach.
        if gone or (isinstance(e, OperationalError) and engine.dialect.name != "sqlite"):
            raise DatabaseUnreachable(f"the database can't be asked: {reason}") from e
        raise QueryRefused(f"the database refuses the query: {reason}", hint="try it there by hand") from e
    finally:
        engine.dispose()
