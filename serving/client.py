"""One predict client for TF Serving and the embedded server, over gRPC or REST.

    client = PredictClient("127.0.0.1:8500", "digits")             # the `stable` label
    client.predict({"image": images})["classes"]                   # ndarray in, ndarray out
    PredictClient("127.0.0.1:8500", "digits", version=7).status()  # {6: ..., 7: VersionStatus(AVAILABLE)}

A request without label goes to the highest loaded version, which may be a canary: so `stable` is the
default here. Importing this costs about 0.4 s, and no TensorFlow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from serving import stubs, tensors
from serving.credentials import Credentials
from serving.errors import (
    BadRequest,
    DeadlineExceeded,
    ModelNotFound,
    NotAllowed,
    RequestTooLarge,
    ServerFailed,
    ServerUnavailable,
    ServingError,
    VersionFailed,
)
from serving.sides import Sides
from serving.traffic import CallCounter, Route

__all__ = ["PredictClient", "VersionStatus"]

MAX_MESSAGE_BYTES = 1 << 30
_LOAD_POLL_S = 0.05

_EACH_REPLICA = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "methodConfig": [
                    {
                        "name": [{"service": "tensorflow.serving.PredictionService"}],
                        "retryPolicy": {
                            "maxAttempts": 4,
                            "initialBackoff": "0.1s",
                            "maxBackoff": "1s",
                            "backoffMultiplier": 3,
                            # CANCELLED is what a server says that ends before it has answered.
                            "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                        },
                    }
                ],
                # A service that is down as a whole is not asked four times as much.
                "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
            }
        ),
    ),
    # A replica that comes in another's place is found within a second, and not after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
]
"""Channel options for many replicas behind one name. Predictions change nothing, so that what one replica could not
answer is asked of the next; requests above gRPC's buffer for that (256 KiB) are not, once they are on their way."""

_HINTS = {
    ServerUnavailable: "is the model server running at this address?",
    DeadlineExceeded: "the server is slow or overloaded; try a longer timeout or a smaller batch",
    NotAllowed: "name the token's file in TRAINYARD_SERVING_TOKEN_FILE",
    RequestTooLarge: "send a smaller batch, or raise the server's message size limit",
}
_ERRORS: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.FAILED_PRECONDITION: BadRequest,
    grpc.StatusCode.OUT_OF_RANGE: BadRequest,
    grpc.StatusCode.UNIMPLEMENTED: BadRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.CANCELLED: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


@dataclass(frozen=True)
class VersionStatus:
    """What a server says of one version: state name, error code (0 is none) and the server's message."""

    state: str
    error_code: int = 0
    message: str = ""

    @property
    def available(self) -> bool:
        return self.state == "AVAILABLE"

    @property
    def failed(self) -> bool:
        """Loading ended with an error; a version that was unloaded in peace is not failed."""
        return self.state == "END" and self.error_code != 0


class PredictClient:
    """A model at one server over gRPC; safe to share between threads.

    `target` is "host:port", or "dns:///name:port" for every replica of a headless Service in turn, or
    "ipv4:address:port,address:port" for several addresses: there, what one replica does not answer, because it goes,
    is asked of the next. `version` pins a version, else `label` is followed, else
    (both None) the highest loaded version answers. `timeout` in seconds is the default of every call. Errors are of
    serving.errors.
    `canary_share` sends a part of the calls that would follow `label` to label `canary` instead: a number from 0
    to 1, or the path of the file that a release keeps (`traffic.json` beside the servers' config), followed as it
    changes. What the canary can't answer is asked of `label`. `counter` keeps what came of each side.
    `credentials` name the files for TLS and the API token, which the environment names where they are None.
    """

    def __init__(
        self,
        target: str,
        model: str,
        version: int | None = None,
        label: str | None = "stable",
        *,
        signature: str = "",
        timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        canary_share: float | Path | str | Route = 0.0,
        counter: CallCounter | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.target = target.removeprefix("grpc://")
        self.model = model
        self.version = version
        self.label = None if version is not None else label
        self.signature = signature
        self.timeout = timeout
        self._clock = clock
        self._sleep = sleep
        self._sides = Sides(model, canary_share, counter)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.enable_http_proxy", 0),
            # A server that restarts is found again within a second, not after two minutes of back-off.
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self.target.startswith(("dns:", "ipv4:", "ipv6:")):  # all replicas, and not the first that answers
            options += _EACH_REPLICA
        self._credentials = credentials or Credentials.from_environment()
        tls = self._credentials.grpc_credentials()
        self._channel = (
            grpc.insecure_channel(self.target, options)
            if tls is None
            else grpc.secure_channel(self.target, tls, options)
        )
        self._predictions = stubs.prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._models = stubs.model_service_pb2_grpc.ModelServiceStub(self._channel)

    def __enter__(self) -> PredictClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; calls in flight are cancelled."""
        self._channel.close()
        self._sides.close()

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        signature: str | None = None,
        outputs: tuple[str, ...] = (),
        timeout: float | None = None,
        key: str | bytes | None = None,
    ) -> dict[str, np.ndarray]:
        """Answers of the model by output name; `outputs` asks for a few of them only.

        With a canary, calls of the same `key` (a user's, say) go to the same side; without, by chance.
        """
        request = stubs.predict_pb2.PredictRequest(output_filter=outputs)
        self._fill(request.model_spec, signature)
        for name, value in inputs.items():
            try:
                tensors.to_proto(value, request.inputs[name])
            except tensors.TensorError as e:
                raise BadRequest(f"input {name}: {e}") from e
        if self.label is None or not self._sides.active:
            response = self._call(self._predictions.Predict, request, timeout)
        else:

            def call(label: str) -> Any:
                request.model_spec.version_label = label
                return self._call(self._predictions.Predict, request, timeout)

            response = self._sides.call(self.label, key, call)
        return {name: tensors.from_proto(proto) for name, proto in response.outputs.items()}

    def metadata(self, *, timeout: float | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Signatures of the served version: {signature: {"inputs": {name: {"dtype", "shape"}}, "outputs"}}."""
        request = stubs.get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        self._fill(request.model_spec, None)
        response = self._call(self._predictions.GetModelMetadata, request, timeout)
        signatures = stubs.get_model_metadata_pb2.SignatureDefMap()
        response.metadata["signature_def"].Unpack(signatures)
        return {
            key: {"inputs": _infos(sig.inputs), "outputs": _infos(sig.outputs)}
            for key, sig in signatures.signature_def.items()
        }

    def status(self, *, timeout: float | None = None) -> dict[int, VersionStatus]:
        """State of every version that the server knows of this model; {} where it knows none."""
        request = stubs.get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = self.model
        try:
            response = self._call(self._models.GetModelStatus, request, timeout)
        except ModelNotFound:
            return {}
        names = stubs.get_model_status_pb2.ModelVersionStatus.State
        return {
            item.version: VersionStatus(
                names.Name(item.state), item.status.error_code, item.status.error_message
            )
            for item in response.model_version_status
        }

    def wait_available(self, version: int, deadline: float) -> VersionStatus:
        """Wait until the version is AVAILABLE.

        `deadline` is a moment of the client's clock (`time.monotonic() + 60`). Raises VersionFailed with the
        server's message as soon as loading has failed, DeadlineExceeded with the last state seen else.
        """
        seen = "nothing heard"
        while True:
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.target} did not make version {version} of {self.model} AVAILABLE in time ({seen})",
                    hint="look into the server's log, or give it a longer deadline",
                )
            try:
                states = self.status(timeout=min(left, self.timeout))
            except (ServerUnavailable, DeadlineExceeded) as e:
                seen = f"last: {e.message}"
            else:
                state = states.get(version)
                seen = f"last state: {state.state if state else 'unknown to the server'}"
                if state is not None and state.available:
                    return state
                if state is not None and state.failed:
                    raise VersionFailed(self.model, version, self.target, state.message)
            self._sleep(min(_LOAD_POLL_S, max(left, 0)))

    def wait_unloaded(self, deadline: float) -> None:
        """Wait until the server has no version of the model loaded; DeadlineExceeded after the `deadline`."""
        while left := [v for v, state in self.status().items() if state.state != "END"]:
            if self._clock() >= deadline:
                raise DeadlineExceeded(f"{self.target} still has versions {left} of {self.model} loaded")
            self._sleep(_LOAD_POLL_S)

    def reload(self, config: Any, *, timeout: float | None = None) -> None:
        """Give the server a whole new ModelServerConfig (message or text); it replaces what it had."""
        if isinstance(config, str):
            config = stubs.text_format.Parse(config, stubs.model_server_config_pb2.ModelServerConfig())
        request = stubs.model_management_pb2.ReloadConfigRequest(config=config)
        response = self._call(self._models.HandleReloadConfigRequest, request, timeout)
        if response.status.error_code:
            raise BadRequest(f"{self.target} refuses the config: {response.status.error_message}")

    def _fill(self, spec: Any, signature: str | None) -> None:
        spec.name = self.model
        spec.signature_name = self.signature if signature is None else signature
        if self.version is not None:
            spec.version.value = self.version
        elif self.label:
            spec.version_label = self.label

    def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        try:
            return method(
                request,
                timeout=self.timeout if timeout is None else timeout,
                metadata=self._credentials.metadata(),
            )
        except grpc.RpcError as e:
            raise self._error(e) from e

    def _error(self, error: grpc.RpcError) -> ServingError:
        code, details = error.code(), error.details() or ""
        kind = _ERRORS.get(code, ServerFailed)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            kind = RequestTooLarge if "larger than max" in details else ServerUnavailable
        if code is grpc.StatusCode.INVALID_ARGUMENT and "version label" in details:
            kind = ModelNotFound  # TF Serving's word for an unknown label
        return kind(f"{self.target}: {details} ({code.name})", hint=_HINTS.get(kind, ""))


def _infos(infos: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "dtype": tensors.dtype_name(info.dtype),
            "shape": None if info.tensor_shape.unknown_rank else [d.size for d in info.tensor_shape.dim],
        }
        for name, info in sorted(infos.items())
    }
