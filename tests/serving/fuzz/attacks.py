"""Malformed requests as hypothesis strategies, each with the statuses that TF Serving gives it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from serving.stubs import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)
from serving.tensors import DTYPES, to_proto
from tests.serving.json_values import json_values

__all__ = ["Attack", "Grpc", "Http", "Raw", "attacks"]

PREDICT = "/tensorflow.serving.PredictionService/Predict"
# INTERNAL is grpc's own word for bytes that are no message; a fault of the server is told apart by its text.
ANY = frozenset(
    [
        "OK",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "FAILED_PRECONDITION",
        "UNIMPLEMENTED",
        "RESOURCE_EXHAUSTED",
        "INTERNAL",
    ]
)
ANY_HTTP = frozenset(["200", "400", "404", "413", "429", "501"])
ANY_RAW = ANY_HTTP | {"closed", "408", "405", "505"}
INVALID = frozenset({"INVALID_ARGUMENT"})


@dataclass(frozen=True)
class Grpc:
    """A message for a method, whatever its bytes are."""

    message: bytes
    method: str = PREDICT
    allowed: frozenset[str] = ANY


@dataclass(frozen=True)
class Http:
    """A request that HTTP can carry."""

    path: str
    body: bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    allowed: frozenset[str] = ANY_HTTP


@dataclass(frozen=True)
class Raw:
    """Bytes for a port, which may be no protocol at all."""

    data: bytes
    http: bool = True
    allowed: frozenset[str] = field(default=ANY_RAW)


Attack = Grpc | Http | Raw

_sizes = st.integers(0, 4) | st.integers(-3, 1 << 62) | st.sampled_from([1 << 31, 1 << 60, (1 << 63) - 1, -1])
_names = st.sampled_from(
    ["half_plus_two", "types", "types", "half_plus_two", "types", "named", "versions"]
) | st.sampled_from(["", "none", "a" * 300, "../x", "\u2603"])
_signatures = st.sampled_from(
    ["", "serving_default", "regress_x_to_y", "classify_x_to_y", "int32", "string", "bool", "none", "\0"]
)
_keys = st.sampled_from(["x", "tag", "signal", "sensor", "inputs", "", "y", "\u2603"])


def _good(name: str = "half_plus_two") -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest(model_spec={"name": name})
    to_proto(np.float32([1.0, 2.0]), request.inputs["x"])
    return request


@st.composite
def _wrong_by_one_thing(draw: st.DrawFn) -> Grpc:
    """A good request with one thing wrong, whose code is known."""
    request = _good()
    what = draw(
        st.sampled_from(
            ["dtype", "alias", "extra", "missing", "output", "model", "version", "label", "signature", "name"]
        )
    )
    allowed = INVALID
    if what == "dtype":
        request.inputs["x"].Clear()
        kind = draw(st.sampled_from([t for t in DTYPES.values() if t not in (np.float32, object)]))
        to_proto(np.ones(2, kind), request.inputs["x"])
    elif what == "alias":
        request.inputs["z"].CopyFrom(request.inputs["x"])
        del request.inputs["x"]
    elif what == "extra":
        request.inputs[draw(_keys.filter(lambda k: k != "x"))].CopyFrom(request.inputs["x"])
    elif what == "missing":
        del request.inputs["x"]
    elif what == "output":
        request.output_filter.append(draw(st.sampled_from(["z", "x", ""])))
    elif what == "model":
        request.model_spec.name = draw(st.text(min_size=1).filter(lambda n: n not in _MODELS))
        allowed = frozenset({"NOT_FOUND"})
    elif what == "version":
        request.model_spec.version.value = draw(
            st.integers(-(1 << 63), (1 << 63) - 1).filter(lambda v: v != 123)
        )
        allowed = frozenset({"NOT_FOUND"})
    elif what == "label":
        request.model_spec.version_label = draw(st.text())
    elif what == "signature":
        request.model_spec.signature_name = draw(st.text(min_size=1).filter(lambda s: s not in _SIGNATURES))
        allowed = frozenset({"FAILED_PRECONDITION"})
    else:
        request.model_spec.name = ""
    return Grpc(request.SerializeToString(), allowed=allowed)


_MODELS = ("half_plus_two", "half_plus_three", "versions", "named", "types")
_SIGNATURES = (
    "serving_default",
    "regress_x_to_y",
    "regress_x_to_y2",
    "regress_x2_to_y3",
    "classify_x_to_y",
)


@st.composite
def _lies_about_its_size(draw: st.DrawFn) -> Grpc:
    """Shapes that claim far more than there is, or less than nothing: refused before any memory is taken."""
    request = _good()
    proto = request.inputs["x"]
    giant = draw(st.sampled_from([1 << 24, 1 << 31, 1 << 40, 1 << 60, (1 << 63) - 1, -1, -2, -(1 << 63)]))
    sizes = draw(st.lists(st.integers(1, 3), max_size=3))
    sizes.insert(draw(st.integers(0, len(sizes))), giant)
    del proto.tensor_shape.dim[:]
    for size in sizes:
        proto.tensor_shape.dim.add(size=size)
    if draw(st.booleans()):
        proto.ClearField("tensor_content")
        proto.float_val.append(1.0)  # one value fills the whole shape, as the format has it
    return Grpc(request.SerializeToString(), allowed=INVALID)


@st.composite
def _any_tensors(draw: st.DrawFn) -> Grpc:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = draw(_names)
    request.model_spec.signature_name = draw(_signatures)
    if draw(st.integers(0, 9)) == 0:
        request.model_spec.version.value = draw(st.integers(-2, 124))
    for key in draw(st.just(["x"]) | st.lists(_keys, max_size=3)):
        proto = request.inputs[key]
        proto.dtype = draw(st.integers(0, 30) | st.sampled_from([1, 3, 7, 9, 101]))
        proto.tensor_shape.unknown_rank = draw(st.integers(0, 9)) == 0
        for size in draw(st.lists(_sizes, max_size=5) | st.just([1] * 300)):
            proto.tensor_shape.dim.add(size=size)
        proto.tensor_content = draw(st.binary(max_size=64))
        proto.float_val.extend(draw(st.lists(st.floats(width=32), max_size=4)))
        proto.int_val.extend(draw(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)))
        proto.half_val.extend(draw(st.lists(st.integers(0, 70000), max_size=2)))
        proto.string_val.extend(draw(st.lists(st.binary(max_size=8), max_size=4)))
        proto.scomplex_val.extend(draw(st.lists(st.floats(width=32), max_size=3)))
    request.output_filter.extend(draw(st.lists(st.sampled_from(["y", "x", ""]), max_size=3)))
    return Grpc(request.SerializeToString())


@st.composite
def _nearly_good(draw: st.DrawFn) -> Grpc:
    """Well-formed tensors of odd shapes and values, which reach the graph: alone, or beside one that does not fit."""
    kind = draw(st.sampled_from(["float32", "int32", "int64", "uint8", "bool", "string"]))
    shape = draw(st.lists(st.integers(0, 4), max_size=6))
    if kind == "string":
        array = np.full(shape, draw(st.binary(max_size=20)), object)
    else:
        array = np.full(shape, draw(st.integers(0, 100)), kind)
    request = predict_pb2.PredictRequest(model_spec={"name": "types", "signature_name": kind})
    to_proto(array, request.inputs["x"], as_content=draw(st.booleans()))
    if draw(st.integers(0, 4)) == 0:
        request.model_spec.signature_name = draw(_signatures)
    return Grpc(request.SerializeToString())


@st.composite
def _examples(draw: st.DrawFn) -> Grpc:
    kind, method = draw(
        st.sampled_from(
            [
                (classification_pb2.ClassificationRequest, "Classify"),
                (regression_pb2.RegressionRequest, "Regress"),
                (inference_pb2.MultiInferenceRequest, "MultiInference"),
            ]
        )
    )
    request = kind()
    if method == "MultiInference":
        for _ in range(draw(st.integers(0, 3))):
            task = request.tasks.add(
                method_name=draw(st.sampled_from(["tensorflow/serving/regress", "x", ""]))
            )
            task.model_spec.name = draw(_names)
            task.model_spec.signature_name = draw(_signatures)
    else:
        request.model_spec.name = draw(_names)
        request.model_spec.signature_name = draw(_signatures)
    listed = request.input.example_list if draw(st.booleans()) else request.input.example_list_with_context
    for _ in range(draw(st.integers(0, 3))):
        feature = listed.examples.add().features.feature[draw(_keys)]
        getattr(feature, draw(st.sampled_from(["float_list", "int64_list", "bytes_list"]))).SetInParent()
        feature.float_list.value.extend(draw(st.lists(st.floats(width=32), max_size=3)))
    return Grpc(request.SerializeToString(), f"/tensorflow.serving.PredictionService/{method}")


@st.composite
def _damaged(draw: st.DrawFn) -> Grpc:
    """Good bytes with some changed, cut off, or doubled."""
    data = bytearray(_good().SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    data = data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=10))
    return Grpc(bytes(data))


_METHODS = (
    PREDICT,
    "/tensorflow.serving.PredictionService/Classify",
    "/tensorflow.serving.PredictionService/GetModelMetadata",
    "/tensorflow.serving.ModelService/GetModelStatus",
    "/tensorflow.serving.SessionService/SessionRun",
    "/grpc.health.v1.Health/Check",
    "/x/y",
)


@st.composite
def _other_messages(draw: st.DrawFn) -> Grpc:
    if draw(st.booleans()):
        return Grpc(draw(st.binary(max_size=200)), draw(st.sampled_from(_METHODS)))
    if draw(st.booleans()):
        metadata = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=draw(st.lists(st.text())))
        metadata.model_spec.name = draw(_names)
        return Grpc(metadata.SerializeToString(), _METHODS[2])
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = draw(_names)
    status.model_spec.version.value = draw(st.integers(-5, 5))
    return Grpc(status.SerializeToString(), _METHODS[3])


@st.composite
def _bad_configs(draw: st.DrawFn) -> Grpc:
    """Configs that must be refused as a whole, so that what is served stays."""
    request = model_management_pb2.ReloadConfigRequest()
    entries = request.config.model_config_list.config
    what = draw(st.sampled_from(["nameless", "pathless", "twice", "platform", "custom"]))
    if what == "custom":
        request.config.custom_model_config.type_url = draw(st.text())
    else:
        entry = entries.add(name="half_plus_two", base_path="/none", model_platform="tensorflow")
        if what == "nameless":
            entry.name = ""
        elif what == "pathless":
            entry.base_path = ""
        elif what == "twice":
            entries.add().CopyFrom(entry)
        else:
            entry.model_platform = draw(st.text(min_size=1).filter(lambda p: p != "tensorflow"))
    return Grpc(
        request.SerializeToString(),
        "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
        frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION"}),
    )


_values = json_values(_keys)
_documents = st.dictionaries(
    st.sampled_from(["instances", "inputs", "signature_name", "examples", "context"]), _values, max_size=3
) | st.builds(
    lambda signature, key, value: {"signature_name": signature, key: value},
    _signatures,
    st.sampled_from(["inputs", "instances", "examples"]),
    _values,
)
_bodies = (
    st.lists(st.floats(width=32), min_size=1).map(lambda values: json.dumps({"instances": values}).encode())
    | (_documents | _values).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=60)
    | st.text('[]{}":,0123456789.eE-tfnu\\dD8 ', max_size=60).map(str.encode)
    | st.sampled_from(
        [
            b'{"instances": ' + b"[" * 100_000,
            b'{"instances": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
            b'{"a":' * 20_000,
            b'{"instances": [1e999999999]}',
            b'{"instances": [' + b"9" * 10_000 + b"]}",
            b'{"instances": ["\\ud800"]}',
            b'{"signature_name": "string", "instances": ["\\udfff\\u0000"]}',
            b'{"signature_name": "string", "instances": ["\xff\xfe"]}',
            b'\xef\xbb\xbf{"instances": [1.0]}',
            b" " * 3_000_000,
            b" " * 9_000_000,
        ]
    )
)
_paths = st.builds(
    lambda name, version, method: f"/v1/models/{name}{version}{method}",
    st.sampled_from(["half_plus_two", "types", "named"])
    | st.sampled_from(["half_plus_two", "types", "none", "%2e%2e", "%zz", "%00", "a" * 3000]),
    st.just("")
    | st.sampled_from(["/versions/123", "/versions/9", "/versions/" + "9" * 30, "/labels/x", "/labels/%ff"]),
    st.sampled_from([":predict", ":predict", ":classify", ":regress"])
    | st.sampled_from([":x", "", "/metadata", "/", "?x=1", ":predict?x"]),
)
_http = st.builds(
    Http,
    _paths,
    _bodies,
    st.just("POST") | st.sampled_from(["POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    st.sampled_from(
        [
            (),
            (("Content-Encoding", "gzip"),),
            (("Content-Type", "text/plain"),),
            (("Authorization", "Bearer x"),),
            (("Expect", "100-continue"),),
        ]
    ),
)


@st.composite
def _raw_http(draw: st.DrawFn) -> Raw:
    head = b"POST /v1/models/half_plus_two:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n"
    good = head + b'{"instances": [2.0]}'
    kind = draw(st.sampled_from(["damaged", "bytes", "framing", "pipelined"]))
    if kind == "bytes":
        return Raw(draw(st.binary(max_size=300)))
    if kind == "pipelined":
        return Raw(good * draw(st.integers(2, 30)))
    if kind == "framing":
        header = draw(
            st.sampled_from(
                [
                    b"Content-Length: -1",
                    b"Content-Length: 99999999999999999999",
                    b"Content-Length: 5\r\nContent-Length: 6",
                    b"Transfer-Encoding: chunked",
                    b"Transfer-Encoding: chunked\r\nContent-Length: 3",
                    b"Upgrade: h2c\r\nConnection: upgrade",
                    b"Upgrade: websocket\r\nConnection: upgrade",
                    b"X: " + b"a" * 200_000,
                    b"\x00: x",
                    b"Expect: 100-continue\r\nContent-Length: 10",
                ]
            )
        )
        body = draw(
            st.sampled_from(
                [b"", b"zz\r\n", b"ffffffffffffffff\r\nx", b"-1\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n"]
            )
        )
        target = draw(
            st.sampled_from([b"/v1/models/half_plus_two:predict", b"*", b"http://x/v1", b"\xff", b""])
        )
        return Raw(b"POST " + target + b" HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n" + body)
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return Raw(bytes(data[: draw(st.integers(0, len(data)))]))


@st.composite
def _raw_grpc(draw: st.DrawFn) -> Raw:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frames = b""
    for _ in range(draw(st.integers(0, 4))):
        payload = draw(st.binary(max_size=40))
        length = draw(st.just(len(payload)) | st.integers(0, (1 << 24) - 1))
        frames += struct.pack(">I", length)[1:]
        frames += bytes([draw(st.integers(0, 12)), draw(st.integers(0, 255))])
        frames += struct.pack(">I", draw(st.integers(0, 3) | st.integers(0, (1 << 32) - 1))) + payload
    return Raw((preface if draw(st.integers(0, 4)) else b"") + frames, http=False)


attacks: dict[str, st.SearchStrategy[Attack]] = {
    "one thing wrong": _wrong_by_one_thing(),
    "lies about its size": _lies_about_its_size(),
    "any tensors": _any_tensors(),
    "nearly good": _nearly_good(),
    "examples": _examples(),
    "damaged messages": _damaged(),
    "other messages": _other_messages(),
    "bad configs": _bad_configs(),
    "http": _http,
    "raw http": _raw_http(),
    "raw http2": _raw_grpc(),
}
