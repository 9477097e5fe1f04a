"""Files that can't be read, or change meanwhile: a clear error, and nothing published."""

import os

import pyarrow.parquet as pq
import pytest

from tests.records.published import names, write
from trainers.job.failures import FailureClass
from trainers.records import listing as listing_module
from trainers.records.errors import (
    ColumnError,
    SourceChanged,
    SourceEmpty,
    SourceMissing,
    SourceUnreadable,
)


def test_missing_empty_and_mixed_sources(run, tmp_path, table):
    with pytest.raises(SourceMissing, match=r"no such file or folder: .*nowhere; check the path"):
        run(tmp_path / "nowhere")
    folder = tmp_path / "raw"
    folder.mkdir()
    with pytest.raises(SourceEmpty, match=r"holds no file; put files there that end in one of .png"):
        run(folder)
    (folder / "a.txt").write_text("x")
    with pytest.raises(SourceEmpty, match=r"only files such as .*a.txt"):
        run(folder)
    pq.write_table(table(3), folder / "a.parquet")
    (folder / "b.csv").write_text("y\n1\n")
    with pytest.raises(SourceUnreadable, match=r"several kinds: csv \(b.csv\), parquet \(a.parquet\)"):
        run(folder)


def test_a_file_that_may_not_be_read(run, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("y\n1\n")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(listing_module, "sha256_of_file", denied)
    with pytest.raises(SourceUnreadable, match=r"a.csv: can't be read: Permission denied; check its owner"):
        run(tmp_path / "a.csv")


UNREADABLE = {
    "cut.parquet": (
        lambda good: good[: len(good) // 2],
        SourceUnreadable,
        "can't be read.*write the file again",
    ),
    "text.parquet": (lambda good: b"hello" * 9, SourceUnreadable, "can't be read"),
    "empty.parquet": (lambda good: b"", SourceEmpty, "is empty"),
    "empty.csv": (lambda good: b"", SourceEmpty, "is empty"),
    "blank.csv": (lambda good: b"\n\n", SourceUnreadable, "can't be read"),
    "header.csv": (lambda good: b"id,y\n", SourceEmpty, "holds no row"),
    "latin.csv": (lambda good: "n,y\né,1\n".encode("latin-1"), SourceUnreadable, "save it as UTF-8"),
    "twice.csv": (lambda good: b"y,y\n1,2\n", ColumnError, "is there twice"),
    "empty.jsonl": (lambda good: b"", SourceEmpty, "is empty"),
    "blank.jsonl": (lambda good: b"\n", SourceEmpty, "no columns"),
    "nested.jsonl": (lambda good: b'{"y": 1, "a": {"b": 1}}\n', ColumnError, "can't hold"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_are_not_what_they_say(name, run, table, tmp_path):
    good = tmp_path / "good.bin"
    pq.write_table(table(50), good)
    spoil, error, problem = UNREADABLE[name]
    path = tmp_path / name
    path.write_bytes(spoil(good.read_bytes()))
    with pytest.raises(error, match=problem) as e:
        run(path)
    assert e.value.failure_class is FailureClass.DATA
    assert name in str(e.value) or isinstance(e.value, ColumnError)
    assert names(tmp_path / "out") == []


def test_parquet_damaged_in_its_data(run, table, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(2000), path, compression="snappy")
    data = bytearray(path.read_bytes())
    data[200:2200] = b"\xff" * 2000
    path.write_bytes(data)
    with pytest.raises(SourceUnreadable, match=r"a.parquet: can't be read"):
        run(path)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "went from .* to .* bytes"),
        (lambda path: os.utime(path, ns=(1, 1)), "was written to"),
        (lambda path: path.unlink(), "went away"),
    ],
    ids=["grows", "touched", "removed"],
)
def test_a_file_that_changes_while_it_is_read(change, problem, run, table, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    write(path, table(50), "csv")

    def progress(line):
        if "features" in line:  # listed and hashed, not yet read
            change(path)

    with pytest.raises(SourceChanged, match=f"a.csv {problem} while it was being read; wait"):
        run(path, progress=progress)
    assert names(tmp_path / "out") == []


def test_a_file_that_changes_while_it_is_hashed(run, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("y\n1\n")
    real = listing_module.sha256_of_file

    def hashing(path):
        digest = real(path)
        path.write_text("y\n1\n2\n")
        return digest

    monkeypatch.setattr(listing_module, "sha256_of_file", hashing)
    with pytest.raises(SourceChanged, match="went from 4 to 6 bytes"):
        run(path)
    monkeypatch.setattr(listing_module, "sha256_of_file", lambda path: path.unlink() or real(path))
    with pytest.raises(SourceChanged, match="went away"):
        run(path)
