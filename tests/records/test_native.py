"""The encoder in C against numpy's, byte for byte, with what Arrow's buffers can look like."""

import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.records import native
from trainers.records.encode import Encoder
from trainers.records.errors import NativeUnavailable
from trainers.records.native import NativeEncoder, compile

REPO = Path(__file__).parents[2]
# A sanitized library is given by the test at the end, which runs this file once more.
GIVEN = os.environ.get("TRAINYARD_NATIVE")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if GIVEN:
        return native.load(Path(GIVEN))
    if compile.compiler() is None:
        pytest.skip("this machine has no C compiler, so there is no native encoder to test")
    path = tmp_path_factory.mktemp("native") / "libencode.so"
    assert compile.build(path) is None
    return native.load(path)


def same(library, batch):
    want = Encoder().encode(batch)
    data, offsets = bytes(want.data), want.offsets.tolist()
    for hardware in (True, False):
        got = NativeEncoder(library, hardware=hardware).encode(batch)
        assert bytes(got.data) == data
        assert got.offsets.tolist() == offsets


INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)
FLOAT32 = st.floats(width=32)  # NaN, infinities and -0.0 too
TEXT = st.text(max_size=20) | st.sampled_from(["", "é" * 100, "x" * 126, "y" * 17_000, "漢" * 30])
BYTES = st.binary(max_size=40)
VALUES = {
    pa.float32(): FLOAT32,
    pa.int64(): INT64,
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): BYTES,
    pa.large_binary(): BYTES,
    pa.binary(5): st.binary(min_size=5, max_size=5),
    pa.binary(80): st.binary(min_size=80, max_size=80),
}


@st.composite
def columns(draw, rows):
    kind, values = draw(st.sampled_from(list(VALUES.items())))
    shape = draw(st.sampled_from(["one", "list", "large", "fixed"]))
    if shape == "fixed":
        size = draw(st.sampled_from([1, 3, 20]))
        kind, values = pa.list_(kind, size), st.lists(values, min_size=size, max_size=size)
    elif shape != "one":
        kind = pa.list_(kind) if shape == "list" else pa.large_list(kind)
        values = st.lists(values, max_size=4)
    if draw(st.booleans()):
        values = st.none() | values
    return pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)


@st.composite
def batches(draw):
    """Random schemas and rows, cut out of longer arrays, so that offsets into buffers are met too."""
    rows = draw(st.integers(0, 12))
    names = draw(st.lists(st.text(max_size=4) | st.sampled_from(["k" * 96, "k" * 97, "é" * 150]),
                          min_size=1, max_size=5, unique=True))  # fmt: skip
    batch = pa.RecordBatch.from_arrays([draw(columns(rows)) for _ in names], names=names)
    first = draw(st.integers(0, rows))
    return batch.slice(first, draw(st.integers(0, rows - first)))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_the_same_bytes_as_numpy(library, batch):
    same(library, batch)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 1000])
def test_a_wide_table(library, rows):
    rng = np.random.default_rng(rows)
    data = {f"f{i:02d}": pa.array(rng.normal(size=rows).astype("f4")) for i in range(30)}
    data |= {f"i{i:02d}": pa.array(rng.integers(-1, 10**i, rows)) for i in range(1, 12)}
    data |= {f"s{i}": pa.array([f"v{v}" for v in rng.integers(0, 10 ** (i + 1), rows)]) for i in range(5)}
    data["image"] = pa.array([rng.bytes(784) for _ in range(rows)], pa.binary(784))
    data["pixels"] = pa.FixedSizeListArray.from_arrays(
        pa.array(rng.normal(size=rows * 100).astype("f4")), 100
    )
    same(library, pa.RecordBatch.from_pydict(data))


def test_nulls_under_lists_and_empty_buffers(library):
    lists = pa.array([None, [1, 2], [], None, [2**63 - 1]], pa.list_(pa.int64()))
    texts = pa.array([["a"], None, [], ["", "b" * 300]], pa.large_list(pa.string()))
    same(library, pa.RecordBatch.from_arrays([lists.slice(1, 3)], names=["l"]))
    same(library, pa.RecordBatch.from_arrays([texts.slice(1)], names=["t"]))
    same(
        library,
        pa.RecordBatch.from_arrays([pa.array([], pa.string()), pa.array([], pa.float32())], names=["a", "b"]),
    )
    same(library, pa.RecordBatch.from_arrays([pa.array([[], []], pa.list_(pa.string()))], names=["a"]))
    same(
        library,
        pa.RecordBatch.from_arrays([pa.nulls(3, pa.binary(7)), pa.array(["", "", ""])], names=["a", "b"]),
    )


@pytest.mark.parametrize(
    "array", [pa.array([True]), pa.array([[1, None]]), pa.array([[True]]), pa.array([{"a": 1}])]
)
def test_what_numpy_refuses_is_refused(library, array):
    for encoder in (Encoder(), NativeEncoder(library)):
        with pytest.raises(TypeError, match="column 'c'"):
            encoder.encode(pa.RecordBatch.from_arrays([array], names=["c"]))


def spoiled(offsets, data=b"abcdef"):
    """A text column whose offsets lie, as a damaged file could have it."""
    buffer = pa.py_buffer(np.array(offsets, "<i4").tobytes())
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, buffer, pa.py_buffer(data)])


@pytest.mark.parametrize("offsets", [[0, 9, 6], [0, 4, 2, 6], [0, -1, 6], [0, 1 << 30, 6]])
def test_offsets_that_lie_are_refused(library, offsets):
    batch = pa.RecordBatch.from_arrays([spoiled(offsets)], names=["s"])
    with pytest.raises(ValueError, match="an offset leads out"):
        NativeEncoder(library).encode(batch)


def test_list_offsets_that_lie_are_refused(library):
    buffer = pa.py_buffer(np.array([0, 9, 3], "<i4").tobytes())
    items = pa.array([1.0, 2.0, 3.0], pa.float32())
    array = pa.Array.from_buffers(pa.list_(pa.float32()), 2, [None, buffer], children=[items])
    with pytest.raises(ValueError, match="an offset leads out"):
        NativeEncoder(library).encode(pa.RecordBatch.from_arrays([array], names=["l"]))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=70))
def test_checksums_with_and_without_the_cpus_instruction(library, data):
    for hardware in (0, 1):
        assert library.ty_crc32c(data, len(data), hardware) == crc32c.crc32c(data)


# Which one is taken ------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch, caplog):
    """What make_encoder takes and logs with a setting and a library at hand."""

    def call(setting, library):
        caplog.set_level(logging.INFO, logger=native.__name__)
        monkeypatch.setenv(native.VARIABLE, setting)
        native._chosen.cache_clear()
        monkeypatch.setattr(native, "LIBRARY", library)
        monkeypatch.setattr(native, "load", lambda path=library: native_load(path))
        try:
            return type(native.make_encoder())
        finally:
            native._chosen.cache_clear()

    native_load = native.load
    return call


def test_it_is_taken_when_it_is_there(library, chosen, caplog):
    path = Path(library._name)
    assert chosen("", path) is NativeEncoder
    assert chosen("off", path) is Encoder
    assert chosen(str(path), Path("nowhere")) is NativeEncoder
    assert "by numpy: TRAINYARD_NATIVE=off" in caplog.text


def test_numpy_takes_over_where_it_is_not(chosen, caplog, tmp_path):
    assert chosen("", tmp_path / "libencode.so") is Encoder
    assert "by numpy: no native encoder" in caplog.text
    with pytest.raises(NativeUnavailable, match="run scripts/build-native"):
        chosen(str(tmp_path / "libencode.so"), tmp_path / "libencode.so")


def test_one_of_another_version_is_not_taken(library, monkeypatch):
    monkeypatch.setattr(native, "source_digest", lambda: "0" * 16)
    with pytest.raises(NativeUnavailable, match="of another version"):
        native.load.__wrapped__(Path(library._name))


def build(output, **environment):
    return subprocess.run(
        [sys.executable, "-m", "trainers.records.native.compile", "--output", str(output)],
        env={**os.environ, "TRAINYARD_NATIVE": "", **environment}, cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip


def test_no_compiler_is_no_failure(tmp_path):
    for environment in (
        {"PATH": str(tmp_path), "CC": ""},
        {"CC": "no-such-compiler"},
        {"TRAINYARD_NATIVE": "off"},
    ):
        done = build(tmp_path / "libencode.so", **environment)
        assert done.returncode == 0
        assert "not built" in done.stderr
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no such luck >&2; exit 1\n")
    broken.chmod(0o755)
    done = build(tmp_path / "libencode.so", CC=str(broken))
    assert done.returncode == 0
    assert "no such luck" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken-cc"]


def sanitizer():
    """The address sanitizer's runtime, which must be loaded before Python."""
    command = compile.compiler()
    if command is None or platform.system() != "Linux":
        return None
    done = subprocess.run([*command, "-print-file-name=libasan.so"], capture_output=True, text=True)
    path = Path(done.stdout.strip())
    return path.resolve() if done.returncode == 0 and path.is_absolute() and path.exists() else None


@pytest.mark.skipif(bool(GIVEN), reason="is what runs this file with a sanitized library")
def test_it_stays_within_its_buffers(tmp_path):
    runtime = sanitizer()
    if runtime is None:
        pytest.skip("this machine has no compiler with an address sanitizer")
    path = tmp_path / "libencode.so"
    assert compile.build(path, flags=compile.SANITIZE) is None
    environment = {
        **os.environ,
        "TRAINYARD_NATIVE": str(path),
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that the sanitizer sees the borders of Python's and numpy's memory
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # and of Arrow's
    }
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-p", "no:cov",
         "-o", "addopts=--import-mode=importlib", "-k", "bytes or table or buffers or lie or checksums"],
        env=environment, cwd=REPO, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    report.write_text(json.dumps({"out": done.stdout[-3000:], "err": done.stderr[-3000:]}))
    assert done.returncode == 0, report.read_text()
    assert " passed" in done.stdout
