"""The encoder against TensorFlow's own protobuf: the same content, and the same bytes."""

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.records.convert import convert, feature_of
from trainers.records.encode import Encoder
from trainers.records.frames import Damage, frames

Example = tf.train.Example


def feature(kind, value):
    values = value if isinstance(value, list) else [value]
    if kind == "float32":
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if kind == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    data = [v.encode() if isinstance(v, str) else v for v in values]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=data))


def expected(row, kinds):
    """The bytes of protobuf for a row, feature by feature, since it leaves the order of a map open."""
    features = b"".join(
        tf.train.Features(feature={name: feature(kinds[name], row[name])}).SerializeToString()
        for name in sorted(row, key=str.encode)
        if row[name] is not None
    )
    # Unknown to the outer message is only the order: its own head is written by protobuf as well.
    return tf.train.BytesList(
        value=[features]
    ).SerializeToString()  # field 1, length-delimited, as Example has


def written(encoded, tmp_path):
    """The records of a batch, unframed by our own reader, checksums and all."""
    path = tmp_path / "shard.tfrecord"
    path.write_bytes(bytes(encoded.data))
    out = list(frames(path))
    assert not any(isinstance(frame, Damage) for frame in out)
    return out


def check(batch, tmp_path):
    kinds = {name: feature_of(name, batch.schema.field(name).type).type for name in batch.schema.names}
    encoded = Encoder().encode(batch)
    got = written(encoded, tmp_path)
    assert len(got) == len(encoded) == batch.num_rows
    for data, row in zip(got, batch.to_pylist(), strict=True):
        assert data == expected(row, kinds)
    # TensorFlow's reader takes the frames.
    read = list(tf.data.TFRecordDataset(str(tmp_path / "shard.tfrecord")).as_numpy_iterator())
    assert read == got


def table(n, rng):
    """Columns of all kinds, for n rows."""

    def maybe(values, kind):
        return pa.array(values, kind, mask=rng.random(n) < 0.3)

    def words(most):
        return ["aé漢z"[: int(rng.integers(0, 5))] * int(rng.integers(0, most)) for _ in range(n)]

    return pa.RecordBatch.from_pydict(
        {
            "f": pa.array(rng.normal(size=n).astype("f4")),
            "f_missing": maybe(rng.normal(size=n).astype("f4"), pa.float32()),
            "i": pa.array(rng.integers(-(2**63), 2**63 - 1, n)),
            "i_small": pa.array(rng.integers(0, 2, n)),
            "i_mixed": maybe(rng.integers(-3, 300, n), pa.int64()),
            "s": maybe(words(5), pa.string()),
            "s_long": pa.array(words(60)),
            "s_same": pa.array(["ab"] * n),
            "large": pa.array(words(9), pa.large_string()),
            "bytes": pa.array([bytes(rng.integers(0, 256, int(k), dtype=np.uint8)) for k in rng.integers(0, 300, n)]),
            "image": pa.array([bytes(rng.integers(0, 256, 64, dtype=np.uint8)) for _ in range(n)], pa.binary(64)),
            "floats": pa.array([rng.normal(size=int(k)).astype("f4").tolist() for k in rng.integers(0, 40, n)],
                               pa.list_(pa.float32())),
            "ints": maybe([[int(v) for v in rng.integers(-5, 2**40, int(k))] for k in rng.integers(0, 9, n)],
                          pa.list_(pa.int64())),
            "strings": pa.array([words(9)[: int(k)] for k in rng.integers(0, 9, n)], pa.large_list(pa.string())),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(size=n * 3).astype("f4")), 3),
            "n" * 130: pa.array(rng.integers(0, 1000, n)),
            "é" * 70: maybe(words(80), pa.string()),
            "none": pa.nulls(n, pa.float32()),
        }
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_every_kind_of_column_is_encoded_as_protobuf_does(n, tmp_path):
    batch = table(n, np.random.default_rng(n))
    check(batch, tmp_path)
    check(batch.slice(1), tmp_path)  # offsets into buffers
    if n > 4:
        check(batch.slice(2, n - 4), tmp_path)


def test_bytes_do_not_depend_on_the_cut_into_batches():
    batch = table(100, np.random.default_rng(3))
    whole = bytes(Encoder().encode(batch).data)
    encoder = Encoder()
    parts = [bytes(encoder.encode(batch.slice(at, 7)).data) for at in range(0, 100, 7)]
    assert b"".join(parts) == whole


def test_offsets_cut_records():
    encoded = Encoder().encode(table(10, np.random.default_rng(4)))
    assert encoded.offsets[0] == 0
    assert encoded.offsets[-1] == len(encoded.data)
    assert (np.diff(encoded.offsets) > 16).all()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 70_000, 2_100_000])
def test_long_strings(length, tmp_path):
    text = "x" * length
    check(pa.RecordBatch.from_pydict({"s": [text], "i": [1]}), tmp_path)
    check(pa.RecordBatch.from_pydict({"s": [text, "", None, "abc" * 50], "i": [1, 2, 3, None]}), tmp_path)


def test_no_rows():
    encoded = Encoder().encode(pa.RecordBatch.from_pydict({"s": pa.array([], pa.string())}))
    assert len(encoded) == 0
    assert bytes(encoded.data) == b""


def test_a_row_without_any_value(tmp_path):
    batch = pa.RecordBatch.from_pydict({"a": pa.nulls(2, pa.float32()), "b": pa.array([None, 1])})
    check(batch, tmp_path)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([True]),
        pa.array([1.0], pa.float64()),
        pa.array([1], pa.int32()),
        pa.array([[True]]),
        pa.array([{"a": 1}]),
        pa.array([[1, None]]),
    ],
    ids=lambda array: str(array.type),
)
def test_unmapped_types_are_refused(array):
    with pytest.raises(TypeError, match="column 'c'"):
        Encoder().encode(pa.RecordBatch.from_arrays([array], names=["c"]))


# Random schemas and batches --------------------------------------------------------------------------------

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32)  # NaN, infinities and -0.0 too
TEXT = st.text(max_size=30) | st.sampled_from(["", "é" * 100, "x" * 130, "y" * 17_000])
KINDS = {
    pa.float32(): FLOAT32,
    pa.int64(): INT64 | st.integers(0, 3),
    pa.string(): TEXT,
    pa.binary(): st.binary(max_size=40),
    pa.binary(5): st.binary(min_size=5, max_size=5),
    pa.list_(pa.float32()): st.lists(FLOAT32, max_size=4),
    pa.list_(pa.int64()): st.lists(INT64, max_size=4),
    pa.large_list(pa.string()): st.lists(TEXT, max_size=4),
}


@st.composite
def batches(draw):
    rows = draw(st.integers(0, 12))
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
    columns = []
    for _ in names:
        kind = draw(st.sampled_from(list(KINDS)))
        values = st.none() | KINDS[kind] if draw(st.booleans()) else KINDS[kind]
        columns.append(pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind))
    return pa.RecordBatch.from_arrays(columns, names=names)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_random_batches_parse_to_what_protobuf_would_write(batch):
    encoded = Encoder().encode(batch)
    kinds = {name: feature_of(name, batch.schema.field(name).type).type for name in batch.schema.names}
    data = bytes(encoded.data)
    for i, row in enumerate(batch.to_pylist()):
        record = data[encoded.offsets[i] + 12 : encoded.offsets[i + 1] - 4]
        assert record == expected(row, kinds)
        parsed = Example.FromString(record).features.feature
        assert set(parsed) == {name for name, value in row.items() if value is not None}
        for name in parsed:
            # NaN is not equal to itself, so messages are compared by their bytes.
            assert parsed[name].SerializeToString() == feature(kinds[name], row[name]).SerializeToString()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.none() | st.floats(), max_size=20))
def test_float64_is_rounded_as_protobuf_does(values):
    raw = pa.array(values, pa.float64())
    mapped, refused = convert(raw, feature_of("f", raw.type))
    for i, value in enumerate(values):
        if i in refused:
            assert abs(value) > 3.4e38
        elif value is not None:
            assert np.float32(value).tobytes() == np.float32(mapped[i].as_py()).tobytes()
