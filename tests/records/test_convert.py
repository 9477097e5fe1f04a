import datetime
import decimal

import pyarrow as pa
import pytest

from trainers.records.convert import convert, feature_of
from trainers.records.errors import ColumnError
from trainers.records.schema import Feature

D = decimal.Decimal
DAY = datetime.date(1970, 1, 3)
MOMENT = datetime.datetime(1970, 1, 1, 0, 0, 1)

# raw column, the feature it becomes, the values in the record
MAPPED = [
    (pa.array([True, None, False]), ("int64", ()), [1, None, 0]),
    (pa.array([-1, 5], pa.int8()), ("int64", ()), [-1, 5]),
    (pa.array([2**63 - 1], pa.uint64()), ("int64", ()), [2**63 - 1]),
    (pa.array([1.5, None], pa.float16()), ("float32", ()), [1.5, None]),
    (pa.array([1.5, float("inf")]), ("float32", ()), [1.5, float("inf")]),
    (pa.array([D("12"), None], pa.decimal128(18, 0)), ("int64", ()), [12, None]),
    (pa.array([D("12.5")], pa.decimal128(10, 2)), ("float32", ()), [12.5]),
    (pa.array([D("12")], pa.decimal128(30, 0)), ("float32", ()), [12.0]),
    (pa.array([DAY, None], pa.date32()), ("int64", ()), [2, None]),
    (pa.array([DAY], pa.date64()), ("int64", ()), [2]),
    (pa.array([MOMENT], pa.timestamp("s")), ("int64", ()), [1_000_000]),
    (pa.array([MOMENT], pa.timestamp("us", "UTC")), ("int64", ()), [1_000_000]),
    (pa.array([-1, 1999, None], pa.timestamp("ns")), ("int64", ()), [-1, 1, None]),
    (pa.array([61], pa.time32("ms")), ("int64", ()), [61_000]),
    (pa.array([61], pa.duration("s")), ("int64", ()), [61_000_000]),
    (pa.array(["a", None, "é"]), ("string", ()), ["a", None, "é"]),
    (pa.array(["a"], pa.large_string()), ("string", ()), ["a"]),
    (pa.array(["a long string that is no inline one"], pa.string_view()), ("string", ()), None),
    (pa.array([b"\xff"]), ("bytes", ()), [b"\xff"]),
    (pa.array([b"ab"], pa.binary(2)), ("bytes", ()), [b"ab"]),
    (pa.array(["a", "b", "a"]).dictionary_encode(), ("string", ()), ["a", "b", "a"]),
    (pa.array([[1, 2], [], None], pa.list_(pa.int16())), ("int64", (None,)), [[1, 2], [], None]),
    (pa.array([["a"], []], pa.large_list(pa.string())), ("string", (None,)), [["a"], []]),
    (pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2)), ("float32", (2,)), [[1.0, 2.0], None]),
    (
        pa.array([["a", "b"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        ("string", (None,)),
        [["a", "b"]],
    ),
    (pa.nulls(2), ("string", ()), [None, None]),
    (pa.chunked_array([[1], [2]]), ("int64", ()), [1, 2]),
]


@pytest.mark.parametrize(("raw", "feature", "values"), MAPPED, ids=lambda v: str(getattr(v, "type", ""))[:40])
def test_every_type_has_its_place(raw, feature, values):
    found = feature_of("c", raw.type)
    assert (found.type, found.shape) == feature
    assert found.source == str(raw.type)
    mapped, refused = convert(raw, found)
    assert refused == {}
    assert mapped.to_pylist() == (raw.to_pylist() if values is None else values)
    item = mapped.type.value_type if feature[1] else mapped.type
    want = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string(), "bytes": pa.binary()}
    assert item == want[feature[0]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.struct([("a", pa.int64())]),
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.list_(pa.int64())),
        pa.list_(pa.float32(), 0),
        pa.month_day_nano_interval(),
    ],
    ids=str,
)
def test_types_without_a_place_are_refused(kind):
    with pytest.raises(ColumnError, match=r"column 'c' has type .* flatten it") as e:
        feature_of("c", kind)
    assert e.value.column == "c"


INT, FLOAT = Feature("c", "int64"), Feature("c", "float32")
FOUR = Feature("c", "int64", (2, 2))
MANY = Feature("c", "int64", (None,))

# raw column, the schema's feature, values, refused rows
REFUSED = [
    (pa.array([1, 2**63], pa.uint64()), INT, [1, None], {1: "9223372036854775808 is no int64"}),
    (pa.array([1.0, 1.5]), INT, [1, None], {1: "1.5 is no int64"}),
    (pa.array([1e300, None, 1.0]), FLOAT, [None, None, 1.0], {0: "1e+300 doesn't fit float32"}),
    (pa.array(["1", "x", None, " 7 "]), INT, [1, None, None, 7], {1: "'x' is no int64"}),
    (pa.array(["1.5", "y" * 99]), FLOAT, [1.5, None], {1: "'" + "y" * 56 + "... is no float32"}),
    (pa.array(["1e400"]), FLOAT, [float("inf")], {}),
    (pa.array(["true", "0", "q"]), Feature("c", "int64", source="bool"), [1, 0, None], {2: "'q' is no bool"}),
    (pa.array(["1970-01-03"]), Feature("c", "int64", source="date32[day]"), [2], {}),
    (pa.array(["1970-01-01 00:00:01"]), Feature("c", "int64", source="timestamp[us]"), [1_000_000], {}),
    (pa.array([[1, None], [2], None]), MANY, [None, [2], None], {0: "has a null inside a list"}),
    (pa.array([["1", "x"], ["2"]]), MANY, [None, [2]], {0: "'x' is no int64"}),
    (pa.array([[1, 2, 3, 4], [1], None]), FOUR, [[1, 2, 3, 4], None, None], {1: "has 1 values, wants 4"}),
    (pa.array([1, None]), MANY, [None, None], {0: "is one value, wants a list"}),
    (pa.array([[1], None]), INT, [None, None], {0: "is a list, wants one value"}),
    (pa.array([1, 2]), Feature("c", "string"), ["1", "2"], {}),
    (pa.array([b"a", b"\xff"]), Feature("c", "string"), ["a", None], {1: "can't be text: b'\\xff'"}),
    (pa.array([b"a"], pa.binary(1)), Feature("c", "string"), ["a"], {}),
    (pa.array(["a"]), Feature("c", "bytes"), [b"a"], {}),
    (pa.array([1]), Feature("c", "bytes"), [None], {0: "is int64, wants bytes"}),
    (pa.array([b"a"]), INT, [None], {0: "is binary, wants int64"}),
    (pa.array([{"a": 1}]), INT, [None], {0: "is struct<a: int64>, wants int64"}),
    (pa.array([True, None]), FLOAT, [1.0, None], {}),
    (pa.array([DAY]), FLOAT, [2.0], {}),
    (pa.array([2**62], pa.timestamp("s")), INT, [None], {0: "4611686018427387904 is out of range in us"}),
]


@pytest.mark.parametrize(("raw", "feature", "values", "refused"), REFUSED)
def test_what_does_not_fit_is_refused_by_row(raw, feature, values, refused):
    mapped, found = convert(raw, feature)
    assert found == refused
    assert mapped.to_pylist() == values


def test_one_bad_value_among_many_is_found():
    values = [str(i) for i in range(5000)]
    values[1234] = "oops"
    mapped, refused = convert(pa.array(values), INT)
    assert refused == {1234: "'oops' is no int64"}
    assert mapped.null_count == 1
    assert mapped[4999].as_py() == 4999
