"""Whatever comes in, an answer with a sane code goes out, and the server serves on."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.server.rest import RestApp
from serving.stubs import predict_pb2
from serving.tensors import to_proto

from .json_values import json_values

fuzz = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
names = st.sampled_from(["digits", "kinds", "", "no"])
signatures = st.sampled_from(
    ["", "serving_default", "scalar", "upper", "examples", "int8", "bool", "bfloat16", "x"]
)
keys = st.sampled_from(["image", "x", "names", "numbers", "inputs", "examples", ""])


@pytest.fixture(scope="module")
def predict(shared_server):
    """Sends bytes as they are to Predict."""
    with grpc.insecure_channel(f"127.0.0.1:{shared_server.port}") as channel:
        yield channel.unary_unary("/tensorflow.serving.PredictionService/Predict")


@pytest.fixture(scope="module")
def still_serves(predict, images):
    good = predict_pb2.PredictRequest(model_spec={"name": "digits"})
    to_proto(images, good.inputs["image"])

    def check():
        assert predict_pb2.PredictResponse.FromString(predict(good.SerializeToString())).outputs

    yield check
    check()


def _answer(predict, data):
    """An answer, or an error that is the request's: not a fault of ours, and nothing that hangs or dies."""
    code = details = None
    try:
        predict(data, timeout=20)
    except grpc.RpcError as e:
        code, details = e.code(), e.details() or ""
    # grpc says INTERNAL for bytes that are no message; a fault of ours would be INTERNAL with our own words.
    assert "server's log" not in (details or "")
    assert code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


@st.composite
def tensors(draw):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = draw(names)
    request.model_spec.signature_name = draw(signatures)
    if draw(st.booleans()):
        request.model_spec.version.value = draw(
            st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([1, 2, 5])
        )
    elif draw(st.booleans()):
        request.model_spec.version_label = draw(st.sampled_from(["stable", "canary", "?"]))
    for key in draw(st.lists(keys, max_size=3)):
        proto = request.inputs[key]
        proto.dtype = draw(st.integers(0, 25) | st.sampled_from([1, 4, 7]))
        proto.tensor_shape.unknown_rank = draw(st.integers(0, 9)) == 0
        for size in draw(st.lists(st.integers(-2, 1 << 62) | st.integers(0, 8), max_size=5)):
            proto.tensor_shape.dim.add(size=size)
        proto.tensor_content = draw(st.binary(max_size=64) | st.just(bytes(256)))
        proto.float_val.extend(draw(st.lists(st.floats(width=32), max_size=4)))
        proto.int_val.extend(draw(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)))
        proto.half_val.extend(draw(st.lists(st.integers(0, 70000), max_size=2)))
        proto.string_val.extend(draw(st.lists(st.binary(max_size=8), max_size=4)))
    request.output_filter.extend(draw(st.lists(st.sampled_from(["classes", "y", "x"]), max_size=2)))
    return request.SerializeToString()


@fuzz
@given(data=tensors())
def test_any_tensors(predict, still_serves, data):
    _answer(predict, data)


@fuzz
@given(data=st.binary(max_size=200))
def test_any_bytes(predict, still_serves, data):
    _answer(predict, data)


@fuzz
@given(cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_good_request_that_was_damaged(predict, still_serves, images, cut, at, byte):
    good = predict_pb2.PredictRequest(model_spec={"name": "digits"})
    to_proto(images, good.inputs["image"])
    data = bytearray(good.SerializeToString())
    data[at % len(data)] = byte
    _answer(predict, bytes(data[: len(data) - cut % len(data)]))


values = json_values(keys)
documents = st.dictionaries(
    st.sampled_from(["instances", "inputs", "signature_name", "examples", "context"]), values, max_size=3
) | st.builds(lambda name, value: {"signature_name": name, "inputs": value}, signatures, values)


@fuzz
@given(name=names, method=st.sampled_from(["predict", "classify", "regress"]), document=documents | values)
def test_any_json(shared_server, still_serves, name, method, document):
    body = json.dumps(document).encode()
    status, answer = _rest(shared_server).respond("POST", f"/v1/models/{name}:{method}", body)
    assert status in (200, 400, 404, 501), (status, answer)
    assert isinstance(json.loads(answer), dict)


@fuzz
@given(body=st.binary(max_size=60) | st.text('[]{}":,0123456789.eE-tfn "', max_size=40).map(str.encode))
def test_any_body(shared_server, still_serves, body):
    status, _ = _rest(shared_server).respond("POST", "/v1/models/kinds:predict", body)
    assert status in (200, 400)


@fuzz
@given(
    method=st.sampled_from(["GET", "POST", "PUT"]),
    path=st.lists(
        st.sampled_from(
            [
                "/v1",
                "/models",
                "/digits",
                "/versions",
                "/1",
                "/labels",
                "/stable",
                ":predict",
                "/metadata",
                "%",
                "/",
                "%00",
                "/9" * 30,
            ]
        ),
        max_size=8,
    ).map("".join),
)
def test_any_path(shared_server, method, path):
    status, answer = _rest(shared_server).respond(method, path, b"{}")
    assert status in (200, 400, 404)
    assert json.loads(answer)


def _rest(server):
    if not hasattr(server, "fuzzed"):
        server.fuzzed = RestApp(server.calls)
    return server.fuzzed


def test_deep_and_wide_json(shared_server):
    rest = _rest(shared_server)
    for body in (
        b'{"inputs": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"signature_name": "upper", "inputs": ' + b"[" * 900 + b'"a"' + b"]" * 900 + b"}",
        json.dumps({"signature_name": "scalar", "inputs": np.zeros(50000).tolist()}).encode(),
    ):
        assert rest.respond("POST", "/v1/models/kinds:predict", body)[0] in (200, 400)
