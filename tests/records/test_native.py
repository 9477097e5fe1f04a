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

from trainers.records import native, sketch, units
from trainers.records.encode import Encoder
from trainers.records.errors import NativeUnavailable
from trainers.records.native import NativeEncoder, compile, numbers

REPO = Path(__file__).parents[2]
# A sanitized library is given by the test at the end, which runs this file once more.
GIVEN = os.environ.get("TRAINYARD_NATIVE")


NUMBERS = {
    np.float32: st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.5, -1e-40, 3e38]),
    np.int64: st.integers(-(2**63), 2**63 - 1) | st.integers(-50, 50) | st.integers(2**53 - 5, 2**53 + 5),
}


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


@pytest.mark.parametrize("room", [100, 2_000, 1 << 20])
def test_pieces_are_the_same_bytes(library, monkeypatch, room):
    """Whatever the room, down to less than a row takes; rows of one batch go to their writers from any piece."""
    monkeypatch.setattr(native, "_PIECE", room)
    rng = np.random.default_rng(room)
    sizes = rng.choice([0, 3, 200, 5_000], 150)
    batch = pa.RecordBatch.from_pydict(
        {
            "f": pa.array(rng.normal(size=150).astype("f4")),
            "i": pa.array(rng.integers(0, 2**40, 150)),
            "l": pa.array([[1.5] * int(n) for n in sizes[::-1]], pa.list_(pa.float32())),
            "s": pa.array(["x" * int(n) for n in sizes]),
        }
    )
    want = Encoder().encode(batch)
    pieces = [(bytes(p.data), p.offsets.tolist()) for p in NativeEncoder(library).pieces(batch)]
    assert b"".join(data for data, _ in pieces) == bytes(want.data)
    assert sum(len(offsets) - 1 for _, offsets in pieces) == 150
    assert (len(pieces) == 1) == (room == 1 << 20)
    for encoder in (Encoder(), NativeEncoder(library)):
        writers = [Kept() for _ in range(4)]
        units._write_rows(encoder, batch, writers, [0, 0, 60, 61, 150])
        assert [writer.rows for writer in writers] == [0, 60, 1, 89]
        assert b"".join(writer.data for writer in writers) == bytes(want.data)
        assert writers[2].data == bytes(want.data[want.offsets[60] : want.offsets[61]])


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self):
        self.data, self.rows = b"", 0

    def write(self, view, rows):
        self.data += bytes(view)
        self.rows += rows


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
    monkeypatch.setattr(compile, "source_digest", lambda: "0" * 16)
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


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([np.float32, np.int64]), st.data(), st.integers(0, 20), st.integers(1, 30))
def test_numbers_are_counted_as_numpy_counts_them(library, kind, data, shift, most):
    values = np.array(data.draw(st.lists(NUMBERS[kind], min_size=1, max_size=80)), kind)
    values = np.resize(values, len(values) * data.draw(st.integers(1, 40)))
    found = numbers.summed(library, values, shift, most)
    want = sketch._summed(values, shift, 8 * values.itemsize)
    facts = ("n", "zeros", "nan", "infinite", "low", "high")
    assert [getattr(found, f) for f in facts] == [getattr(want, f) for f in facts]
    assert len(found.keys) <= most
    assert found.shift >= shift
    # Buckets are the finest that leave `most`.
    for dropped in range(shift, found.shift + 1):
        keys, counts = sketch._add_up(want.keys >> np.uint64(dropped - shift), want.counts)
        assert (len(keys) <= most) == (dropped == found.shift)
    assert found.keys.tolist() == keys.tolist()
    assert found.counts.tolist() == counts.tolist()
    hashes = sketch._hashes(values)
    limit = int(np.sort(hashes)[len(hashes) // 2])
    assert numbers.hashes_below(library, values, limit).tolist() == hashes[hashes <= limit].tolist()


@pytest.mark.parametrize("kind", [np.float32, np.int64])
@pytest.mark.parametrize("spread", [3, 100, 30_000, 10**6, 2**50])
def test_statistics_are_the_same_with_and_without_the_library(library, monkeypatch, kind, spread):
    rng = np.random.default_rng(spread)
    values = [rng.normal(0, spread, n).astype(kind) for n in (70_000, 50, 3_000)]
    states = []
    for chosen in (library, None):
        monkeypatch.setattr(sketch, "chosen", lambda chosen=chosen: chosen)
        found = sketch.NumberSketch(32 if kind == np.float32 else 64)
        for some in values:
            found.add(some)
        states.append((found.state(), found.distinct.state(), found.different()))
    assert states[0] == states[1]


def test_numbers_that_are_none_never_reach_the_library(library):
    for values in (np.zeros(0, np.float32), np.zeros((2, 2), np.int64), np.zeros(3)):
        with pytest.raises(TypeError, match="must be some float32 or int64"):
            numbers.summed(library, values, 0, 2048)
