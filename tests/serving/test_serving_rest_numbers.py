"""Requests of plain numbers: the quick way gives what the careful one gives, bit by bit, or leaves it to that."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.server import rest_json
from serving.server.rest_numbers import plain_numbers
from serving.server.servable import Signature
from serving.server.status import Refused
from serving.stubs import get_model_metadata_pb2
from tests.serving.json_values import json_values

FLOAT, DOUBLE, INT32, UINT8, STRING, INT64, BOOL, UINT64, BFLOAT16 = 1, 2, 3, 4, 7, 9, 10, 23, 14
TYPES = (FLOAT, DOUBLE, INT32, UINT8, INT64)


def signature(*enums: int) -> Signature:
    definition = get_model_metadata_pb2.SignatureDefMap().signature_def["serving_default"]
    for number, enum in enumerate(enums):
        definition.inputs[f"x{number}"].dtype = enum
        definition.inputs[f"x{number}"].tensor_shape.unknown_rank = True
    return Signature("serving_default", definition, lambda *arrays: [], RuntimeError)


def outcome(read: Any) -> tuple[Any, ...]:
    try:
        array = read()["x0"]
    except Refused as e:
        return (e.code, e.message)
    return array.dtype, array.shape, array.tobytes()


def both(body: bytes, enum: int) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
    plain = plain_numbers(body)
    wanted = signature(enum)
    quick = None if plain is None else outcome(lambda: plain.feeds(wanted))
    return quick, outcome(lambda: rest_json.feeds(rest_json.parse(body), wanted))


numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from([(1 << 24) - 1, 1 << 24, -(1 << 24), (1 << 53) - 1, 1 << 53, 255, 256, -1]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([-0.0, 1e-45, 3.5e38, 1e300]),
)


@st.composite
def even_lists(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))

    def of(sizes: list[int]) -> Any:
        return [of(sizes[1:]) for _ in range(sizes[0])] if sizes else draw(numbers)

    return of(shape)


@given(
    even_lists(), st.sampled_from(TYPES), st.sampled_from(["instances", "inputs"]), st.sampled_from([None, 2])
)
def test_even_lists_of_numbers_are_what_the_careful_way_makes_of_them(
    value: Any, enum: int, key: str, indent: int | None
) -> None:
    quick, careful = both(json.dumps({key: value}, indent=indent).encode(), enum)
    assert quick is None or quick == careful


@given(json_values(st.sampled_from(["x0", "b64"])), st.sampled_from([*TYPES, STRING, BOOL, UINT64, BFLOAT16]))
def test_whatever_else_it_is_the_careful_way_decides(value: Any, enum: int) -> None:
    quick, careful = both(json.dumps({"instances": [value]}).encode(), enum)
    assert quick is None or quick == careful


@pytest.mark.parametrize("enum", TYPES)
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 784), (2, 28, 28, 1), (1, 1, 1), (2, 3, 1, 2)])
def test_the_quick_way_is_taken(shape: tuple[int, ...], enum: int) -> None:
    values = np.random.default_rng(1).integers(0, 99, shape).astype(rest_json.tensors.numpy_dtype(enum))
    plain = plain_numbers(json.dumps({"signature_name": "a [b]", "inputs": values.tolist()}).encode())
    assert plain is not None
    assert (plain.signature_name, plain.row, plain.shape) == ("a [b]", False, shape)
    array = plain.array(enum)
    assert array is not None
    assert array.dtype == values.dtype
    np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"instances": 1}',
        b'{"instances": [1]} x',
        b'{"instances": [1], "inputs": [1]}',
        b'{"instances": [1], "instances": [2]}',
        b'{"signature_name": "a", "instances": [1], "signature_name": "b"}',
        b'{"instances": [[1, 2], [3]]}',
        b'{"instances": [[1], 2]}',
        b'{"instances": [1, [2]]}',
        b'{"instances": [[1, 2], [3, 4]}',
        b'{"instances": [1, 2]], "a": [1]}',
        b'{"instances": [NaN]}',
        b'{"instances": [1,]}',
        b'{"instances": [,1]}',
        b'{"instances": [1e999]}',
        b'{"signature_name": "\xff", "instances": [1]}',
        b'{"signature_name": "a\\u0062", "instances": [1]}',
        b'{"instances": [1], "signature_name": "]"}',
        b'{"instances": ' + b"[" * 65 + b"1" + b"]" * 65 + b"}",
    ],
)
def test_all_else_is_left_to_the_careful_way(body: bytes) -> None:
    assert plain_numbers(body) is None


@pytest.mark.parametrize(
    ("value", "enum"),
    [
        ([], FLOAT),
        ([[], []], FLOAT),
        ([[1], []], FLOAT),
        ([1, True], FLOAT),
        ([1, None], FLOAT),
        ([1, "[2]"], FLOAT),
        ([1 << 24], FLOAT),
        ([1e39], FLOAT),
        ([1 << 53], DOUBLE),
        ([1.0], INT32),
        ([1 << 31], INT32),
        ([-1], UINT8),
        ([1], BOOL),
        ([1], STRING),
        ([1], UINT64),
        ([1], BFLOAT16),
    ],
)
def test_numbers_that_need_care_have_it(value: Any, enum: int) -> None:
    plain = plain_numbers(json.dumps({"instances": value}).encode())
    assert plain is None or plain.array(enum) is None


def test_a_signature_with_several_inputs_is_refused_as_ever() -> None:
    plain = plain_numbers(b'{"instances": [1, 2]}')
    assert plain is not None
    with pytest.raises(Refused, match="multiple input tensors required"):
        plain.feeds(signature(FLOAT, FLOAT))
