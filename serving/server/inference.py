"""What Classify, Regress and MultiInference do on one servable: examples in, classes or values out.

With TF Serving's checks and messages (classifier.cc, regressor.cc, multi_inference.cc there). Raises Refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from serving import tensors
from serving.server.servable import DEFAULT_SIGNATURE, Servable, Signature
from serving.server.status import Code, Refused
from serving.stubs import classification_pb2, example_pb2, inference_pb2, regression_pb2

__all__ = [
    "Timed",
    "classify_on",
    "ignore",
    "multi_inference_on",
    "name_spec",
    "number_of_examples",
    "regress_on",
    "run",
]

_INPUTS, _OUTPUTS, _CLASSES, _SCORES = "inputs", "outputs", "classes", "scores"
_FLOAT = 1
_CLASSIFY, _REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"

Timed = Callable[[float], None]


def ignore(micros: float) -> None:
    """For callers that want no times."""


def run(signature: Signature, feeds: dict[str, np.ndarray], timed: Timed) -> dict[str, Any]:
    """Outputs by name; tells how many microseconds the run took."""
    start = time.perf_counter()
    outputs = signature.run(feeds)
    timed((time.perf_counter() - start) * 1e6)
    return outputs


def name_spec(spec: Any, servable: Servable, signature: Signature | None = None) -> None:
    """Say in an answer which model, version and signature gave it."""
    spec.name = servable.name
    spec.version.value = servable.version
    if signature is not None:
        spec.signature_name = signature.name


def _examples(model_input: Any) -> np.ndarray:
    """Serialized tf.train.Examples of an Input message, with the context merged into each."""
    kind = model_input.WhichOneof("kind")
    serialized: list[bytes] = []
    if kind == "example_list":
        serialized = [example.SerializeToString() for example in model_input.example_list.examples]
    elif kind == "example_list_with_context":
        listed = model_input.example_list_with_context
        for example in listed.examples:
            merged = example_pb2.Example()
            merged.CopyFrom(listed.context)
            for name, feature in example.features.feature.items():
                merged.features.feature[name].CopyFrom(feature)
            serialized.append(merged.SerializeToString())
    if not serialized:
        raise Refused(Code.INVALID_ARGUMENT, "Input is empty.")
    array = np.empty(len(serialized), object)
    array[:] = serialized
    return array


def _examples_signature(servable: Servable, spec: Any, kind: str) -> Signature:
    name = spec.signature_name or DEFAULT_SIGNATURE
    signature = servable.signatures.get(name)
    if signature is None:
        raise Refused(Code.INVALID_ARGUMENT, f"No signature was found with the name: {name}")
    if len(signature.inputs) != 1:
        raise Refused(Code.INVALID_ARGUMENT, "Expected one input Tensor.")
    if _INPUTS not in signature.inputs:
        raise Refused(Code.FAILED_PRECONDITION, f"No {kind} inputs found in SignatureDef: {signature.name}")
    return signature


def classify_on(servable: Servable, request: Any, timed: Timed = ignore) -> Any:
    """ClassificationResponse of a ClassificationRequest."""
    signature = _examples_signature(servable, request.model_spec, "classification")
    if len(signature.outputs) not in (1, 2):
        raise Refused(
            Code.INVALID_ARGUMENT, f"Expected one or two output Tensors, found {len(signature.outputs)}"
        )
    if not {_CLASSES, _SCORES} & set(signature.outputs):
        raise Refused(
            Code.FAILED_PRECONDITION,
            f'Expected classification signature outputs to contain at least one of "{_CLASSES}" or "{_SCORES}". '
            f"Signature was: {signature.name}",
        )
    examples = _examples(request.input)
    outputs = run(signature, {_INPUTS: examples}, timed)
    classes, scores = outputs.get(_CLASSES), outputs.get(_SCORES)
    _check_classes(classes, tensors.STRING, _CLASSES, len(examples))
    _check_classes(scores, _FLOAT, _SCORES, len(examples))
    if classes is not None and scores is not None and classes.shape[1] != scores.shape[1]:
        raise Refused(
            Code.INVALID_ARGUMENT,
            "Tensors class and score should match in dim_size(1). "
            f"Got {classes.shape[1]} vs. {scores.shape[1]}",
        )
    response = classification_pb2.ClassificationResponse()
    name_spec(response.model_spec, servable, signature)
    width = (scores if scores is not None else classes).shape[1]
    for row in range(len(examples)):
        classification = response.result.classifications.add()
        for column in range(width):
            one = classification.classes.add()
            if classes is not None:
                one.label = bytes(classes[row, column]).decode("utf-8", "replace")
            if scores is not None:
                one.score = scores[row, column]
    return response


def _check_classes(array: Any, dtype: int, name: str, examples: int) -> None:
    if array is None:
        return
    if array.ndim != 2:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"Expected Tensor shape: [batch_size num_classes] but got {list(array.shape)}",
        )
    got = tensors.datatype_of(array.dtype)
    if got != dtype:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"Expected {name} Tensor of {tensors.dtype_name(dtype)}. Got: {tensors.dtype_name(got)}",
        )
    if array.shape[0] != examples:
        raise Refused(
            Code.INVALID_ARGUMENT, f"Expected {name} output batch size of {examples}. Got: {array.shape[0]}"
        )


def regress_on(servable: Servable, request: Any, timed: Timed = ignore) -> Any:
    """RegressionResponse of a RegressionRequest."""
    signature = _examples_signature(servable, request.model_spec, "regression")
    if len(signature.outputs) != 1:
        raise Refused(Code.INVALID_ARGUMENT, "Expected one output Tensor.")
    if _OUTPUTS not in signature.outputs:
        raise Refused(
            Code.FAILED_PRECONDITION, f"No regression outputs found in SignatureDef: {signature.name}"
        )
    examples = _examples(request.input)
    values = run(signature, {_INPUTS: examples}, timed)[_OUTPUTS]
    if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] != 1):
        raise Refused(
            Code.INVALID_ARGUMENT,
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] "
            f"but got {list(values.shape)}",
        )
    if values.shape[0] != len(examples):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"Input batch size did not match output batch size: {len(examples)} vs. {values.shape[0]}",
        )
    if tensors.datatype_of(values.dtype) != _FLOAT:
        raise Refused(Code.INVALID_ARGUMENT, f"Expected output Tensor of DT_FLOAT.  Got: {values.dtype.name}")
    response = regression_pb2.RegressionResponse()
    name_spec(response.model_spec, servable, signature)
    for value in values.ravel().tolist():
        response.result.regressions.add(value=value)
    return response


def number_of_examples(model_input: Any) -> int:
    """How many examples an Input message brings."""
    kind = model_input.WhichOneof("kind")
    return len(getattr(model_input, kind).examples) if kind else 0


def multi_inference_on(servable: Servable, request: Any, timed: Timed = ignore) -> Any:
    """MultiInferenceResponse of a MultiInferenceRequest: several heads of one model on the same examples."""
    seen: dict[str, str] = {}
    for task in request.tasks:
        spec = task.model_spec
        if not spec.name:
            raise Refused(Code.INVALID_ARGUMENT, "Found ModelSpec with an empty model name.")
        if spec.name != servable.name:
            raise Refused(
                Code.INVALID_ARGUMENT,
                "All ModelSpecs in a MultiInferenceRequest must access the same model name.",
            )
        name = spec.signature_name or DEFAULT_SIGNATURE
        if name in seen:
            raise Refused(Code.INVALID_ARGUMENT, f"Duplicate evaluation of signature: {name}")
        if name not in servable.signatures:
            raise Refused(Code.INVALID_ARGUMENT, f"Requested signature not found in model graph: {name}")
        if task.method_name not in (_CLASSIFY, _REGRESS):
            raise Refused(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
        kind = "classification" if task.method_name == _CLASSIFY else "regression"
        seen[name] = _examples_signature(servable, spec, kind).inputs[_INPUTS].name
        if len(set(seen.values())) > 1:
            raise Refused(Code.INVALID_ARGUMENT, "Input tensor must be the same for all Signatures.")
    response = inference_pb2.MultiInferenceResponse()
    for task in request.tasks:
        result = response.results.add()
        if task.method_name == _CLASSIFY:
            part = classification_pb2.ClassificationRequest(model_spec=task.model_spec, input=request.input)
            answer = classify_on(servable, part, timed)
            result.classification_result.CopyFrom(answer.result)
        else:
            part = regression_pb2.RegressionRequest(model_spec=task.model_spec, input=request.input)
            answer = regress_on(servable, part, timed)
            result.regression_result.CopyFrom(answer.result)
        result.model_spec.CopyFrom(answer.model_spec)
    return response
