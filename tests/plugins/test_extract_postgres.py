"""A query's rows by a real connection of Airflow to a real PostgreSQL."""

from __future__ import annotations

import datetime as dt
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from trainyard.failing import StepFailed
from trainyard.sql import engine_of

from tests.plugins.extracting import extracted, rows_of
from tests.plugins.postgres_server import Server, serving

TYPES = """
CREATE TABLE kinds (
    id bigint PRIMARY KEY, small smallint, price numeric(12, 2), whole numeric(18, 0), any_size numeric,
    ratio double precision, ok boolean, born date, seen timestamptz, local timestamp, daytime time, took interval,
    name text, code char(3), numbers integer[], words text[], facts jsonb, raw json, who uuid, bits bytea, mood mood
);
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        with found.connect() as db:
            db.execute("CREATE TYPE mood AS ENUM ('glad', 'sad')")
            db.execute(TYPES)
            db.execute(
                """
                INSERT INTO kinds SELECT i, i, i + 0.25, i * 1000000000000, i / 8.0, i / 3.0::float8, i % 2 = 0,
                    date '2013-01-01' + i, timestamptz '2013-01-01 00:00+02' + i * interval '1 hour',
                    timestamp '2013-01-01' + i * interval '1 ms', time '00:00' + i * interval '1 min',
                    i * interval '1 second', 'n' || i, 'abc', ARRAY[i, NULL, i + 1], ARRAY['x', 'y' || i],
                    jsonb_build_object('i', i, 'l', ARRAY[1, 2]), '[1, "zwei"]',
                    ('00000000-0000-0000-0000-' || lpad(i::text, 12, '0'))::uuid, decode('00ff', 'hex'), 'glad'
                FROM generate_series(1, 500) AS i
                """
            )
            db.execute("INSERT INTO kinds (id) SELECT i FROM generate_series(501, 600) AS i")
            db.execute(
                "CREATE TABLE orders AS SELECT i AS id, i % 2 AS late FROM generate_series(1, 1000) AS i"
            )
        yield found


@pytest.fixture
def run(server: Server, context_of: Any, pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the task that `extract_sql` makes, by the connection `shop`."""
    connection = {
        "conn_type": "postgres", "host": server.host, "port": server.port, "login": server.user,
        "password": server.password, "schema": server.database,
    }  # fmt: skip

    def call(sql: str, password: str = server.password, **options: Any) -> dict[str, Any]:
        monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps({**connection, "password": password}))
        return extracted(sql, context_of, monkeypatch, **{"chunk_rows": 100, **options})

    return call


def test_every_common_type_comes_as_it_is(run: Any) -> None:
    result = run("SELECT * FROM kinds ORDER BY id")
    assert (result["rows"], result["files"]) == (600, 6)
    rows = rows_of(result)
    seen = dt.datetime(2013, 1, 1, 5, tzinfo=dt.timezone.utc)
    assert rows[6] == {
        "id": 7, "small": 7, "price": Decimal("7.25"), "whole": Decimal("7000000000000"),
        "any_size": 7 / 8, "ratio": 7 / 3, "ok": False, "born": dt.date(2013, 1, 8), "seen": seen,
        "local": dt.datetime(2013, 1, 1, 0, 0, 0, 7000), "daytime": dt.time(0, 7),
        "took": dt.timedelta(seconds=7), "name": "n7", "code": "abc", "numbers": [7, None, 8],
        "words": ["x", "y7"], "facts": '{"i": 7, "l": [1, 2]}', "raw": '[1, "zwei"]',
        "who": "00000000-0000-0000-0000-000000000007", "bits": b"\x00\xff", "mood": "glad",
    }  # fmt: skip
    assert rows[599] == {"id": 600} | dict.fromkeys(list(rows[0])[1:])


def test_chunks_have_the_same_types_and_prepare_takes_them(run: Any, tmp_path: Path) -> None:
    from trainers.records import build

    result = run("SELECT * FROM kinds ORDER BY id DESC")  # the first chunk is empty but for its ids
    schemas = [pq.read_schema(file) for file in sorted(Path(result["source"]).glob("*.parquet"))]
    lists = ("numbers", "words", "mood")  # of which only the values tell
    assert len({tuple(f for f in schema if f.name not in lists) for schema in schemas}) == 1
    plain = run(
        "SELECT id, price, whole, any_size, ok, born, seen, name, facts, who, mood FROM kinds", refresh=True
    )
    manifest = build.prepare(plain["source"], tmp_path / "records", name="kinds", label="id", key="id")
    types = {feature.name: feature.type for feature in manifest.schema()}
    assert types == {
        "id": "int64", "price": "float32", "whole": "int64", "any_size": "float32", "ok": "int64",
        "born": "int64", "seen": "int64", "name": "string", "facts": "string", "who": "string", "mood": "string",
    }  # fmt: skip
    assert sum(manifest.counts.values()) == 600
    assert sum(manifest.statistics[split]["price"]["missing"] for split in ("train", "eval")) == 100


def test_parameters_are_bound(run: Any) -> None:
    sql = "SELECT id FROM kinds WHERE born >= :first AND born < :end AND name <> :name"
    bounds = {"first": "2013-01-10", "end": "2013-01-20", "name": "'; DROP TABLE kinds; --"}
    assert [row["id"] for row in rows_of(run(sql, parameters=bounds))] == list(range(9, 19))


@pytest.mark.parametrize(
    ("sql", "options", "failure_class", "words"),
    [
        ("SELECT * FROM no_table", {}, "CONFIG", 'refuses the query: relation "no_table" does not exist'),
        ("SELEC 1", {}, "CONFIG", "refuses the query: syntax error"),
        # 250 rows come, two chunks and a half, before the statement fails.
        ("SELECT 1 / (250 - i) AS x FROM generate_series(0, 400) AS i", {}, "CONFIG", "division by zero"),
        ("SELECT 1 AS x WHERE false", {}, "DATA", "gave no row"),
        ("SELECT 'NaN'::numeric(5, 2) AS x", {}, "DATA", "cast it in the query"),
        ("SELECT 1 AS x", {"password": "wr0ng-secret"}, "INFRA", "password authentication failed"),
    ],
)
def test_what_fails_leaves_nothing_and_tells_no_secret(
    run: Any, server: Server, pipelines: Path, caplog: Any, capfd: Any, sql: str, options: Any,
    failure_class: str, words: str,
) -> None:  # fmt: skip
    with caplog.at_level(logging.DEBUG), pytest.raises(StepFailed, match=words) as caught:
        run(sql, **options)
    assert caught.value.failure.failure_class.value == failure_class
    assert [path for path in pipelines.rglob("*") if path.is_file()] == []
    told = (
        caplog.text
        + "".join(capfd.readouterr())
        + repr(caught.value)
        + json.dumps(caught.value.failure.to_dict())
    )
    assert server.password not in told
    assert "wr0ng-secret" not in told


def test_a_connection_that_breaks_midway_publishes_nothing_and_the_retry_does(
    run: Any, server: Server, pipelines: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainyard import sql as module

    real = module.column
    broken: list[int] = []

    def breaking(values: Any, declared: Any) -> Any:
        if not broken and values[0] == 301:  # the fourth of ten chunks
            with server.connect() as db:
                found = db.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                ).fetchall()
            broken.append(len(found))
        return real(values, declared)

    monkeypatch.setattr(module, "column", breaking)
    sql = "SELECT id FROM orders ORDER BY id"
    with pytest.raises(StepFailed, match="can't be asked") as caught:
        run(sql)
    assert broken == [1]
    assert caught.value.failure.failure_class.value == "INFRA", "so that the task is retried"
    assert [path for path in pipelines.rglob("*") if path.is_file()] == []
    assert run(sql)["rows"] == 1000
    assert server.password not in "".join(capsys.readouterr())


def test_the_server_gives_the_rows_chunk_by_chunk(server: Server, tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from airflow.sdk import Connection
from trainyard.sql import engine_of, extract
host, port, login, schema = sys.argv[1:5]
connection = Connection(conn_id="shop", conn_type="postgres", host=host, port=int(port), login=login,
                        password=sys.stdin.read(), schema=schema)
sql = "SELECT i, repeat(md5(i::text), 8) AS text FROM generate_series(1, :rows) AS i"
def peak(rows):
    extract(engine_of(connection), sql, Path(sys.argv[5]) / str(rows), parameters={"rows": rows}, chunk_rows=2000,
            progress=lambda line: None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
few, many = peak(10_000), peak(200_000)
print(few, many)
assert many - few < 25_000, (few, many)  # KiB; the rows are 50 MB and more, and as Python's objects more than that
"""
    address = [server.host, str(server.port), server.user, server.database, str(tmp_path)]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *address], input=server.password.encode(), check=True,
        timeout=300,
    )  # fmt: skip


def test_the_engine_hides_parameters_and_the_password(server: Server) -> None:
    from airflow.sdk import Connection

    engine = engine_of(
        Connection(conn_id="shop", conn_type="postgres", host=server.host, port=server.port, login=server.user,
                   password=server.password, schema=server.database)
    )  # fmt: skip
    assert engine.dialect.name == "postgresql"
    assert engine.hide_parameters
    assert server.password not in repr(engine)
    engine.dispose()
