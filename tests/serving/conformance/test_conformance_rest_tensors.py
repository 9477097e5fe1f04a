"""Tensors as JSON, as TF Serving's page api_rest.md describes them; each test names the section it is made from.

Texts of errors are those of util/json_tensor.cc.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import urllib.parse

import pytest

from tests.serving.conformance.rest_calls import predict

# ---- "Specifying input tensors in row format"


ROWS = {
    "instances": [
        {"tag": "foo", "signal": [1, 2, 3, 4, 5], "sensor": [[1, 2], [3, 4]]},
        {"tag": "bar", "signal": [3, 4, 1, 2, 5], "sensor": [[4, 5], [6, 8]]},
    ]
}
COLUMNS = {
    "inputs": {
        "tag": ["foo", "bar"],
        "signal": [[1, 2, 3, 4, 5], [3, 4, 1, 2, 5]],
        "sensor": [[[1, 2], [3, 4]], [[4, 5], [6, 8]]],
    }
}
BYTES = [{"b64": base64.b64encode(tag).decode()} for tag in (b"foo", b"bar")]


def test_named_inputs_in_rows(rest):
    """The page's request with `tag`, `signal` and `sensor`; several outputs make a list of objects."""
    assert predict(rest, ROWS, "/v1/models/named:predict") == (
        200,
        {
            "predictions": [
                {
                    "tag_out": row["tag"],
                    "tag_bytes": code,
                    "signal_out": row["signal"],
                    "sensor_out": row["sensor"],
                }
                for row, code in zip(ROWS["instances"], BYTES, strict=True)
            ]
        },
    )


def test_named_inputs_in_columns(rest):
    """Specifying input tensors in column format: the columnar representation of the same request."""
    inputs = COLUMNS["inputs"]
    assert predict(rest, COLUMNS, "/v1/models/named:predict") == (
        200,
        {
            "outputs": {
                "tag_out": inputs["tag"],
                "tag_bytes": BYTES,
                "signal_out": inputs["signal"],
                "sensor_out": inputs["sensor"],
            }
        },
    )


def test_one_input_needs_no_name_in_either_format(rest):
    for value in ([[[1, 2]], [[3, 4]]], [1, 2], [[1]]):
        body = {"signature_name": "int32", "instances": value}
        assert predict(rest, body, "/v1/models/types:predict") == (200, {"predictions": value})
        body = {"signature_name": "int32", "instances": [{"x": item} for item in value]}
        assert predict(rest, body, "/v1/models/types:predict") == (200, {"predictions": value})
        for inputs in (value, {"x": value}):
            body = {"signature_name": "int32", "inputs": inputs}
            assert predict(rest, body, "/v1/models/types:predict") == (200, {"outputs": value})


def test_a_signature_by_name(rest):
    """Request format, "signature_name"."""
    body = {"signature_name": "serving_default", "instances": [3.0, 4.0]}
    assert predict(rest, body) == (200, {"predictions": [3.5, 4.0]})
    body["signature_name"] = "none"
    assert predict(rest, body) == (
        400,
        {"error": 'Serving signature name: "none" not found in signature def'},
    )


PREDICT_ERRORS = [
    (b"", "JSON Parse error: The document is empty"),
    (b"instances = [1, 2]", "JSON Parse error: Invalid value."),
    (b'{"instances": [1, 2}', "JSON Parse error: "),
    (b"[1]", "Is not object"),
    (b'"x"', "Is not object"),
    ({}, "Missing 'inputs' or 'instances' key"),
    (
        {"inputs": [1], "instances": [1]},
        "Not formatted correctly expecting only one of 'inputs' or 'instances'",
    ),
    ({"instances": 1.0}, "Excepting 'instances' to be an list/array"),
    ({"instances": {"x": 1.0}}, "Excepting 'instances' to be an list/array"),
    ({"instances": []}, "No values in 'instances' array"),
    (
        {"instances": ["a"]},
        "Failed to process element: 0 of 'instances' list. Error: INVALID_ARGUMENT: "
        'JSON Value: "a" Type: String is not of expected type: float',
    ),
    (
        {"instances": [1.0, None]},
        "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: "
        "JSON Value: null Type: Null is not of expected type: float",
    ),
    ({"instances": [True]}, "JSON Value: true Type: True is not of expected type: float"),
    ({"instances": [False]}, "JSON Value: false Type: False is not of expected type: float"),
    (
        {"instances": [{"x": "a"}]},
        "Failed to process element: 0 key: x of 'instances' list. Error: INVALID_ARGUMENT: "
        'JSON Value: "a" Type: String is not of expected type: float',
    ),
    (
        {"instances": [{"z": 1.0}]},
        "Failed to process element: 0 key: z of 'instances' list. Error: INVALID_ARGUMENT: "
        "JSON object: does not have named input: z",
    ),
    ({"instances": [{"x": 1.0}, {}]}, "keys must be equal to: x"),
    ({"instances": [{"x": 1.0}, 2.0]}, "Expecting object but got list at item 1 of input list"),
    ({"instances": [1.0, {"x": 1.0}]}, "Expecting value/list but got object at item 1 of input list"),
    (
        {"instances": [[1.0, 2.0], [3.0]]},
        "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: "
        "Expecting tensor size: 2 but got: 1",
    ),
    (
        {"instances": [[[1.0, 2.0]], [[1.0], [2.0]]]},
        "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: "
        "Expecting shape [1,2] but got: [2,1]",
    ),
    (
        {"instances": [[[1.0], 2.0]]},
        "JSON Value: 2.0 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
    ),
    (
        {"instances": [[[1.0], [2.0, 3.0]]]},
        "Encountered list at unexpected size: 2 at level: 1 expected size: 1",
    ),
    ({"instances": [[1.0, [2.0]]]}, "Encountered list at unexpected level: 1 expected < 1"),
    (
        {"instances": [16777217]},
        "Cannot convert JSON value: 16777217 to float without loss of precision.",
    ),
    ({"instances": [1e39]}, "Cannot convert JSON value: 1e+39 to float without loss of precision."),
    ({"inputs": "a"}, 'JSON Value: "a" Type: String is not of expected type: float'),
    ({"inputs": {"z": [1.0]}}, "Missing named input: x in 'inputs' object."),
    ({"inputs": [[1.0], [2.0, 3.0]]}, "Encountered list at unexpected size: 2 at level: 1 expected size: 1"),
    ({"inputs": {"b64": "YQ=="}}, "Type: Object is not of expected type: float"),
]


@pytest.mark.parametrize(
    ("body", "message"), PREDICT_ERRORS, ids=[str(body)[:60] for body, _ in PREDICT_ERRORS]
)
def test_predict_errors(rest, body, message):
    status, answer = predict(rest, body)
    assert status == 400
    assert message in answer["error"]


def test_several_inputs_want_names(rest):
    path = "/v1/models/named:predict"
    for body, message in (
        (
            {"instances": [1]},
            "instances is a plain list, but expecting list of objects as multiple input tensors",
        ),
        ({"inputs": [1]}, "inputs is a plain value/list, but expecting an object as multiple input tensors"),
    ):
        status, answer = predict(rest, body, path)
        assert status == 400
        assert message in answer["error"]


# ---- "JSON mapping"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("bool", [True, False]),
        ("string", ["Hello World!", "", "\u00e9\u4e2d"]),
        ("int8", [1, -10, 0]),
        ("uint8", [255]),
        ("int16", [-32768]),
        ("int32", [2147483647, -2147483648]),
        ("uint32", [4294967295]),
        ("int64", [9223372036854775807, -9223372036854775808]),
        ("uint64", [18446744073709551615]),
        ("float32", [1.1, -10.0, 0.0, 0.2, 1e-7, 16777215.0]),
        ("float64", [1.1, 1e300, -2.5e-300]),
    ],
)
def test_types(rest, kind, values):
    body = {"signature_name": kind, "inputs": values}
    assert predict(rest, body, "/v1/models/types:predict") == (200, {"outputs": values})


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("int32", 1.5, "JSON Value: 1.5 Type: Number is not of expected type: int32"),
        ("int32", 1.0, "JSON Value: 1.0 Type: Number is not of expected type: int32"),
        ("int32", 2147483648, "JSON Value: 2147483648 Type: Number is not of expected type: int32"),
        ("uint32", -1, "JSON Value: -1 Type: Number is not of expected type: uint32"),
        ("int64", 9223372036854775808, "Type: Number is not of expected type: int64"),
        ("uint64", -1, "Type: Number is not of expected type: uint64"),
        ("bool", 1, "JSON Value: 1 Type: Number is not of expected type: bool"),
        ("string", 1, "JSON Value: 1 Type: Number is not of expected type: string"),
        ("string", {"a": 1}, "not formatted correctly for base64 data"),
        (
            "float64",
            9007199254740993,
            "Cannot convert JSON value: 9007199254740993 to double without loss of precision.",
        ),
    ],
)
def test_values_of_the_wrong_type(rest, kind, value, message):
    body = {"signature_name": kind, "inputs": [value]}
    status, answer = predict(rest, body, "/v1/models/types:predict")
    assert status == 400
    assert message in answer["error"]


def test_exponents_and_whole_numbers_are_floats(rest):
    """ "Exponent notation is also accepted"; numbers come back with a point, whole or not."""
    assert predict(rest, b'{"inputs": [1e2, 5, 1E-1]}', "/v1/models/types:predict") == (
        200,
        {"outputs": [100.0, 5.0, 0.1]},
    )


# ---- "Encoding binary values"


def test_base64_goes_in_and_comes_out_where_the_name_ends_in_bytes(rest):
    data = {"b64": base64.b64encode(b"\xff\x00image bytes").decode()}
    body = {"instances": [{"tag": data, "signal": [1], "sensor": [[1]]}]}
    body["instances"][0]["tag"] = data
    status, answer = predict(rest, {**body, "signature_name": "serving_default"}, "/v1/models/named:predict")
    if status == 200:  # the other output of the same bytes is no UTF-8; servers differ in how they show it
        assert answer["predictions"][0]["tag_bytes"] == data
    text = {"b64": base64.b64encode(b"plain").decode()}
    body = {"signature_name": "string", "instances": [text, "as it is"]}
    assert predict(rest, body, "/v1/models/types:predict") == (200, {"predictions": ["plain", "as it is"]})


def test_base64_alone_is_a_scalar_column(rest):
    body = {"signature_name": "string", "inputs": {"b64": base64.b64encode(b"one").decode()}}
    status, answer = predict(rest, body, "/v1/models/types:predict")
    # With request batching a tensor needs a first dimension.
    assert (status, answer) in [
        (200, {"outputs": "one"}),
        (400, {"error": "Batching Run() input tensors must have at least one dimension"}),
    ]


def test_base64_that_is_none(rest):
    body = {"signature_name": "string", "instances": [{"b64": "?"}]}
    status, answer = predict(rest, body, "/v1/models/types:predict")
    assert status == 400
    assert "Unable to base64 decode" in answer["error"]


# ---- "JSON conformance"


def test_nan_and_infinity_are_bare_words_both_ways(rest, endpoint):
    address = urllib.parse.urlsplit(endpoint.rest)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection.request("POST", "/v1/models/types:predict", b'{"inputs": [1.0, NaN, Infinity, -Infinity]}')
    text = connection.getresponse().read().decode()
    connection.close()
    assert text.replace(" ", "").replace("\n", "") == '{"outputs":[1.0,NaN,Infinity,-Infinity]}'
    assert math.isnan(json.loads(text)["outputs"][1])
