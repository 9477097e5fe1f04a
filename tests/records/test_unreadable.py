"""Files that can't be read, or change meanwhile: a clear error, and nothing published."""

import gzip
import os
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.records.published import names, quarantine, records, write
from trainers.job.failures import FailureClass
from trainers.records import listing as listing_module
from trainers.records.errors import (
    ColumnError,
    RecordsError,
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


# Text -------------------------------------------------------------------------------------------------------


def csv_of(count=300):
    return "id,name,y\n" + "".join(f'{i},"né, {i % 3}",{i % 2}\n' for i in range(count))


def test_encodings(run, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv_of().encode())
    good = run(path, key="id")
    path.write_bytes(csv_of().encode("latin-1"))
    with pytest.raises(
        SourceUnreadable, match=r"line 2 is not UTF-8, but has the byte 0xe9; .*format=.*latin-1"
    ):
        run(path, key="id")
    assert records(run(path, key="id", format={"encoding": "latin-1"})) == records(good)
    path.write_bytes(csv_of().encode("utf-16"))
    with pytest.raises(RecordsError):
        run(path, key="id")
    assert records(run(path, key="id", format={"encoding": "utf-16"})) == records(good)
    path.write_bytes(gzip.compress(csv_of().encode("cp1250")))
    with pytest.raises(SourceUnreadable, match=r"is not SHIFT_JIS"):
        run(path.rename(tmp_path / "a.csv.gz"), key="id", format={"encoding": "shift_jis"})


def test_a_few_bytes_that_are_not_text_are_found_far_down(run, tmp_path):
    rows = csv_of(150_000).replace("é", "e").encode().replace(b"120000,", b"12000\xff,")
    (tmp_path / "a.csv").write_bytes(rows)
    with pytest.raises(SourceUnreadable, match="line 120002 is not UTF-8, but has the byte 0xff"):
        run(tmp_path / "a.csv", key="id")


def test_marks_and_line_ends(run, tmp_path):
    found = []
    for i, data in enumerate(
        (
            csv_of(),
            "\ufeff" + csv_of(),
            csv_of().replace("\n", "\r\n"),
            csv_of().rstrip("\n"),
            csv_of() + "\n\n",
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "a.csv").write_bytes(data.encode())
        found.append(records(run(folder / "a.csv", key="id")))
    assert all(one == found[0] for one in found)


def test_delimiters(run, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id;x;y\n" + "".join(f"{i};{i},5;{i % 2}\n" for i in range(30)))
    with pytest.raises(SourceUnreadable, match=r"header looks separated by ';': 'id;x;y'; .*delimiter"):
        run(path)
    assert run(path, format={"delimiter": ";"}).schema().names == ("id", "x", "y")
    path.write_text("id,x,y\n" + "".join(f"{i},5,{i % 2}\n" if i < 200 else f"{i};5;1\n" for i in range(202)))
    manifest = run(path, quarantine_threshold=0.05)
    assert [(row["row"], row["reason"]) for row in quarantine(manifest)] == [
        (row, "has 1 fields, wants 3; it looks separated by ';'") for row in (201, 202)
    ]
    path.write_text("id,,y\n1,2,3\n")
    with pytest.raises(ColumnError, match=r"a.csv has no name"):
        run(path)


def test_a_quote_that_is_not_closed(run, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,name,y\n1,"a,1\n' + "".join(f"{i},{'b' * 99},0\n" for i in range(10_000)))
    with pytest.raises(
        SourceUnreadable, match=r"row 1 goes over more than 1000 lines .*quote not closed there"
    ):
        run(path)
    # A field of many lines is a field.
    path.write_text('id,name,y\n1,"' + "line\n" * 5000 + '",1\n2,b,0\n')
    assert sum(run(path, eval_fraction=0.0).counts.values()) == 2
    path.write_text('id,name,y\n1,"' + "line\n" * 1_000_000 + '",1\n2,b,0\n')
    with pytest.raises(SourceUnreadable, match=r"a row is longer than 2 MB; is a quote not closed"):
        run(path)


def test_json_that_is_not_utf8_or_no_lines(run, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": "a", "y": 1}\n' * 300 + b'{"x": "\xe9", "y": 1}\n')
    manifest = run(path)
    assert [(row["row"], row["reason"]) for row in quarantine(manifest)] == [
        (301, 'is no JSON: \'{"x": "\ufffd", "y": 1}\'')
    ]
    path.write_text("[" + ", ".join(['{"x": 1, "y": 1}'] * 5_000_000) + "]")
    with pytest.raises(
        SourceUnreadable, match=r"has a line of more than 64 MB; write one JSON object a line"
    ):
        run(path)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst", "a.jsonl.gz"])
def test_damaged_packed_files(name, run, tmp_path):
    text = csv_of() if "csv" in name else '{"y": 1}\n' * 300
    data = (
        gzip.compress(text.encode())
        if name.endswith("gz")
        else pa.compress(text.encode(), "zstd", asbytes=True)
    )
    path = tmp_path / name
    for spoiled, problem in (
        (data[:-9], "Truncated compressed stream"),
        (data[: len(data) // 2], "Truncated|failed"),
        (b"hello" * 9, "failed|Unknown frame"),
        (b"", "is empty"),
    ):
        path.write_bytes(spoiled)
        with pytest.raises((SourceUnreadable, SourceEmpty), match=problem):
            run(path)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz"])
def test_a_bomb_is_not_unpacked(name, run, tmp_path):
    """256 MB of zeros in 256 KB: the first row that is too long ends it, so little of it is ever held."""
    piece = zlib.compressobj(9, wbits=31)
    zeros = bytes(1 << 24)
    with (tmp_path / name).open("wb") as f:
        f.write(piece.compress(b"x,y\n1,2\n" if "csv" in name else b'{"y": 1}\n'))
        f.write(b"".join(piece.compress(zeros) for _ in range(16)) + piece.flush())
    before = pa.total_allocated_bytes()
    with pytest.raises(SourceUnreadable, match=r"longer than 2 MB|more than 64 MB"):
        run(tmp_path / name)
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_a_parquet_file_that_changes_and_one_without_columns(run, table, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(2000), path, row_group_size=100)

    def progress(line):
        if "features" in line:
            pq.write_table(table(1999), path, row_group_size=100)

    with pytest.raises(SourceChanged, match=r"a.parquet went from .* to .* bytes"):
        run(path, progress=progress)
    pq.write_table(pa.table({}), path)
    with pytest.raises((SourceEmpty, ColumnError)):
        run(path)
    assert names(tmp_path / "out") == []
