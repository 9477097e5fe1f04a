"""TF Serving's REST API over a real socket, as its documents describe it."""

from __future__ import annotations

import base64
import json
import socket
import urllib.error
import urllib.request

import numpy as np
import pytest

from serving.server.rest_answers import outputs_body


@pytest.fixture(scope="module")
def call(shared_server):
    def call(path, body=None, *, method=None, raw=False):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{shared_server.rest_port}{path}", data, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                text = response.read().decode()
                return response.status, text if raw else json.loads(text)
        except urllib.error.HTTPError as e:
            with e:
                return e.code, json.loads(e.read())["error"]

    return call


def test_rows_and_columns_hold_the_same(call, images, expected):
    row = {"instances": [{"image": image.tolist()} for image in images]}
    status, answer = call("/v1/models/digits/labels/stable:predict", row)
    assert status == 200
    assert [sorted(p) for p in answer["predictions"]] == [["classes", "logits", "probabilities"]] * 4
    np.testing.assert_allclose([p["logits"] for p in answer["predictions"]], expected[1]["logits"], rtol=1e-5)
    _, plain = call("/v1/models/digits/versions/1:predict", {"instances": images.tolist()})
    assert plain == answer
    _, columns = call("/v1/models/digits/versions/1:predict", {"inputs": {"image": images.tolist()}})
    assert columns["outputs"]["classes"] == [p["classes"] for p in answer["predictions"]]
    _, unnamed = call("/V1/Models/digits/versions/1:PREDICT", {"inputs": images.tolist()})
    assert unnamed == columns


def test_strings_and_bytes(call):
    body = {
        "instances": [{"numbers": [1, 2.5], "names": "ab"}, {"numbers": [0, 1], "names": {"b64": "/wA="}}]
    }
    status, answer = call("/v1/models/kinds:predict", body)
    assert status == 200
    assert answer["predictions"][0] == {"total": 3.5, "upper": "AB", "echo_bytes": {"b64": "YWI="}}
    assert answer["predictions"][1]["echo_bytes"] == {"b64": "/wA="}
    _, one = call("/v1/models/kinds:predict", {"signature_name": "upper", "instances": [{"b64": "YWI"}, "c"]})
    assert one == {"predictions": ["AB", "C"]}
    _, column = call("/v1/models/kinds:predict", {"signature_name": "upper", "inputs": ["x", "y"]})
    assert column == {"outputs": ["X", "Y"]}


def test_numbers_are_as_short_as_they_can_be_and_odd_ones_have_names(call):
    body = b'{"signature_name": "scalar", "inputs": [0.2, 0.1, NaN, Infinity, -Infinity, 3]}'
    status, text = call("/v1/models/kinds:predict", body, raw=True)
    assert status == 200
    assert "[0.2, 0.1, NaN, Infinity, -Infinity, 3.0]" in text
    _, text = call("/v1/models/kinds:predict", {"signature_name": "scalar", "inputs": [0.2, 1e-7]}, raw=True)
    assert '"x":[0.2,1e-7]' in text.replace(" ", "")


def test_shortest_decimals_come_back_as_the_same_floats():
    rng = np.random.default_rng(3)
    values = (rng.normal(size=2000) * 10.0 ** rng.integers(-14, 17, 2000)).astype(np.float32)
    values = np.concatenate([values, np.float32([0, -0.0, 1, 9999999, 1e-45, 3.4e38])])
    body = outputs_body({"x": values}, True)
    short = np.array(json.loads(body)["predictions"])
    np.testing.assert_array_equal(short.astype(np.float32), values)
    np.testing.assert_array_equal(np.signbit(short), np.signbit(values))
    assert max(len(number) for number in body.decode().partition("[")[2][:-2].split(",")) <= 17
    with_nan = np.append(values, np.float32(np.nan))
    assert json.loads(outputs_body({"x": with_nan}, True))["predictions"][:-1] == short.tolist()


@pytest.mark.parametrize(
    ("kind", "given", "got"),
    [
        ("bool", [True, False], [True, False]),
        ("int32", [[1], [-2]], [[1], [-2]]),
        ("uint64", [1 << 63], [1 << 63]),
        ("float64", 7, 7.0),
        ("float16", [0.5], [0.5]),
        ("bfloat16", [0.5], [0.5]),
        ("int8", [], []),
    ],
)
def test_types_of_json(call, kind, given, got):
    assert call("/v1/models/kinds:predict", {"signature_name": kind, "inputs": given}) == (
        200,
        {"outputs": got},
    )


BAD = [
    (b"", 400, "JSON Parse error: The document is empty"),
    (b"{", 400, "JSON Parse error"),
    (b"\xff\xfe", 400, "JSON Parse error"),
    (b"[" * 5000, 400, "JSON Parse error"),
    ([1], 400, "Is not object"),
    ({}, 400, "Missing 'inputs' or 'instances' key"),
    ({"inputs": 1, "instances": [1]}, 400, "expecting only one of"),
    ({"instances": 1}, 400, "to be an list/array"),
    ({"instances": []}, 400, "No values in 'instances' array"),
    ({"instances": [1]}, 400, "instances is a plain list, but expecting list of objects"),
    ({"instances": [{"numbers": [1, 2]}]}, 400, "keys must be equal to: names,numbers"),
    ({"instances": [{"numbers": [1, 2], "names": "a"}, 3]}, 400, "Expecting object but got list at item 1"),
    ({"inputs": [1]}, 400, "inputs is a plain value/list"),
    ({"inputs": {"names": ["a"]}}, 400, "Missing named input: numbers in 'inputs' object."),
    ({"signature_name": 3, "inputs": 1}, 400, "'signature_name' key must be a string value"),
    ({"signature_name": "x", "inputs": 1}, 400, 'Serving signature name: "x" not found in signature def'),
    ({"signature_name": "scalar", "instances": [1.0]}, 400, "Tensor name: mean has no shape information"),
    (
        {"signature_name": "scalar", "instances": [1.0, {"a": 1}]},
        400,
        "Expecting value/list but got object at item 1",
    ),
    ({"signature_name": "scalar", "inputs": ["a"]}, 400, '"a" Type: String is not of expected type: float'),
    ({"signature_name": "scalar", "inputs": [True, 1]}, 400, "not of expected type: float"),
    ({"signature_name": "scalar", "inputs": [None]}, 400, "Null is not of expected type: float"),
    ({"signature_name": "scalar", "inputs": [{"b64": "YQ=="}]}, 400, "Object is not of expected type: float"),
    ({"signature_name": "scalar", "inputs": [[1], 2]}, 400, "at incorrect level"),
    (
        {"signature_name": "scalar", "inputs": [[1], [2, 3]]},
        400,
        "unexpected size: 2 at level: 1 expected size: 1",
    ),
    ({"signature_name": "scalar", "inputs": [1, [2]]}, 400, "unexpected level"),
    ({"signature_name": "scalar", "inputs": [[1.0]]}, 400, "not compatible with expected shape"),
    ({"signature_name": "scalar", "inputs": [16777217]}, 400, "without loss of precision"),
    ({"signature_name": "scalar", "inputs": [1e300]}, 400, "without loss of precision"),
    ({"signature_name": "int32", "inputs": [1.5]}, 400, "Number is not of expected type: int32"),
    ({"signature_name": "int8", "inputs": [300]}, 400, "Number is not of expected type: int8"),
    ({"signature_name": "int32", "inputs": [10**30]}, 400, "not of expected type"),
    ({"signature_name": "bool", "inputs": [1]}, 400, "not of expected type: bool"),
    ({"signature_name": "complex64", "inputs": [1]}, 501, "Conversion of JSON Value"),
    ({"signature_name": "upper", "inputs": [1]}, 400, "not of expected type: string"),
    ({"signature_name": "upper", "inputs": [{"b64": "!"}]}, 400, "Unable to base64 decode"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_bodies(call, body, status, message):
    got, error = call("/v1/models/kinds:predict", body)
    assert (got, message in error) == (status, True), error


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/models/digits:predict", 400, "Malformed request: GET /v1/models/digits:predict"),
        ("POST", "/v1/models/digits", 400, "Malformed request: POST"),
        ("POST", "/v1/models/digits:explain", 400, "Malformed request"),
        ("GET", "/v1/models", 400, "Missing model name in request."),
        ("GET", "/v1/models/no", 404, "Could not find any versions of model no"),
        ("GET", "/v1/models/digits/versions/9", 404, "Could not find version 9 of model digits"),
        ("GET", "/v1/models/digits/versions/99999999999999999999/metadata", 400, "Failed to convert version"),
        ("GET", "/v1/models/digits/labels/no/metadata", 400, "Unrecognized servable version label: no"),
        ("GET", "/else", 404, "Not found: GET /else"),
        ("GET", "/v1/else", 400, "Malformed request"),
        ("DELETE", "/v1/models/digits", 400, "Malformed request"),
    ],
)
def test_bad_paths(call, method, path, status, message):
    got, error = call(path, b"{}" if method == "POST" else None, method=method)
    assert got == status
    assert message in error


def test_unknown_models_and_versions_are_404(call):
    body = {"instances": [1]}
    assert call("/v1/models/no:predict", body) == (404, "Servable not found for request: Latest(no)")
    assert call("/v1/models/digits/versions/7:predict", body)[0] == 404


def test_status_and_metadata(call):
    status, answer = call("/v1/models/digits/versions/1")
    assert status == 200
    assert answer == {
        "model_version_status": [
            {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }
    status, answer = call("/v1/models/digits/labels/canary/metadata")
    assert answer["model_spec"]["version"] == "2"
    image = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]["image"]
    assert image["dtype"] == "DT_UINT8"
    assert [d["size"] for d in image["tensor_shape"]["dim"]] == ["-1", "8", "8", "1"]


def test_classify_and_regress(call, images, expected):
    encoded = [{"image": {"b64": base64.b64encode(i.tobytes()).decode()}} for i in images]
    status, answer = call(
        "/v1/models/digits/versions/1:classify", {"signature_name": "classify", "examples": encoded}
    )
    assert status == 200
    assert answer["results"][0][3][0] == "digit 3"
    np.testing.assert_allclose(
        [score for _, score in answer["results"][1]], expected[1]["probabilities"][1], rtol=1e-5
    )
    body = {"signature_name": "regress", "context": encoded[0], "examples": [{}, {"other": [1, 2], "f": 0.5}]}
    status, answer = call("/v1/models/digits/versions/1:regress", body)
    np.testing.assert_allclose(answer["results"], [expected[1]["probabilities"][0].max()] * 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "key 'examples' is expected and was not found"),
        ({"examples": 3}, "to be an list/array"),
        ({"examples": []}, "is an empty array"),
        ({"examples": [3]}, "Example must be JSON object"),
        ({"examples": [{"a": [1, "b"]}]}, "Unexpected element type in feature: a"),
        ({"examples": [{"a": [[1]]}]}, "unexpected JSON type"),
        ({"examples": [{"a": None}]}, "unexpected JSON type"),
        ({"examples": [{"a": 1 << 63}]}, "Only int64 is supported"),
        ({"examples": [{"a": {"b64": "!"}}]}, "Unable to base64 decode"),
        ({"context": 3, "examples": [{}]}, "Example must be JSON object"),
    ],
)
def test_bad_examples(call, body, message):
    status, error = call("/v1/models/digits:classify", body)
    assert (status, message in error) == (400, True), error


def test_a_body_over_the_limit_is_413_and_the_server_goes_on(call):
    status, error = call("/v1/models/kinds:predict", b" " * (2 << 20))
    assert status == 413
    assert "larger than 1048576 bytes" in error
    assert call("/v1/models/digits")[0] == 200


def test_many_requests_use_one_connection_and_garbage_ends_only_its_own(shared_server, call):
    with socket.create_connection(("127.0.0.1", shared_server.rest_port), timeout=10) as connection:
        for _ in range(3):
            connection.sendall(b"GET /v1/models/digits HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    with socket.create_connection(("127.0.0.1", shared_server.rest_port), timeout=10) as connection:
        connection.sendall(b"\0\1\2 garbage\r\n\r\n")
        connection.recv(65536)
    assert call("/v1/models/digits")[0] == 200


def test_metrics_have_tf_serving_s_names(call):
    call("/v1/models/digits:predict", {"instances": [[[[0]] * 8] * 8]})
    call("/v1/models/invented:predict", {"instances": [1]})
    status, page = call("/monitoring/prometheus/metrics", raw=True)
    assert status == 200
    for line in (
        "# TYPE :tensorflow:serving:request_count counter",
        ':tensorflow:serving:request_count{model_name="digits",status="OK"}',
        "# TYPE :tensorflow:serving:request_latency histogram",
        ':tensorflow:serving:request_latency_bucket{model_name="digits",API="predict",entrypoint="REST",le="+Inf"}',
        ':tensorflow:serving:runtime_latency_count{model_name="digits",API="Predict",runtime="TF1"}',
    ):
        assert line in page
    assert "invented" not in page, "names that clients invent must not fill the metrics"
