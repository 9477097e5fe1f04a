"""What TF Serving's methods do, free of transport: messages in, messages out, Refused on anything else.

`predict_on` and those of `inference` work on one servable (warm-up uses them too); `Calls` finds the servable, counts
and times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from serving import tensors
from serving.server.flags import Options
from serving.server.inference import (
    Timed,
    classify_on,
    ignore,
    multi_inference_on,
    name_spec,
    number_of_examples,
    regress_on,
    run,
)
from serving.server.metrics import Metrics
from serving.server.servable import DEFAULT_SIGNATURE, Servable, Signature
from serving.server.status import Code, Refused
from serving.stubs import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_pb2,
    predict_pb2,
)

if TYPE_CHECKING:
    from serving.server.manager import ModelManager
    from serving.server.request_log import RequestLog

__all__ = ["Calls", "predict_on"]


def predict_on(servable: Servable, request: Any, options: Options, timed: Timed = ignore) -> Any:
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
    outputs = run(signature, feeds, timed)
    response = predict_pb2.PredictResponse()
    name_spec(response.model_spec, servable, signature)
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


class Calls:
    """The API of one server. `entrypoint` is "GRPC" or "REST", for the metrics only."""

    def __init__(self, manager: ModelManager, options: Options, metrics: Metrics) -> None:
        self.manager = manager
        self.options = options
        self.metrics = metrics
        self.request_log: RequestLog | None = None

    def predict(self, request: Any, entrypoint: str = "GRPC") -> Any:
        with self._serving(request.model_spec, "Predict", entrypoint) as (servable, timed):
            response = predict_on(servable, request, self.options, timed)
        if self.request_log is not None:
            self.request_log.offer(request, response)
        return response

    def classify(self, request: Any, entrypoint: str = "GRPC") -> Any:
        with self._serving(request.model_spec, "Classify", entrypoint) as (servable, timed):
            response = classify_on(servable, request, timed)
            self.metrics.examples(servable.name, len(response.result.classifications))
        if self.request_log is not None:
            self.request_log.offer(request, response)
        return response

    def regress(self, request: Any, entrypoint: str = "GRPC") -> Any:
        with self._serving(request.model_spec, "Regress", entrypoint) as (servable, timed):
            response = regress_on(servable, request, timed)
            self.metrics.examples(servable.name, len(response.result.regressions))
        if self.request_log is not None:
            self.request_log.offer(request, response)
        return response

    def multi_inference(self, request: Any, entrypoint: str = "GRPC") -> Any:
        spec = request.tasks[0].model_spec if request.tasks else model_pb2.ModelSpec()
        with self._serving(spec, "MultiInference", entrypoint) as (servable, timed):
            response = multi_inference_on(servable, request, timed)
            self.metrics.examples(servable.name, number_of_examples(request.input))
        if self.request_log is not None:
            self.request_log.offer_multi(request, response)
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
            inputs = feeds(signature)
            outputs = run(signature, inputs, timed)
        if self.request_log is not None:
            self.request_log.offer_arrays(servable.name, servable.version, signature.name, inputs, outputs)
        return outputs

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
            name_spec(response.model_spec, servable)
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
        version: int | None = None
        try:
            with self.manager.hold(spec) as servable:
                version = servable.version
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
                if version is not None:
                    self.metrics.version_request(spec.name, version, status, micros)
