"""Raw data in stores: S3 as moto's server speaks it, web servers, and what they do wrong."""

import contextlib
import functools
import gzip
import http.server
import io
import threading

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from tests.records.published import records
from trainers.job.failures import FailureClass
from trainers.records import files as files_module
from trainers.records.errors import (
    InvalidOption,
    SourceChanged,
    SourceMissing,
    SourceUnreachable,
    SourceUnreadable,
)
from trainers.records.files import SourceFile
from trainers.records.listing import list_files


@pytest.fixture(scope="module")
def moto():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(moto, monkeypatch):
    """A bucket; credentials and endpoint come from the environment, as in a pod."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "test-id",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3")
    if not fs.exists("raw"):
        fs.mkdir("raw")
    for name in fs.find("raw"):
        fs.rm(name)
    yield fs
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def packed(table, kind):
    out = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, out, row_group_size=30)
        return out.getvalue()
    pyarrow.csv.write_csv(table.drop_columns(["tags"]), out)
    return out.getvalue() if kind == "csv" else gzip.compress(out.getvalue())


@pytest.mark.parametrize("kind", ["parquet", "csv.gz"])
def test_s3_as_a_local_disk(kind, s3, run, table, tmp_path):
    for month in (1, 2):
        data = packed(table(60, month * 60), kind)
        s3.pipe(f"raw/{kind}/dt=2013-0{month}/a.{kind}", data)
        path = tmp_path / "raw" / f"dt=2013-0{month}" / f"a.{kind}"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    local = run(tmp_path / "raw", key="id")
    manifest = run(f"s3://raw/{kind}", key="id")
    assert records(manifest) == records(local)
    assert manifest.digest == local.digest
    assert manifest.sources == (f"s3://raw/{kind}",)
    assert records(run(f"s3://raw/{kind}/*/a.{kind}", key="id")) == records(local)
    one = run(f"s3://raw/{kind}/dt=2013-02/a.{kind}", key="id")
    assert one.digest == run(tmp_path / "raw", key="id", partitions={"dt": "2013-02"}).digest
    # The same objects are the same dataset; another object is another.
    said = []
    run(f"s3://raw/{kind}", key="id", progress=said.append)
    assert any(line.startswith("nothing to do") for line in said)
    assert "test-secret" not in "".join(said) + (manifest.path.read_text())
    s3.pipe(f"raw/{kind}/dt=2013-02/a.{kind}", packed(table(61, 120), kind))
    assert run(f"s3://raw/{kind}", key="id").digest != manifest.digest


def test_only_ranges_of_a_parquet_file_are_fetched(s3, table):
    s3.pipe(
        "raw/wide.parquet", packed(pa.table({f"c{i}": list(range(30_000)) for i in range(30)}), "parquet")
    )
    ((file,),) = [list_files("s3://raw/wide.parquet", print)[1:]][0]
    fetched = []
    fs = fsspec.filesystem("s3")
    real = type(fs).call_s3
    with file.seekable() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(fs), "call_s3", lambda self, *a, **k: fetched.append(k.get("Range")) or real(self, *a, **k)
        )
        assert pq.read_metadata(opened).num_rows == 30_000
    assert sum(_bytes(r) for r in fetched if r) < file.size


def _bytes(header):
    first, last = header.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_pictures_from_s3(s3, pictures, run):
    folder = pictures(12)
    for path in folder.rglob("*.png"):
        s3.pipe(f"raw/pets/{path.relative_to(folder).as_posix()}", path.read_bytes())
    assert run("s3://raw/pets").digest == run(folder).digest


def test_an_object_that_changes_while_it_is_read(s3, run, table, tmp_path):
    for change, problem in (
        (lambda: s3.pipe("raw/a.csv", packed(table(50, 1), "csv")), "went from .* bytes|was written to"),
        (lambda: s3.rm("raw/a.csv"), "went away"),
    ):
        s3.pipe("raw/a.csv", packed(table(50), "csv"))

        def progress(line, change=change):
            if "features" in line:
                change()

        with pytest.raises(SourceChanged, match=rf"s3://raw/a.csv ({problem}) while it was being read"):
            run("s3://raw/a.csv", progress=progress)
    assert list((tmp_path / "out").iterdir()) == []


def test_stores_that_have_nothing_or_do_not_answer(s3, run, monkeypatch):
    with pytest.raises(SourceMissing, match="no such file or folder: s3://raw/nothing"):
        run("s3://raw/nothing")
    with pytest.raises(SourceMissing):
        run("s3://raw/*.parquet")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(SourceUnreachable, match=r"s3://raw/a.csv: can't be read") as e:
        run("s3://raw/a.csv")
    assert e.value.failure_class is FailureClass.INFRA
    assert "test-secret" not in str(e.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@example.com/a.csv",
        "https://example.com/a.csv?X-Amz-Signature=hunter2",
        "s3://id:hunter2@bucket/a.csv",
        "ftp://example.com/a.csv",
        "python://a.csv",
        "filecache::s3://bucket/a.csv",
    ],
)
def test_urls_that_are_refused(url, run):
    with pytest.raises(InvalidOption) as e:
        run(url)
    assert "hunter2" not in str(e.value)


def test_memory(run, table):
    fs = fsspec.filesystem("memory")
    fs.pipe("/trainyard/a.parquet", packed(table(50), "parquet"))
    try:
        assert sum(run("memory://trainyard/a.parquet", key="id").counts.values()) == 50
        assert sum(run("memory://trainyard", key="id").counts.values()) == 50
    finally:
        fs.rm("/trainyard", recursive=True)


# Web servers ------------------------------------------------------------------------------------------------


class Bare(http.server.BaseHTTPRequestHandler):
    """A server that tells neither ETag nor time, and can be made to lie about sizes."""

    data = b""
    short = 0

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(self.data[: len(self.data) - self.short])

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz"])
def test_a_web_server(kind, run, table, tmp_path):
    path = tmp_path / "www" / f"a.{kind}"
    path.parent.mkdir()
    path.write_bytes(packed(table(80), kind))
    with serving(functools.partial(Quiet, directory=path.parent)) as url:
        manifest = run(f"{url}/a.{kind}", key="id")
        assert manifest.digest == run(path, key="id").digest
        with pytest.raises(SourceMissing):
            run(f"{url}/b.{kind}")

        def progress(line):
            if "features" in line:
                path.write_bytes(packed(table(81), kind))

        with pytest.raises(SourceChanged, match="went from"):
            run(f"{url}/a.{kind}", name="again", progress=progress)


def test_a_server_that_says_nothing_gives_its_bytes_once(run, table, tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_staged", {})
    handler = type("Handler", (Bare,), {"data": packed(table(50), "csv")})
    path = tmp_path / "a.csv"
    path.write_bytes(handler.data)
    with serving(handler) as url:
        ((file,),) = [list_files(f"{url}/a.csv", print)[1:]][0]
        assert file.version.startswith("sha256:")
        assert run(f"{url}/a.csv", key="id").digest == run(path, key="id").digest
        # Another process has no copy: it takes its own, and believes it only if it is the same.
        again = SourceFile.from_dict(file.to_dict())
        assert again == file
        monkeypatch.setattr(files_module, "_staged", {})
        assert again.path.read_bytes() == handler.data
        monkeypatch.setattr(files_module, "_staged", {})
        handler.data = packed(table(50, 1), "csv")
        with pytest.raises(SourceChanged, match="aren't those that were listed"):
            again.read_bytes()


def test_a_connection_that_ends_early(run, table, tmp_path):
    handler = type("Handler", (Bare,), {"data": packed(table(500), "csv"), "short": 100})
    with serving(handler) as url, pytest.raises((SourceUnreachable, SourceChanged, SourceUnreadable)) as e:
        run(f"{url}/a.csv")
    assert f"{url}/a.csv" in str(e.value)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_several_processes_read_from_s3(s3, run, table, tmp_path):
    for part in range(4):
        data = packed(table(40, part * 40), "csv.gz")
        s3.pipe(f"raw/many/{part}.csv.gz", data)
        (tmp_path / f"{part}.csv.gz").write_bytes(data)
    one = run(tmp_path / "*.csv.gz", key="id", shards=4)
    assert run("s3://raw/many", key="id", shards=4, processes=2).digest == one.digest
