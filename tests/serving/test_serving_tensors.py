from __future__ import annotations

import numpy as np
import pytest

from serving.stubs import tensor_pb2
from serving.tensors import TensorError, datatype_of, dtype_name, from_proto, to_proto


def _arrays():
    import ml_dtypes

    rng = np.random.default_rng(1)
    for name in ("float32", "float64", "float16", "int8", "int16", "int32", "int64"):
        yield (rng.normal(size=(2, 3)) * 50).astype(name)
    for name in ("uint8", "uint16", "uint32", "uint64"):
        yield rng.integers(0, 200, (4,)).astype(name)
    yield np.array([[True], [False]])
    yield (rng.normal(size=3) + 1j).astype(np.complex64)
    yield (rng.normal(size=3) + 1j).astype(np.complex128)
    yield rng.normal(size=(2, 2)).astype(ml_dtypes.bfloat16)
    yield np.array([[b"a", b"\xff\0"], [b"", b"long" * 9]], object)
    yield np.float32(3.5)
    yield np.zeros((0, 3), np.float32)


@pytest.mark.parametrize("array", list(_arrays()), ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_travel_as_tensorflow_sends_and_reads_them(array):
    import tensorflow as tf

    for content in (True, False):
        proto = tensor_pb2.TensorProto()
        to_proto(array, proto, as_content=content)
        np.testing.assert_array_equal(tf.make_ndarray(proto), array)
        np.testing.assert_array_equal(from_proto(proto), array)
    theirs = tf.make_tensor_proto(array)
    assert from_proto(theirs).dtype == (object if array.dtype.kind == "O" else array.dtype)
    np.testing.assert_array_equal(from_proto(theirs), array)


def test_a_short_list_of_values_repeats_the_last_as_in_tensorflow():
    proto = tensor_pb2.TensorProto(dtype=1, float_val=[1.0, 2.0])
    proto.tensor_shape.dim.add(size=4)
    np.testing.assert_array_equal(from_proto(proto), [1, 2, 2, 2])
    del proto.float_val[:]
    np.testing.assert_array_equal(from_proto(proto), [0, 0, 0, 0])
    empty = tensor_pb2.TensorProto(dtype=7)
    empty.tensor_shape.dim.add(size=2)
    assert from_proto(empty).tolist() == [b"", b""]


def _proto(dtype=1, shape=(2,), **values):
    proto = tensor_pb2.TensorProto(dtype=dtype, **values)
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    return proto


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (_proto(tensor_content=b"123"), "must hold 8 bytes"),
        (_proto(shape=(-1,)), "0 or more"),
        (_proto(shape=(1 << 40,), float_val=[1.0]), "over the limit"),
        (_proto(shape=(1 << 62, 1 << 62), float_val=[1.0]), "over the limit"),
        (_proto(float_val=[1, 2, 3]), "don't fit"),
        (_proto(dtype=4, int_val=[300, 1]), "out of the range"),
        (_proto(shape=(1,) * 65, float_val=[1.0]), "65 dimensions are too many"),
        (_proto(dtype=20), "not supported"),
        (_proto(dtype=0), "not supported"),
        (_proto(dtype=8, scomplex_val=[1.0]), "in pairs"),
        (tensor_pb2.TensorProto(dtype=1, tensor_shape={"unknown_rank": True}), "unknown rank"),
    ],
)
def test_what_is_no_tensor_is_refused(proto, message):
    with pytest.raises(TensorError, match=message):
        from_proto(proto, max_bytes=1 << 20)


def test_what_can_not_be_sent_is_refused():
    with pytest.raises(TensorError, match="str or bytes"):
        to_proto(np.array([object()], object), tensor_pb2.TensorProto())
    with pytest.raises(TensorError, match="can't be sent"):
        to_proto(np.array(["2020-01-01"], "datetime64[D]"), tensor_pb2.TensorProto())


def test_strings_and_foreign_byte_orders_are_sent_as_servers_expect_them():
    proto = tensor_pb2.TensorProto()
    to_proto(["å", "b"], proto)
    assert list(proto.string_val) == ["å".encode(), b"b"]
    swapped = tensor_pb2.TensorProto()
    to_proto(np.array([1.5, 2.5], ">f4"), swapped)
    np.testing.assert_array_equal(from_proto(swapped), [1.5, 2.5])


def test_names_are_tensorflow_s():
    assert [dtype_name(n) for n in (1, 9, 7, 99)] == ["float", "int64", "string", "type 99"]
    assert datatype_of(np.dtype("U3")) == 7
