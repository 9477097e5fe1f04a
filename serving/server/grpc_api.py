"""TF Serving's gRPC services and the standard health service."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from serving.errors import ConfigInvalid
from serving.server.calls import Calls
from serving.server.flags import Options
from serving.server.grpc_direct import Unsupported, direct_server
from serving.server.protos import HealthCheckRequest, HealthCheckResponse
from serving.server.status import Refused
from serving.stubs import model_service_pb2_grpc, prediction_service_pb2_grpc

__all__ = ["Health", "build_server"]

log = logging.getLogger(__name__)

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_SERVICES = ("", "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService")


def _guarded(context: grpc.ServicerContext, call: Callable[..., Any], *args: Any) -> Any:
    """Run a call; a refusal becomes its status, a fault of ours INTERNAL with a log entry."""
    left = context.time_remaining()
    if left is not None and left <= 0:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "The deadline had passed before the work began")
    try:
        return call(*args)
    except Refused as e:
        context.abort(_CODES[int(e.code)], e.message)
    except Exception:
        log.exception("a gRPC call failed")
        context.abort(grpc.StatusCode.INTERNAL, "Internal error; the server's log says more")


class _Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def Predict(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  # the API's names
        return _guarded(context, self._calls.predict, request)

    def Classify(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _guarded(context, self._calls.classify, request)

    def Regress(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _guarded(context, self._calls.regress, request)

    def MultiInference(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _guarded(context, self._calls.multi_inference, request)

    def GetModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _guarded(context, self._calls.metadata, request)


class _Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def GetModelStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _guarded(context, self._calls.status, request)

    def HandleReloadConfigRequest(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        left = context.time_remaining()
        # A call without a deadline shows as hundreds of years.
        deadline = None if left is None or not math.isfinite(left) or left > 1e9 else time.monotonic() + left
        return _guarded(context, self._calls.reload, request, deadline)


class Health:
    """grpc.health.v1: Check only; clients that Watch are told UNIMPLEMENTED, which they take for healthy."""

    def __init__(self) -> None:
        self.serving = False

    def check(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.service not in _SERVICES:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service}")
        return HealthCheckResponse(status="SERVING" if self.serving else "NOT_SERVING")

    def handler(self) -> grpc.GenericRpcHandler:
        check = grpc.unary_unary_rpc_method_handler(
            self.check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


def _server(
    options: Options, interceptors: Sequence[grpc.ServerInterceptor], arguments: Sequence[tuple[str, Any]]
) -> grpc.Server:
    if options.grpc_direct:
        try:
            return direct_server(
                options.grpc_threads, interceptors, arguments, options.max_concurrent_requests
            )
        except Unsupported as e:
            log.warning("gRPC calls go through a thread pool, at twice the cost: %s", e)
    return grpc.server(
        ThreadPoolExecutor(options.grpc_threads, "grpc"),
        options=arguments,
        interceptors=interceptors,
        maximum_concurrent_rpcs=options.max_concurrent_requests,
    )


def build_server(
    calls: Calls,
    health: Health,
    host: str,
    port: int,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[grpc.Server, int]:
    """A gRPC server bound to its port (not started), and the port."""
    options = calls.options
    server = _server(
        options,
        interceptors,
        [
            ("grpc.max_receive_message_length", options.max_message_bytes),
            ("grpc.max_send_message_length", options.max_message_bytes),
            # Two servers on one port would share its requests in silence.
            ("grpc.so_reuseport", 0),
            # A connection that never says what it wants must not be held for grpc's two minutes.
            ("grpc.server_handshake_timeout_ms", round(options.header_timeout_s * 1000)),
            *options.grpc_options,
        ],
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_Predictions(calls), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(_Models(calls), server)
    server.add_generic_rpc_handlers((health.handler(),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as e:
        raise ConfigInvalid(
            f"gRPC port {address} can't be opened: {e}",
            hint="is another server running? --port 0 takes a free port",
        ) from e
    return server, bound
