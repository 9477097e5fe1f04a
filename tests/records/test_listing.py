"""Which files a source is: wildcards, partitions, links, hidden files, compressed files, hints."""

import gzip

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.records.published import records, write
from trainers.records.errors import (
    ColumnError,
    InvalidOption,
    SourceEmpty,
    SourceMissing,
    SourceUnreadable,
)
from trainers.records.listing import list_files


@pytest.fixture
def months(table, tmp_path):
    """A table of three months, 40 rows each."""
    for month in range(3):
        folder = tmp_path / "raw" / f"dt=2013-0{month + 1}"
        folder.mkdir(parents=True)
        pq.write_table(table(40, month * 40), folder / "part-0.parquet")
    return tmp_path / "raw"


def names(source, **options):
    return [file.name for file in list_files(source, print, **options)[1]]


def test_wildcards(run, table, tmp_path):
    folder = tmp_path / "raw" / "deep"
    folder.mkdir(parents=True)
    for i in range(3):
        write(folder / f"a{i}.csv", table(20, i * 20), "csv")
        data = (folder / f"a{i}.csv").read_bytes()
        (folder / f"a{i}.csv.gz").write_bytes(gzip.compress(data))
        (folder / f"a{i}.csv.zst").write_bytes(pa.compress(data, "zstd", asbytes=True))
    (folder / ".a9.csv").write_text("hidden")
    raw = tmp_path / "raw"
    assert names(raw / "deep" / "a[01].csv") == ["a0.csv", "a1.csv"]
    assert names(raw / "**" / "*.csv.gz") == [f"deep/a{i}.csv.gz" for i in range(3)]
    assert (
        names(raw / "*") == names(raw) == [f"deep/a{i}.csv{s}" for i in range(3) for s in ("", ".gz", ".zst")]
    )
    # However the rows are packed, the records are the same.
    found = [run(raw / "deep" / f"*.csv{suffix}", key="id", name="n") for suffix in ("", ".gz", ".zst")]
    assert records(found[0]) == records(found[1]) == records(found[2])
    with pytest.raises(SourceMissing, match="no file matches"):
        list_files(raw / "*.parquet", print)


def test_json_lines_packed(run, table, tmp_path):
    write(tmp_path / "a.jsonl", table(50), "jsonl")
    data = b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(data[:900]) + gzip.compress(data[900:]))
    assert records(run(tmp_path / "a.jsonl", key="id")) == records(run(tmp_path / "b.ndjson.gz", key="id"))


def test_partitions_become_columns(months, run):
    manifest = run(months, key="id")
    assert manifest.schema()["dt"].type == "string"
    assert manifest.schema()["dt"].domain == {"values": ["2013-01", "2013-02", "2013-03"]}
    assert sum(manifest.counts.values()) == 120
    first = run(months, key="id", partitions={"dt": ["2013-01", "2013-02"]})
    assert first.schema()["dt"].domain == {"values": ["2013-01", "2013-02"]}
    assert sum(first.counts.values()) == 80
    assert first.digest != manifest.digest
    one = run(months, key="id", partitions={"dt": "2013-03"})
    # A folder that is a partition itself knows so.
    same = run(months / "dt=2013-03", key="id")
    assert records(one) == records(same)


def test_a_partition_may_be_the_label_or_the_key(months, run):
    assert run(months, label="dt", key="id").label == "dt"
    manifest = run(months, key="dt", eval_fraction=0.4, quarantine_threshold=0)
    assert sum(manifest.counts.values()) == 120


@pytest.mark.parametrize(
    ("folders", "kind", "values"),
    [
        (["n=1", "n=02"], "int64", [1, 2]),
        (["n=2013-01-01", "n=2013-01-03"], "date32[day]", [15706, 15708]),
        (["n=1", "n=x"], "string", ["1", "x"]),
        (["n=1", "n=__HIVE_DEFAULT_PARTITION__"], "int64", [1, None]),
        (["n=a%20b", "n=2013-13-01"], "string", ["a b", "2013-13-01"]),
    ],
)
def test_types_of_partitions(folders, kind, values, run, tmp_path):
    for folder in folders:
        (tmp_path / "raw" / folder).mkdir(parents=True)
        (tmp_path / "raw" / folder / "a.csv").write_text("y\n1\n2\n")
    manifest = run(tmp_path / "raw", eval_fraction=0.0)
    feature = manifest.schema()["n"]
    assert feature.source == kind
    assert feature.type == ("string" if kind == "string" else "int64")
    assert feature.presence == ("optional" if None in values else "required")
    present = [value for value in values if value is not None]
    wanted = {"values": sorted(present)} if kind == "string" else {"min": min(present), "max": max(present)}
    assert feature.domain == wanted


def test_partitions_that_are_not_there(months, run, tmp_path):
    with pytest.raises(SourceEmpty, match="holds no dt=2014-01; it holds 2013-01, 2013-02, 2013-03"):
        run(months, partitions={"dt": ["2013-01", "2014-01"]})
    with pytest.raises(InvalidOption, match=r"name partitions of .*: dt, got 'month'"):
        run(months, partitions={"month": ["1"]})
    for wrong in (["dt"], {"dt": []}, {"dt": [1.5]}):
        with pytest.raises(InvalidOption, match="partitions"):
            run(months, partitions=wrong)
    pq.write_table(pa.table({"y": [1]}), months / "b.parquet")
    with pytest.raises(ColumnError, match=r"column 'dt' is a partition of some files .* and not of"):
        run(months)
    (months / "b.parquet").unlink()
    path = months / "dt=2013-01" / "part-0.parquet"
    pq.write_table(pq.read_table(path, partitioning=None).append_column("dt", pa.array(["x"] * 40)), path)
    with pytest.raises(ColumnError, match=r"column 'dt' is in .* and in its folder's name"):
        run(months)


def test_links(run, table, tmp_path):
    raw, elsewhere = tmp_path / "raw", tmp_path / "elsewhere"
    raw.mkdir()
    elsewhere.mkdir()
    pq.write_table(table(10), elsewhere / "a.parquet")
    (raw / "b").symlink_to(elsewhere)
    (raw / "c.parquet").symlink_to(elsewhere / "a.parquet")
    assert names(raw) == ["b/a.parquet", "c.parquet"]
    (elsewhere / "up").symlink_to(raw)
    with pytest.raises(
        SourceUnreadable, match=r"b/up is a link to a folder above it|b/up: is a link to a folder"
    ):
        list_files(raw, print)
    (elsewhere / "up").unlink()
    (raw / "d.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceUnreadable, match=r"d.parquet: is a link to a file that isn't there"):
        list_files(raw, print)
    (raw / "d.parquet").unlink()
    (raw / "d.parquet").symlink_to(raw / "d.parquet")
    with pytest.raises(SourceUnreadable, match=r"can't be read: Too many levels|is a link to"):
        list_files(raw, print)


def test_hints(run, table, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    write(raw / "a.csv", table(20), "csv")
    (raw / "part-0000").write_bytes((raw / "a.csv").read_bytes().replace(b",", b"|"))
    (raw / "a.jsonl").write_text('{"y": 1}\n')
    with pytest.raises(
        SourceUnreadable, match=r"several kinds: csv \(a.csv\), jsonl \(a.jsonl\).*format.kind"
    ):
        run(raw)
    assert len(run(raw, format={"kind": "csv"}).schema()) == 4
    found = run(raw / "part-0000", format={"kind": "csv", "delimiter": "|"})
    assert records(found) == records(run(raw / "a.csv"))
    for wrong, problem in (
        ({"kind": "excel"}, "be one of parquet, csv"),
        ({"delimiter": "ab"}, "be one ASCII character"),
        ({"encoding": "utf-9"}, "encoding that Python knows"),
        ({"encoding": "zlib"}, "encoding that Python knows"),
        ({"colour": 1}, "have keys from kind, encoding"),
        ({"nulls": "NA"}, "be a list of texts"),
        ("csv", "be an object"),
    ):
        with pytest.raises(InvalidOption, match=problem):
            run(raw, format=wrong)


def test_own_nulls(run, tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n?,1\n2,1\n,0\n")
    manifest = run(tmp_path / "a.csv", eval_fraction=0.0, format={"nulls": ["?", ""]})
    assert manifest.statistics["train"]["x"]["missing"] == 2
    assert manifest.schema()["x"].type == "int64"
