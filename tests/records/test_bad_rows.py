"""Rows that are refused, and tables that can't be a dataset."""

import csv
import json
import pathlib
import tempfile

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records.published import names, quarantine, write
from trainers.records.errors import (
    ColumnError,
    SourceEmpty,
)
from trainers.records.listing import list_files
from trainers.records.schema import Feature, Schema
from trainers.records.tables import Table
from trainers.records.validate import clean


def test_bad_csv_rows_with_their_numbers(run, tmp_path):
    path = tmp_path / "a.csv"
    lines = ["id,x,name,y"] + [f'{i},{i / 2},"n, {i % 3}\nq",{i % 2}' for i in range(300)]
    lines[10] = "9,oops,n,1"
    lines[20] = "19,1.5"
    lines[30] = "29,2.5,z,"
    lines[40] = "39,2.5,z,1,7"
    lines[41] = "zz,1.5,q,1"
    lines[300] = "299,1"
    path.write_text("\n".join(lines) + "\n")
    manifest = run(path, key="id", quarantine_threshold=0.5, batch_rows=8)
    assert sorted((row["row"], row["column"], row["reason"]) for row in quarantine(manifest)) == [
        (10, "x", "'oops' is no double"),
        (20, "", "has 2 fields, wants 4"),
        (30, "y", "is missing"),
        (40, "", "has 5 fields, wants 4"),
        (41, "id", "'zz' is no int64"),
        (300, "", "has 2 fields, wants 4"),
    ]
    assert sum(manifest.counts.values()) == 294


def test_bad_json_lines_with_their_numbers(run, tmp_path):
    lines = [json.dumps({"id": i, "x": i / 2, "t": ["a"] * (i % 3), "y": i % 2}) for i in range(300)]
    lines[5] = "{bad"
    lines[7] = json.dumps({"id": 7, "x": "text", "y": 1})
    lines[9] = ""
    lines[11] = json.dumps({"id": 11, "x": 1})
    lines[13] = "[1]"
    lines[15] = '{"id": 15, "x": 1, "y": 0} {"id": 16, "x": 1, "y": 0}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    manifest = run(tmp_path / "a.jsonl", key="id", quarantine_threshold=0.5, batch_rows=50)
    assert sorted((row["row"], row["column"], row["reason"]) for row in quarantine(manifest)) == [
        (6, "", "is no JSON: '{bad'"),
        (8, "x", '"text" is no double'),
        (12, "y", "is missing"),
        (14, "", "is list, wants an object"),
        (16, "", "is no JSON: '" + lines[15][:40] + "'"),
    ]
    assert sum(manifest.counts.values()) == 294
    assert manifest.schema()["t"].ragged


def test_a_label_must_be_there_and_be_a_number(run, tmp_path):
    pq.write_table(pa.table({"y": [1.0, None, float("nan"), 4.0], "x": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    manifest = run(tmp_path / "a.parquet", eval_fraction=0.0, quarantine_threshold=0.6)
    assert [(row["row"], row["reason"]) for row in quarantine(manifest)] == [(2, "is missing"), (3, "is nan")]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_missing_columns(kind, run, table, tmp_path):
    path = tmp_path / f"a.{kind}"
    write(path, table(20), kind)
    with pytest.raises(ColumnError, match=f"column 'target' isn't in .*a.{kind}; it holds id, x, color"):
        run(path, label="target")
    with pytest.raises(ColumnError, match="column 'user' isn't in"):
        run(path, key="user")
    with pytest.raises(ColumnError, match="column 'x' has type float, which makes no key"):
        run(path, key="x")
    assert names(tmp_path / "out") == []


def test_no_rows_for_training(run, tmp_path):
    pq.write_table(pa.table({"k": [1] * 3, "y": [1] * 3}), tmp_path / "a.parquet")
    with pytest.raises(SourceEmpty, match=r"none of the 3 rows of .* is for training"):
        run(tmp_path / "a.parquet", key="k", eval_fraction=0.95)
    pq.write_table(pa.table({"y": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(SourceEmpty, match="holds no row"):
        run(tmp_path / "a.parquet")


def test_duckdb_finds_the_same_bad_rows(run, tmp_path):
    """DuckDB's store_rejects as an oracle: 50 bad rows among 20,000, found by both, by row and column."""
    path = tmp_path / "a.csv"
    lines = ["id,x,name,y"] + [f'{i},{i / 2},"n, {i % 3}",{i % 2}' for i in range(20_000)]
    bad = {i * 397 + 1: i % 5 for i in range(50)}
    for line, how in bad.items():
        fields = lines[line].split(",")
        lines[line] = [
            lines[line] + ",7",
            ",".join(fields[:2]),
            ",".join(["oops", *fields[1:]]),
            ",".join([fields[0], "1.2.3", *fields[2:]]),
            lines[line][:-1] + "one",
        ][how]
    path.write_text("\n".join(lines) + "\n")
    manifest = run(path, key="id")
    ours = {(row["row"], row["column"]) for row in quarantine(manifest)}
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            "CREATE TABLE t AS SELECT * FROM read_csv(?, header = true, store_rejects = true, auto_detect = false,"
            " columns = {'id': 'BIGINT', 'x': 'DOUBLE', 'name': 'VARCHAR', 'y': 'BIGINT'})",
            [str(path)],
        )
        rejects = connection.execute("SELECT line, column_name, error_type FROM reject_errors").fetchall()
    # Fields too many or too few are of the whole row to us, of a column to DuckDB.
    theirs = {(line - 1, name if kind == "CAST" else "") for line, name, kind in rejects}
    assert len(ours) == manifest.quarantined == 50
    assert ours == theirs


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.floats(width=32),
            st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_what_csv_writers_write_comes_back(rows):
    """Python's csv module as an oracle: quotes, delimiters, line ends and unicode in fields."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.csv"
        with path.open("w", newline="", encoding="utf-8") as f:
            writer = csv.writer(f, quoting=csv.QUOTE_NONNUMERIC)
            writer.writerow(["n", "x", "s"])
            writer.writerows(rows)
        kind, files = list_files(path, print)
        table = Table(path, files, kind)
        features = (Feature("n", "int64"), Feature("x", "float32"), Feature("s", "string"))
        found = []
        for batch in table.read(0, 1, Schema(features), 7):
            data, rejects = clean(batch, Schema(features), ())
            assert rejects == []
            found += data.to_pylist()
    assert [row["n"] for row in found] == [n for n, _, _ in rows]
    assert np.array_equal([row["x"] for row in found], [x for _, x, _ in rows], equal_nan=True)
    assert [row["s"] for row in found] == [s for _, _, s in rows]
