"""Random columns of every raw type, mapped and encoded, against what the official protobuf reads of them."""

import datetime as dt
import math

import numpy as np
import pyarrow as pa
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.records.convert import convert, feature_of
from trainers.records.native import make_encoder

EPOCH = dt.datetime(1970, 1, 1)


def whole(bits, signed=True):
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


def microseconds(value):
    return (value - EPOCH) // dt.timedelta(microseconds=1)


def float32(value):
    return float(np.float32(value))


# Arrow type -> its values, and what one of them is in the record. Text only where it is told from bytes.
SCALARS = {
    pa.bool_(): (st.booleans(), int),
    pa.int8(): (whole(8), int),
    pa.int16(): (whole(16), int),
    pa.int32(): (whole(32), int),
    pa.int64(): (whole(64), int),
    pa.uint8(): (whole(8, False), int),
    pa.uint16(): (whole(16, False), int),
    pa.uint32(): (whole(32, False), int),
    pa.uint64(): (st.integers(0, 2**63 - 1), int),
    pa.float16(): (st.floats(width=16), float32),
    pa.float32(): (st.floats(width=32), float32),
    pa.float64(): (st.floats(-3e38, 3e38) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0]), float32),
    pa.decimal128(12, 0): (st.decimals(-(10**11), 10**11, places=0), int),
    pa.decimal128(9, 3): (st.decimals(-(10**5), 10**5, places=3), lambda v: float32(float(v))),
    pa.date32(): (st.dates(), lambda v: (v - EPOCH.date()).days),
    pa.date64(): (st.dates(), lambda v: (v - EPOCH.date()).days),
    pa.timestamp("us"): (st.datetimes(), microseconds),
    pa.timestamp("s"): (st.datetimes().map(lambda v: v.replace(microsecond=0)), microseconds),
    pa.time64("us"): (st.times(), lambda v: microseconds(dt.datetime.combine(EPOCH.date(), v))),
    pa.duration("ms"): (st.integers(-(10**12), 10**12).map(lambda v: dt.timedelta(milliseconds=v)),
                        lambda v: v // dt.timedelta(microseconds=1)),
    pa.string(): (st.text(max_size=9), str.encode),
    pa.large_string(): (st.text(max_size=9) | st.just("é" * 9000), str.encode),
    pa.string_view(): (st.text(max_size=30), str.encode),
    pa.binary(): (st.binary(max_size=9), bytes),
    pa.large_binary(): (st.binary(max_size=9), bytes),
    pa.binary_view(): (st.binary(max_size=30), bytes),
    pa.binary(3): (st.binary(min_size=3, max_size=3), bytes),
    pa.dictionary(pa.int8(), pa.string()): (st.sampled_from(["a", "", "漢"]), str.encode),
    pa.dictionary(pa.int32(), pa.int64()): (st.sampled_from([1, -(2**63), 2**63 - 1]), int),
}  # fmt: skip


@st.composite
def columns(draw):
    """A raw column cut out of a longer one, and what its rows are in the record."""
    kind = draw(st.sampled_from(list(SCALARS)))
    values, wanted = SCALARS[kind]
    shape = draw(st.sampled_from(["one", "list", "large", "fixed"]))
    row = wanted
    if shape != "one":
        size = 2 if shape == "fixed" else None
        values = st.lists(values, min_size=size or 0, max_size=size or 3)
        kind = pa.large_list(kind) if shape == "large" else pa.list_(kind, size) if size else pa.list_(kind)

        def row(items):
            return [wanted(item) for item in items]

    rows = draw(st.lists(st.none() | values, max_size=6))
    if kind == pa.time64("us"):
        rows = [v and v.replace(tzinfo=None) for v in rows]
    array = pa.array(rows, kind)
    first = draw(st.integers(0, len(rows)))
    return array.slice(first), [None if value is None else row(value) for value in rows[first:]]


def values_of(feature):
    kind = feature.WhichOneof("kind")
    return kind, list(getattr(feature, kind).value)


@settings(max_examples=150, deadline=None)
@given(columns())
def test_every_type_is_read_as_its_value(column):
    array, wanted = column
    feature = feature_of("c", array.type)
    mapped, refused = convert(array, feature)
    assert not refused
    encoded = make_encoder().encode(pa.RecordBatch.from_arrays([mapped], names=["c"]))
    data = bytes(encoded.data)
    kinds = {"float32": "float_list", "int64": "int64_list", "string": "bytes_list", "bytes": "bytes_list"}
    assert len(encoded) == len(wanted)
    for i, value in enumerate(wanted):
        record = data[encoded.offsets[i] + 12 : encoded.offsets[i + 1] - 4]
        features = tf.train.Example.FromString(record).features.feature
        if value is None:
            assert "c" not in features
            continue
        kind, found = values_of(features["c"])
        assert kind == kinds[feature.type]
        # By text, so that NaN is NaN and -0.0 isn't 0.0.
        assert list(map(repr, found)) == list(map(repr, value if isinstance(value, list) else [value]))
