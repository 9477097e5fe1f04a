"""TF Serving's gRPC API as its own client sees it."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from serving.server.grpc_api import _guarded
from serving.server.protos import HealthCheckRequest, HealthCheckResponse
from serving.stubs import (
    classification_pb2,
    example_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)
from serving.tensors import from_proto, to_proto


@pytest.fixture(scope="module")
def channel(shared_server):
    with grpc.insecure_channel(f"127.0.0.1:{shared_server.port}") as channel:
        yield channel


@pytest.fixture(scope="module")
def predictions(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture(scope="module")
def models(channel):
    return model_service_pb2_grpc.ModelServiceStub(channel)


def _request(image=None, *, name="digits", signature="", version=None, label="", outputs=()):
    request = predict_pb2.PredictRequest(output_filter=outputs)
    request.model_spec.name = name
    request.model_spec.signature_name = signature
    if version is not None:
        request.model_spec.version.value = version
    elif label:
        request.model_spec.version_label = label
    if image is not None:
        to_proto(image, request.inputs["image"])
    return request


def _example(image):
    example = example_pb2.Example()
    example.features.feature["image"].bytes_list.value.append(image.tobytes())
    return example


@pytest.mark.parametrize(
    ("spec", "version"), [({}, 2), ({"version": 1}, 1), ({"label": "stable"}, 1), ({"label": "canary"}, 2)]
)
def test_predict_answers_as_tensorflow_does(predictions, images, expected, spec, version):
    response = predictions.Predict(_request(images, **spec))
    assert response.model_spec.name == "digits"
    assert response.model_spec.version.value == version
    assert response.model_spec.signature_name == "serving_default"
    assert sorted(response.outputs) == ["classes", "logits", "probabilities"]
    for name, proto in response.outputs.items():
        np.testing.assert_allclose(from_proto(proto), expected[version][name], rtol=1e-5)


def test_both_signatures_agree(predictions, images, expected):
    request = _request(signature="examples")
    to_proto(np.array([_example(i).SerializeToString() for i in images], object), request.inputs["examples"])
    request.model_spec.version.value = 1
    logits = from_proto(predictions.Predict(request).outputs["logits"])
    np.testing.assert_allclose(logits, expected[1]["logits"], rtol=1e-5)


def test_output_filter_asks_for_a_part(predictions, images):
    response = predictions.Predict(_request(images, outputs=["classes"]))
    assert list(response.outputs) == ["classes"]


def test_values_may_come_as_typed_fields_or_be_repeated(predictions):
    request = _request()
    proto = request.inputs["image"]
    to_proto(np.zeros((1, 8, 8, 1), np.uint8), proto, as_content=False)
    del proto.int_val[1:]
    assert from_proto(predictions.Predict(request).outputs["logits"]).tolist() == [[0.0] * 10]


BAD_PREDICTS = [
    (lambda i: _request(i, name=""), "INVALID_ARGUMENT", "ModelSpec has no name specified."),
    (lambda i: _request(i, name="no"), "NOT_FOUND", r"Servable not found for request: Latest\(no\)"),
    (lambda i: _request(i, version=9), "NOT_FOUND", r"Servable not found for request: Specific\(digits, 9\)"),
    (lambda i: _request(i, label="x"), "INVALID_ARGUMENT", "Unrecognized servable version label: x"),
    (lambda i: _request(i, signature="x"), "FAILED_PRECONDITION", 'Serving signature key "x" not found.'),
    (lambda i: _request(), "INVALID_ARGUMENT", "input size does not match signature: 0!=1"),
    (
        lambda i: _request(i, outputs=["x"]),
        "INVALID_ARGUMENT",
        "output tensor alias not found in signature: x",
    ),
    (lambda i: _request(i, outputs=["classes"] * 2), "INVALID_ARGUMENT", "duplicate output tensor alias"),
    (lambda i: _request(i.astype(np.float32)), "INVALID_ARGUMENT", "image to be uint8 but float is provided"),
    (
        lambda i: _request(i[:, :7]),
        "INVALID_ARGUMENT",
        r"shape \[4,7,8,1\] is not compatible .* \[\?,8,8,1\]",
    ),
    (lambda i: _request(i[0]), "INVALID_ARGUMENT", "not compatible"),
]


@pytest.mark.parametrize(
    ("make", "code", "message"), BAD_PREDICTS, ids=[message for _, _, message in BAD_PREDICTS]
)
def test_bad_predicts_get_tf_serving_s_codes(predictions, images, make, code, message):
    with pytest.raises(grpc.RpcError, match=message) as caught:
        predictions.Predict(make(images))
    assert caught.value.code().name == code


def test_wrong_inputs_name_what_is_missing_and_what_is_too_much(predictions, images):
    request = _request(images)
    request.inputs["extra"].CopyFrom(request.inputs["image"])
    with pytest.raises(grpc.RpcError, match=r"Sent extra: \{extra\}. Missing but required: \{\}"):
        predictions.Predict(request)
    wrong = _request()
    wrong.inputs["picture"].CopyFrom(request.inputs["image"])
    with pytest.raises(grpc.RpcError, match=r"alias not found in signature: picture.*\{image\}"):
        predictions.Predict(wrong)


@pytest.mark.parametrize("shape", [[1 << 40, 8, 8, 1], [1 << 62] * 4, [-5, 8, 8, 1], [1, 8, 8, 1]])
def test_tensors_that_lie_about_their_size_are_refused(predictions, shape):
    request = _request()
    proto = request.inputs["image"]
    proto.dtype = 4
    proto.tensor_content = b"123"
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    with pytest.raises(grpc.RpcError, match="tensor parsing error: image") as caught:
        predictions.Predict(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_too_large_a_message_is_refused_and_the_server_goes_on(predictions, images):
    with pytest.raises(grpc.RpcError, match="larger than max") as caught:
        predictions.Predict(_request(np.zeros((20000, 8, 8, 1), np.uint8)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert predictions.Predict(_request(images))


def test_errors_inside_the_graph_have_tensorflow_s_code(predictions):
    request = _request(signature="examples")
    to_proto(np.array([b"no example"], object), request.inputs["examples"])
    with pytest.raises(grpc.RpcError, match="Could not parse") as caught:
        predictions.Predict(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "kind",
    ["float16", "float64", "int8", "int32", "uint16", "uint32", "uint64", "bool", "bfloat16", "complex64"],
)
def test_every_type_goes_through(predictions, kind):
    import tensorflow as tf

    value = tf.cast(tf.constant([[1, 0], [2, 3]]), kind).numpy()
    request = _request(name="kinds", signature=kind)
    to_proto(value, request.inputs["x"])
    np.testing.assert_array_equal(from_proto(predictions.Predict(request).outputs["y"]), value)


def test_classify_and_regress(predictions, images, expected):
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name = "digits"
    request.model_spec.version.value = 1
    request.model_spec.signature_name = "classify"
    request.input.example_list.examples.extend(map(_example, images))
    result = predictions.Classify(request).result
    assert [c.label for c in result.classifications[0].classes] == [f"digit {i}" for i in range(10)]
    np.testing.assert_allclose(
        [c.score for c in result.classifications[3].classes], expected[1]["probabilities"][3], rtol=1e-5
    )
    regress = regression_pb2.RegressionRequest(model_spec=request.model_spec)
    regress.model_spec.signature_name = "regress"
    regress.input.example_list_with_context.context.CopyFrom(_example(images[0]))
    regress.input.example_list_with_context.examples.add()
    regress.input.example_list_with_context.examples.append(_example(images[1]))
    values = [r.value for r in predictions.Regress(regress).result.regressions]
    np.testing.assert_allclose(values, expected[1]["probabilities"][:2].max(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "signature", "examples", "code", "message"),
    [
        ("Classify", "nope", 1, "INVALID_ARGUMENT", "No signature was found with the name: nope"),
        ("Classify", "classify", 0, "INVALID_ARGUMENT", "Input is empty"),
        ("Classify", "examples", 1, "FAILED_PRECONDITION", "No classification inputs found"),
        ("Classify", "regress", 1, "FAILED_PRECONDITION", 'contain at least one of "classes"'),
        ("Regress", "classify", 1, "INVALID_ARGUMENT", "Expected one output Tensor"),
        ("Regress", "", 1, "FAILED_PRECONDITION", "No regression inputs found"),
    ],
)
def test_bad_classify_and_regress(predictions, images, method, signature, examples, code, message):
    kind = {
        "Classify": classification_pb2.ClassificationRequest,
        "Regress": regression_pb2.RegressionRequest,
    }[method]
    request = kind()
    request.model_spec.name = "digits"
    request.model_spec.signature_name = signature
    request.input.example_list.examples.extend(_example(image) for image in images[:examples])
    with pytest.raises(grpc.RpcError, match=message) as caught:
        getattr(predictions, method)(request)
    assert caught.value.code().name == code


def test_metadata_is_the_signatures(predictions):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "digits"
    response = predictions.GetModelMetadata(request)
    assert response.model_spec.version.value == 2
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert sorted(signatures.signature_def) == ["classify", "examples", "regress", "serving_default"]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (None, ["signature_def"], "Missing ModelSpec"),
        ("digits", [], "at least one metadata_field"),
        ("digits", ["weights"], "Metadata field weights is not supported"),
        ("no", ["signature_def"], "Servable not found"),
    ],
)
def test_bad_metadata_requests(predictions, name, fields, message):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
    if name:
        request.model_spec.name = name
    with pytest.raises(grpc.RpcError, match=message):
        predictions.GetModelMetadata(request)


def test_status_lists_versions_the_newest_first(models):
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "digits"
    versions = models.GetModelStatus(request).model_version_status
    available = get_model_status_pb2.ModelVersionStatus.AVAILABLE
    assert [(v.version, v.state, v.status.error_code) for v in versions] == [
        (2, available, 0),
        (1, available, 0),
    ]
    request.model_spec.version.value = 1
    assert [v.version for v in models.GetModelStatus(request).model_version_status] == [1]
    request.model_spec.version.value = 7
    with pytest.raises(grpc.RpcError, match="Could not find version 7 of model digits"):
        models.GetModelStatus(request)
    with pytest.raises(grpc.RpcError, match="Could not find any versions of model no"):
        models.GetModelStatus(get_model_status_pb2.GetModelStatusRequest(model_spec={"name": "no"}))
    with pytest.raises(grpc.RpcError, match="Missing ModelSpec"):
        models.GetModelStatus(get_model_status_pb2.GetModelStatusRequest())


def test_custom_configs_are_refused(models):
    custom = model_management_pb2.ReloadConfigRequest()
    custom.config.custom_model_config.SetInParent()
    with pytest.raises(grpc.RpcError, match="model_config_list") as caught:
        models.HandleReloadConfigRequest(custom)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_health_is_the_standard_service(channel):
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    for service in ("", "tensorflow.serving.PredictionService"):
        assert check(HealthCheckRequest(service=service)).status == 1
    with pytest.raises(grpc.RpcError) as caught:
        check(HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


class Aborted(Exception):
    pass


class Context:
    """The two methods of a gRPC context that calls use, with a time remaining of the test's choice."""

    def __init__(self, left):
        self._left = left

    def time_remaining(self):
        return self._left

    def abort(self, code, details):
        raise Aborted(code, details)


def test_work_whose_caller_has_gone_is_not_begun():
    with pytest.raises(Aborted) as caught:
        _guarded(Context(-0.1), pytest.fail, "the call was made")
    assert caught.value.args[0] is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_fault_of_ours_is_internal_and_keeps_its_details_for_the_log(caplog):
    def broken():
        raise KeyError("secret of the house")

    with pytest.raises(Aborted) as caught:
        _guarded(Context(None), broken)
    assert caught.value.args == (grpc.StatusCode.INTERNAL, "Internal error; the server's log says more")
    assert "secret of the house" in caplog.text


def test_bytes_that_are_no_message_are_refused(channel, predictions, images):
    call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    with pytest.raises(grpc.RpcError):
        call(_request(images).SerializeToString()[:-3])
    assert predictions.Predict(_request(images))
