"""A query's rows by a real connection of Airflow to a real SQLite database."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from trainyard import extract_sql, prepare
from trainyard.failing import StepFailed
from trainyard.sql import DONE, engine_of, extract

from tests.plugins.extracting import extracted, rows_of

ROWS = 1000


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of orders, whose note is empty in the first 600 rows."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE orders (id INTEGER, day TEXT, total REAL, note TEXT, returned INTEGER)")
        rows = [
            (i, f"2013-{i % 3 + 1:02d}-01", i / 7, f"note {i}" if i >= 600 else None, i % 2)
            for i in range(ROWS)
        ]
        db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", rows)
    db.close()
    connection = {"conn_type": "sqlite", "host": str(path), "password": "hunter2"}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps(connection))
    return path


@pytest.fixture
def run(context_of: Any, pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the task that `extract_sql` makes."""

    def call(sql: str, **options: Any) -> dict[str, Any]:
        return extracted(sql, context_of, monkeypatch, **{"chunk_rows": 300, **options})

    return call


def test_rows_come_in_chunks_and_the_secret_stays(shop: Path, run: Any, capsys: Any, pipelines: Path) -> None:
    result = run("SELECT * FROM orders ORDER BY id")
    assert (result["rows"], result["files"], result["reused"]) == (ROWS, 4, False)
    assert [row["id"] for row in rows_of(result)] == list(range(ROWS))
    assert rows_of(result)[999] == {
        "id": 999,
        "day": "2013-01-01",
        "total": 999 / 7,
        "note": "note 999",
        "returned": 1,
    }
    written = [path.read_bytes() for path in pipelines.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in data for data in written)
    assert "hunter2" not in "".join(capsys.readouterr()) + json.dumps(result)


def test_parameters_are_bound_and_the_same_query_is_not_asked_again(shop: Path, run: Any) -> None:
    sql = "SELECT id, returned FROM orders WHERE day = :day AND id < :most"
    result = run(sql, parameters={"day": "2013-02-01", "most": 100})
    assert {row["id"] % 3 for row in rows_of(result)} == {1}
    assert result["rows"] == 33
    with sqlite3.connect(shop) as db:
        db.execute("DELETE FROM orders WHERE id < 50")
    db.close()
    assert run(sql, parameters={"day": "2013-02-01", "most": 100}) == {**result, "reused": True}
    assert run(sql, parameters={"day": "2013-02-01", "most": 100}, refresh=True)["rows"] < 33
    assert run(sql, parameters={"day": "2013-03-01", "most": 900})["rows"] > 33, "another query, other rows"
    (folder,) = {path.name for path in Path(result["source"]).parent.iterdir()}
    assert folder == "orders", "nothing is left beside it"


@pytest.mark.parametrize(
    ("sql", "options", "failure_class", "words"),
    [
        ("SELECT * FROM no_orders", {}, "CONFIG", "refuses the query: no such table: no_orders"),
        ("SELECT id, day AS id FROM orders", {}, "CONFIG", "gives 'id' twice"),
        (
            "SELECT * FROM orders WHERE day = :day",
            {"parameters": {"day": "' OR 1=1 --"}},
            "DATA",
            "gave no row",
        ),
        ("SELECT * FROM orders", {"conn_id": "nowhere"}, "CONFIG", "no Airflow connection nowhere"),
        ("SELECT * FROM orders", {"chunk_rows": 0}, "CONFIG", "chunk_rows must be"),
        ("SELECT * FROM orders", {"output": "storage://../etc"}, "CONFIG", "storage root"),
        ("SELECT CASE WHEN id = 5 THEN 'x' ELSE id END AS id FROM orders", {}, "DATA", "mixed types"),
    ],
)
def test_what_fails_leaves_nothing(
    shop: Path, run: Any, pipelines: Path, sql: str, options: Any, failure_class: str, words: str
) -> None:
    with pytest.raises(StepFailed, match=words) as caught:
        run(sql, **options)
    assert caught.value.failure.failure_class.value == failure_class
    assert [path for path in pipelines.rglob("*") if path.is_file()] == []


def test_files_of_others_are_not_touched(shop: Path, run: Any, pipelines: Path) -> None:
    mine = pipelines / "raw" / "orders" / "mine.parquet"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(StepFailed, match="aren't ours"):
        run("SELECT * FROM orders")
    assert mine.read_text() == "precious"


def test_killed_it_starts_anew_and_clears_what_was_left(shop: Path, tmp_path: Path) -> None:
    code = """
import sys, os, signal
from pathlib import Path
from sqlalchemy import create_engine
from trainyard.sql import extract
def progress(line):
    if line == "600 rows":
        os.kill(os.getpid(), signal.SIGKILL)
extract(create_engine(f"sqlite:///{sys.argv[1]}"), "SELECT * FROM orders", Path(sys.argv[2]), chunk_rows=300,
        progress=progress)
"""
    output = tmp_path / "out" / "orders"
    killed = subprocess.run([sys.executable, "-c", code, str(shop), str(output)], timeout=300)
    assert killed.returncode == -9
    assert not output.exists()
    assert [path for path in output.parent.iterdir() if path.name.endswith(".tmp")], (
        "it was in the midst of it"
    )
    from sqlalchemy import create_engine

    result = extract(create_engine(f"sqlite:///{shop}"), "SELECT * FROM orders", output, chunk_rows=300)
    assert result["rows"] == ROWS
    assert [path.name for path in output.parent.iterdir()] == ["orders"]
    assert (output / DONE).exists()


def test_prepare_takes_it_though_a_column_was_empty_at_first(shop: Path, run: Any, tmp_path: Path) -> None:
    from trainers.records import build

    result = run("SELECT * FROM orders")
    manifest = build.prepare(
        result["source"], tmp_path / "records", name="orders", label="returned", key="id"
    )
    assert sum(manifest.counts.values()) == ROWS
    note = manifest.schema()["note"]
    assert (note.type, note.presence) == ("string", "optional")
    missing = sum(manifest.statistics[split]["note"]["missing"] for split in ("train", "eval"))
    assert missing == 600


def test_memory_is_bounded_by_a_chunk(tmp_path: Path) -> None:
    code = """
import sys, resource
from pathlib import Path
from sqlalchemy import create_engine
import pyarrow.parquet
from trainyard.sql import extract
numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows) "
sql = numbers + "SELECT i, hex(randomblob(100)) AS text FROM n"
def peak(rows):
    extract(create_engine("sqlite://"), sql, Path(sys.argv[1]) / str(rows), parameters={"rows": rows},
            chunk_rows=2000, progress=lambda line: None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
few, many = peak(20_000), peak(300_000)
print(few, many)
assert many - few < 30_000, (few, many)  # KiB; the rows are 60 MB and more
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)


def test_a_connection_of_a_type_without_a_driver_says_so() -> None:
    from airflow.sdk import Connection

    from trainers.job.errors import ConfigError

    with pytest.raises(ConfigError, match="no driver for connections of type 'oracledb2'"):
        engine_of(Connection(conn_id="x", conn_type="oracledb2", host="h", login="u", password="hunter2"))


def test_it_is_one_task_whose_source_prepare_takes() -> None:
    with DAG("pipeline") as dag:
        raw = extract_sql(
            "SELECT * FROM orders WHERE day = :day",
            conn_id="shop",
            output="storage://raw/orders/{{ ds }}",
            parameters={"day": "{{ ds }}"},
        )
        prepare(raw["source"], name="orders", label="returned")
    assert {t.task_id: sorted(t.upstream_task_ids) for t in dag.tasks} == {
        "extract": [],
        "prepare": ["extract"],
    }
    assert "op_args" in dag.get_task("extract").template_fields
