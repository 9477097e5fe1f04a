"""What TF Serving's methods do, free of transport: messages in, messages out, Refused on anything else.

The `*_on` functions work on one servable (warm-up uses them too); `Calls` finds the servable, counts and times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from serving import tensors
from serving.server.flags import Options
from serving.server.metrics import Metrics
from serving.server.servable import DEFAULT_SIGNATURE, Servable, Signature
from serving.server.status import Code, Refused
from serving.stubs import (
    classification_pb2,
    example_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)

if TYPE_CHECKING:
    from serving.server.manager import ModelManager

__all__ = ["Calls", "Timed", "classify_on", "predict_on", "regress_on"]

_INPUTS, _OUTPUTS, _CLASSES, _SCORES = "inputs", "outputs", "classes", "scores"
_FLOAT = 1

Timed = Callable[[float], None]


def _ignore(micros: float) -> None:
    pass


def _run(signature: Signature, feeds: dict[str, np.ndarray], timed: Timed) -> dict[str, Any]:
    start = time.perf_counter()
    outputs = signature.run(feeds)
    timed((time.perf_counter() - start) * 1e6)
    return outputs


def predict_on(servable: Servable, request: Any, options: Options, timed: Timed = _ignore) -> Any:
    """PredictResponse of a PredictRequest."""
    signature = servable.signature(request.model_spec.signature_name)
    feeds = _feeds(signature, request, options.max_message_bytes)
    wanted = list(request.output_filter) or list(signature.outputs)
    if len(set(wanted)) != len(wanted):
        twice = next(alias for alias in wanted if wanted.count(alias) > 1)
        raise Refused(Code.INVALID_ARGUMENT, f"duplicate output tensor alias: {twice}")
    for alias in wanted:
        if alias not in signature.outputs:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"output tensor alias not found in signature: {alias} "
                f"Outputs expected to be in the set {{{','.join(signature.outputs)}}}.",
            )
    outputs = _run(signature, feeds, timed)
    response = predict_pb2.PredictResponse()
    _name(response.model_spec, servable, signature)
    for alias in wanted:
        tensors.to_proto(outputs[alias], response.outputs[alias], as_content=options.as_tensor_content)
    return response


def _feeds(signature: Signature, request: Any, max_bytes: int) -> dict[str, np.ndarray]:
    sent, known = set(request.inputs), set(signature.inputs)
    if len(sent) != len(known):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"input size does not match signature: {len(sent)}!={len(known)} "
            f"len({{{_set(sent)}}}) != len({{{_set(known)}}}). "
            f"Sent extra: {{{_set(sent - known)}}}. Missing but required: {{{_set(known - sent)}}}.",
        )
    feeds = {}
    for alias, proto in request.inputs.items():
        if alias not in known:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"input tensor alias not found in signature: {alias}. "
                f"Inputs expected to be in the set {{{_set(known)}}}.",
            )
        try:
            feeds[alias] = tensors.from_proto(proto, max_bytes=max_bytes)
        except tensors.TensorError as e:
            raise Refused(Code.INVALID_ARGUMENT, f"tensor parsing error: {alias}: {e}") from e
    return feeds


def _set(names: set[str]) -> str:
    return ",".join(sorted(names))


def _name(spec: Any, servable: Servable, signature: Signature | None = None) -> None:
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


def classify_on(servable: Servable, request: Any, timed: Timed = _ignore) -> Any:
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
    outputs = _run(signature, {_INPUTS: examples}, timed)
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
    _name(response.model_spec, servable, signature)
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


def regress_on(servable: Servable, request: Any, timed: Timed = _ignore) -> Any:
    """RegressionResponse of a RegressionRequest."""
    signature = _examples_signature(servable, request.model_spec, "regression")
    if len(signature.outputs) != 1:
        raise Refused(Code.INVALID_ARGUMENT, "Expected one output Tensor.")
    if _OUTPUTS not in signature.outputs:
        raise Refused(
            Code.FAILED_PRECONDITION, f"No regression outputs found in SignatureDef: {signature.name}"
        )
    examples = _examples(request.input)
    values = _run(signature, {_INPUTS: examples}, timed)[_OUTPUTS]
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
    _name(response.model_spec, servable, signature)
    for value in values.ravel().tolist():
        response.result.regressions.add(value=value)
    return response


class Calls:
    """The API of one server. `entrypoint` is "GRPC" or "REST", for the metrics only."""

    def __init__(self, manager: ModelManager, options: Options, metrics: Metrics) -> None:
        self.manager = manager
        self.options = options
        self.metrics = metrics

    def predict(self, request: Any, entrypoint: str = "GRPC") -> Any:
        with self._serving(request.model_spec, "Predict", entrypoint) as (servable, timed):
            return predict_on(servable, request, self.options, timed)

    def classify(self, request: Any, entrypoint: str = "GRPC") -> Any:
        with self._serving(request.model_spec, "Classify", entrypoint) as (servable, timed):
            response = classify_on(servable, request, timed)
            self.metrics.examples(servable.name, len(response.result.classifications))
            return response

    def regress(self, request: Any, entrypoint: str = "GRPC") -> Any:
        with self._serving(request.model_spec, "Regress", entrypoint) as (servable, timed):
            response = regress_on(servable, request, timed)
            self.metrics.examples(servable.name, len(response.result.regressions))
            return response

    def predict_arrays(
        self,
        spec: Any,
        name: str,
        feeds: Callable[[Signature], dict[str, np.ndarray]],
        entrypoint: str = "REST",
    ) -> dict[str, Any]:
        """Outputs by name of what `feeds` makes of the signature: predict without messages, for REST."""
        with self._serving(spec, "Predict", entrypoint) as (servable, timed):
            signature = servable.signatures.get(name or DEFAULT_SIGNATURE)
            if signature is None:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def',
                )
            return _run(signature, feeds(signature), timed)

    def metadata(self, request: Any) -> Any:
        """GetModelMetadataResponse: the signatures of a version."""
        if not request.HasField("model_spec"):
            raise Refused(Code.INVALID_ARGUMENT, "Missing ModelSpec")
        if not request.metadata_field:
            raise Refused(
                Code.INVALID_ARGUMENT, "GetModelMetadataRequest must specify at least one metadata_field"
            )
        for field in request.metadata_field:
            if field != "signature_def":
                raise Refused(Code.INVALID_ARGUMENT, f"Metadata field {field} is not supported")
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        signatures = get_model_metadata_pb2.SignatureDefMap()
        with self.manager.hold(request.model_spec) as servable:
            for key, signature in servable.signatures.items():
                signatures.signature_def[key].CopyFrom(signature.definition)
            _name(response.model_spec, servable)
        response.metadata["signature_def"].Pack(signatures)
        return response

    def status(self, request: Any) -> Any:
        """GetModelStatusResponse: one version's state, or those of all versions, the newest first."""
        if not request.HasField("model_spec"):
            raise Refused(Code.INVALID_ARGUMENT, "Missing ModelSpec")
        spec = request.model_spec
        states = self.manager.states(spec.name)
        if spec.WhichOneof("version_choice") == "version":
            version = spec.version.value
            if version not in states:
                raise Refused(Code.NOT_FOUND, f"Could not find version {version} of model {spec.name}")
            states = {version: states[version]}
        if not states:
            raise Refused(Code.NOT_FOUND, f"Could not find any versions of model {spec.name}")
        response = get_model_status_pb2.GetModelStatusResponse()
        for version, (state, code, message) in sorted(states.items(), reverse=True):
            item = response.model_version_status.add(version=version, state=state)
            item.status.error_code = int(code)
            item.status.error_message = message
        return response

    def reload(self, request: Any, deadline: float | None = None) -> Any:
        """ReloadConfigResponse once the new config holds; waits for models that are new."""
        self.manager.reload(request.config, deadline)
        return model_management_pb2.ReloadConfigResponse(status={"error_code": 0})

    @contextmanager
    def _serving(self, spec: Any, api: str, entrypoint: str) -> Iterator[tuple[Servable, Timed]]:
        start = time.perf_counter()
        status = "OK"
        try:
            with self.manager.hold(spec) as servable:
                yield servable, lambda micros: self.metrics.run(spec.name, api, micros)
        except Refused as e:
            status = e.code.name
            raise
        except Exception:
            status = Code.INTERNAL.name
            raise
        finally:
            if self.manager.knows(spec.name):  # names that clients invent must not fill the metrics
                micros = (time.perf_counter() - start) * 1e6
                shown = api if entrypoint == "GRPC" else api.lower()  # as TF Serving spells them
                self.metrics.request(spec.name, shown, entrypoint, status, micros)
