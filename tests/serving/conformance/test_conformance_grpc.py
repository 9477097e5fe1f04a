"""The gRPC API as its .proto files and TF Serving's own tests of a running server describe it.

Each test names the file of tensorflow_serving it is made from; texts of errors are those of predict_util.cc,
classifier.cc, regressor.cc, multi_inference.cc, get_model_metadata_impl.cc and get_model_status_impl.cc.
"""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from serving.stubs import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    input_pb2,
    predict_pb2,
    regression_pb2,
)
from serving.tensors import from_proto, to_proto

CLASSIFY, REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"


def _predict(name="half_plus_two", x=(2.0,), **spec):
    request = predict_pb2.PredictRequest(model_spec={"name": name, **spec})
    if x is not None:
        to_proto(np.float32(x), request.inputs["x"])
    return request


def _input(*values, key="x"):
    message = input_pb2.Input()
    for value in values:
        example = message.example_list.examples.add()
        example.features.feature[key].float_list.value.append(value)
    return message


def _refused(call, request, code, message):
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    assert (caught.value.code().name, message in caught.value.details()) == (code, True), (
        caught.value.details()
    )


# ---- model_servers/tensorflow_model_server_test.py, against half_plus_two


def test_get_model_status(models):
    """testGetModelStatus."""
    request = get_model_status_pb2.GetModelStatusRequest(model_spec={"name": "half_plus_two"})
    (status,) = models.GetModelStatus(request, timeout=30).model_version_status
    assert (status.version, status.status.error_code) == (123, 0)
    assert status.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE


def test_classify(predictions):
    """testClassify."""
    request = classification_pb2.ClassificationRequest(
        model_spec={"name": "half_plus_two", "signature_name": "classify_x_to_y"}, input=_input(2.0)
    )
    response = predictions.Classify(request, timeout=30)
    ((one,),) = [c.classes for c in response.result.classifications]
    assert (one.label, one.score) == ("", 3.0)
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("half_plus_two", 123, "classify_x_to_y")


def test_regress(predictions):
    """testRegress."""
    request = regression_pb2.RegressionRequest(
        model_spec={"name": "half_plus_two", "signature_name": "regress_x_to_y"}, input=_input(2.0, 4.0)
    )
    response = predictions.Regress(request, timeout=30)
    assert [r.value for r in response.result.regressions] == [3.0, 4.0]
    assert response.model_spec.signature_name == "regress_x_to_y"


def test_multi_inference(predictions):
    """testMultiInference."""
    request = inference_pb2.MultiInferenceRequest(input=_input(2.0))
    for signature, method in (("regress_x_to_y", REGRESS), ("classify_x_to_y", CLASSIFY)):
        request.tasks.add(
            model_spec={"name": "half_plus_two", "signature_name": signature}, method_name=method
        )
    first, second = predictions.MultiInference(request, timeout=30).results
    assert first.regression_result.regressions[0].value == 3.0
    assert second.classification_result.classifications[0].classes[0].score == 3.0
    for result, signature in ((first, "regress_x_to_y"), (second, "classify_x_to_y")):
        spec = result.model_spec
        assert (spec.name, spec.version.value, spec.signature_name) == ("half_plus_two", 123, signature)


@pytest.mark.parametrize("specify_output", [True, False])
def test_predict(predictions, specify_output):
    """testPredict; without an output filter every output comes."""
    request = _predict()
    if specify_output:
        request.output_filter.append("y")
    response = predictions.Predict(request, timeout=30)
    assert list(response.outputs) == ["y"]
    assert response.outputs["y"].dtype == 1
    assert from_proto(response.outputs["y"]).tolist() == [3.0]
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("half_plus_two", 123, "serving_default")


# ---- apis/model.proto: ModelSpec


@pytest.mark.parametrize(
    ("spec", "b"),
    [
        ({}, 3.0),
        ({"version": {"value": 1}}, 2.0),
        ({"version": {"value": 2}}, 3.0),
        ({"version_label": "stable"}, 2.0),
        ({"version_label": "canary"}, 3.0),
        ({"signature_name": "serving_default"}, 3.0),
    ],
)
def test_version_choice(predictions, spec, b):
    """ "If unspecified, the latest version"; version_label; signature_name "will default to serving_default"."""
    response = predictions.Predict(_predict("versions", [0.0], **spec), timeout=30)
    assert from_proto(response.outputs["y"]).tolist() == [b]
    assert response.model_spec.version.value == int(b) - 1


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        ({"name": "none"}, "NOT_FOUND", "Servable not found for request: Latest(none)"),
        (
            {"name": "versions", "version": {"value": 9}},
            "NOT_FOUND",
            "Servable not found for request: Specific(versions, 9)",
        ),
        (
            {"name": "versions", "version": {"value": -1}},
            "NOT_FOUND",
            "Servable not found for request: Specific(versions, -1)",
        ),
        (
            {"name": "versions", "version_label": "none"},
            "INVALID_ARGUMENT",
            "Unrecognized servable version label: none",
        ),
        ({"name": ""}, "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        (
            {"name": "half_plus_two", "signature_name": "none"},
            "FAILED_PRECONDITION",
            'Serving signature key "none" not found.',
        ),
    ],
)
def test_model_specs_that_name_nothing(predictions, spec, code, message):
    _refused(predictions.Predict, _predict(**spec), code, message)


# ---- servables/tensorflow/predict_util.cc and its test


def test_inputs_must_be_those_of_the_signature(predictions):
    _refused(
        predictions.Predict,
        _predict(x=None),
        "INVALID_ARGUMENT",
        "input size does not match signature: 0!=1 len({}) != len({x}). "
        "Sent extra: {}. Missing but required: {x}.",
    )
    request = _predict()
    request.inputs["z"].CopyFrom(request.inputs["x"])
    _refused(
        predictions.Predict,
        request,
        "INVALID_ARGUMENT",
        "input size does not match signature: 2!=1 len({x,z}) != len({x}). "
        "Sent extra: {z}. Missing but required: {}.",
    )
    request = _predict(x=None)
    to_proto(np.float32([1]), request.inputs["z"])
    _refused(
        predictions.Predict,
        request,
        "INVALID_ARGUMENT",
        "input tensor alias not found in signature: z. Inputs expected to be in the set {x}.",
    )


def test_output_filter_must_name_outputs_once(predictions):
    request = _predict()
    request.output_filter.append("z")
    _refused(
        predictions.Predict,
        request,
        "INVALID_ARGUMENT",
        "output tensor alias not found in signature: z Outputs expected to be in the set {y}.",
    )
    request.output_filter[:] = ["y", "y"]
    _refused(predictions.Predict, request, "INVALID_ARGUMENT", "duplicate output tensor alias: y")


def test_output_filter_picks(predictions):
    request = predict_pb2.PredictRequest(model_spec={"name": "named"})
    to_proto([b"a"], request.inputs["tag"])
    to_proto(np.int64([1]), request.inputs["signal"])
    to_proto(np.int64([[2, 3]]), request.inputs["sensor"])
    request.output_filter.extend(["sensor_out", "tag_out"])
    response = predictions.Predict(request, timeout=30)
    assert sorted(response.outputs) == ["sensor_out", "tag_out"]
    assert from_proto(response.outputs["tag_out"]).tolist() == [b"a"]


def test_tensors_that_can_not_be_parsed(predictions):
    request = _predict()
    request.inputs["x"].tensor_content = b"123"
    request.inputs["x"].ClearField("float_val")
    _refused(predictions.Predict, request, "INVALID_ARGUMENT", "tensor parsing error: x")


def test_a_wrong_type_is_told(predictions):
    """TensorFlow's own word for what does not fit: the REST API converts, gRPC does not."""
    request = _predict()
    request.inputs["x"].Clear()
    to_proto(np.int64([1]), request.inputs["x"])
    _refused(predictions.Predict, request, "INVALID_ARGUMENT", "to be float but int64 is provided")


def test_both_ways_of_writing_values_are_read(predictions):
    """framework/tensor.proto: tensor_content or the typed fields, the last value repeated."""
    request = _predict(x=None)
    proto = request.inputs["x"]
    proto.dtype = 1
    proto.tensor_shape.dim.add(size=3)
    proto.float_val.append(2.0)
    assert from_proto(predictions.Predict(request, timeout=30).outputs["y"]).tolist() == [3.0, 3.0, 3.0]
    proto.ClearField("float_val")
    proto.tensor_content = np.float32([0, 2, 4]).tobytes()
    assert from_proto(predictions.Predict(request, timeout=30).outputs["y"]).tolist() == [2.0, 3.0, 4.0]


# ---- servables/tensorflow/classifier_test.cc, regressor_test.cc


@pytest.mark.parametrize(
    ("signature", "examples", "code", "message"),
    [
        ("classify_x_to_y", (), "INVALID_ARGUMENT", "Input is empty"),
        ("none", (1.0,), "INVALID_ARGUMENT", "No signature was found with the name: none"),
        ("serving_default", (1.0,), "FAILED_PRECONDITION", "No classification inputs found in SignatureDef"),
        (
            "regress_x_to_y",
            (1.0,),
            "FAILED_PRECONDITION",
            'Expected classification signature outputs to contain at least one of "classes" or "scores".',
        ),
    ],
)
def test_bad_classifications(predictions, signature, examples, code, message):
    request = classification_pb2.ClassificationRequest(
        model_spec={"name": "half_plus_two", "signature_name": signature}, input=_input(*examples)
    )
    _refused(predictions.Classify, request, code, message)


@pytest.mark.parametrize(
    ("signature", "examples", "code", "message"),
    [
        ("regress_x_to_y", (), "INVALID_ARGUMENT", "Input is empty"),
        ("none", (1.0,), "INVALID_ARGUMENT", "No signature was found with the name: none"),
        ("serving_default", (1.0,), "FAILED_PRECONDITION", "No regression inputs found in SignatureDef"),
        ("classify_x_to_y", (1.0,), "FAILED_PRECONDITION", "No regression outputs found in SignatureDef"),
    ],
)
def test_bad_regressions(predictions, signature, examples, code, message):
    request = regression_pb2.RegressionRequest(
        model_spec={"name": "half_plus_two", "signature_name": signature}, input=_input(*examples)
    )
    _refused(predictions.Regress, request, code, message)


def test_context_is_merged_into_every_example(predictions):
    """apis/input.proto, ExampleListWithContext."""
    request = regression_pb2.RegressionRequest(
        model_spec={"name": "half_plus_two", "signature_name": "regress_x_to_y"}
    )
    listed = request.input.example_list_with_context
    listed.context.features.feature["x"].float_list.value.append(2.0)
    listed.examples.add()
    listed.examples.add().features.feature["x2"].float_list.value.append(9.0)
    values = [r.value for r in predictions.Regress(request, timeout=30).result.regressions]
    assert values == [3.0, 3.0]


def test_an_example_that_lacks_a_feature(predictions):
    request = regression_pb2.RegressionRequest(
        model_spec={"name": "half_plus_two", "signature_name": "regress_x_to_y"}, input=_input(1.0, key="z")
    )
    _refused(predictions.Regress, request, "INVALID_ARGUMENT", "Feature: x (data type: float) is required")


# ---- servables/tensorflow/multi_inference_test.cc


@pytest.mark.parametrize(
    ("tasks", "examples", "code", "message"),
    [
        ([], (1.0,), "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        ([("half_plus_two", "regress_x_to_y", REGRESS)], (), "INVALID_ARGUMENT", "Input is empty"),
        ([("half_plus_two", "none", REGRESS)], (1.0,), "INVALID_ARGUMENT", "signature not found"),
        (
            [("half_plus_two", "regress_x_to_y", REGRESS), ("none", "regress_x_to_y", REGRESS)],
            (1.0,),
            "INVALID_ARGUMENT",
            "must access the same model name",
        ),
        (
            [("half_plus_two", "regress_x_to_y", REGRESS), ("", "regress_x_to_y", REGRESS)],
            (1.0,),
            "INVALID_ARGUMENT",
            "Found ModelSpec with an empty model name.",
        ),
        (
            [("half_plus_two", "regress_x_to_y", REGRESS)] * 2,
            (1.0,),
            "INVALID_ARGUMENT",
            "Duplicate evaluation of signature: regress_x_to_y",
        ),
        (
            [("half_plus_two", "serving_default", "tensorflow/serving/predict")],
            (1.0,),
            "UNIMPLEMENTED",
            "Unsupported signature",
        ),
        (
            [("half_plus_two", "regress_x_to_y", REGRESS), ("half_plus_two", "regress_x2_to_y3", REGRESS)],
            (1.0,),
            "INVALID_ARGUMENT",
            "Input tensor must be the same",
        ),
    ],
)
def test_bad_multi_inference(predictions, tasks, examples, code, message):
    request = inference_pb2.MultiInferenceRequest(input=_input(*examples))
    for name, signature, method in tasks:
        request.tasks.add(model_spec={"name": name, "signature_name": signature}, method_name=method)
    _refused(predictions.MultiInference, request, code, message)


def test_several_regressions_at_once(predictions):
    """MultipleValidRegressSignaturesTest."""
    request = inference_pb2.MultiInferenceRequest(input=_input(2.0))
    for signature in ("regress_x_to_y", "regress_x_to_y2"):
        request.tasks.add(
            model_spec={"name": "half_plus_two", "signature_name": signature}, method_name=REGRESS
        )
    results = predictions.MultiInference(request, timeout=30).results
    assert [r.regression_result.regressions[0].value for r in results] == [3.0, 4.0]


# ---- apis/get_model_metadata.proto, get_model_metadata_impl.cc


def test_metadata(predictions):
    request = get_model_metadata_pb2.GetModelMetadataRequest(
        model_spec={"name": "half_plus_two"}, metadata_field=["signature_def"]
    )
    response = predictions.GetModelMetadata(request, timeout=30)
    assert (response.model_spec.name, response.model_spec.version.value) == ("half_plus_two", 123)
    found = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(found)
    assert found.signature_def["classify_x_to_y"].method_name == CLASSIFY


@pytest.mark.parametrize(
    ("name", "fields", "code", "message"),
    [
        (None, ["signature_def"], "INVALID_ARGUMENT", "Missing ModelSpec"),
        (
            "half_plus_two",
            [],
            "INVALID_ARGUMENT",
            "GetModelMetadataRequest must specify at least one metadata_field",
        ),
        ("half_plus_two", ["weights"], "INVALID_ARGUMENT", "is not supported"),
        ("none", ["signature_def"], "NOT_FOUND", "Servable not found for request: Latest(none)"),
    ],
)
def test_bad_metadata_requests(predictions, name, fields, code, message):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
    if name:
        request.model_spec.name = name
    _refused(predictions.GetModelMetadata, request, code, message)


# ---- get_model_status_impl.cc


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        (None, "INVALID_ARGUMENT", "Missing ModelSpec"),
        ({"name": "none"}, "NOT_FOUND", "Could not find any versions of model none"),
        (
            {"name": "versions", "version": {"value": 9}},
            "NOT_FOUND",
            "Could not find version 9 of model versions",
        ),
    ],
)
def test_bad_status_requests(models, spec, code, message):
    request = get_model_status_pb2.GetModelStatusRequest(model_spec=spec)
    _refused(models.GetModelStatus, request, code, message)


# ---- what is no API


def test_unknown_methods_are_unimplemented(channel):
    _refused(channel.unary_unary("/tensorflow.serving.PredictionService/Explain"), b"", "UNIMPLEMENTED", "")


def test_bytes_that_are_no_request(channel, predictions):
    call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    with pytest.raises(grpc.RpcError) as caught:
        call(_predict().SerializeToString()[:-3], timeout=30)
    assert caught.value.code().name in ("INTERNAL", "INVALID_ARGUMENT")
    assert predictions.Predict(_predict(), timeout=30)
