"""TF Serving's REST API as an ASGI application, run by uvicorn in a thread of its own.

    POST /v1/models/NAME[/versions/N|/labels/L]:predict|classify|regress
    GET  /v1/models/NAME[/versions/N|/labels/L]            status
    GET  /v1/models/NAME[/versions/N|/labels/L]/metadata   signatures
    GET  /monitoring/prometheus/metrics                    or what --monitoring_config_file says

Errors are {"error": "..."} with TF Serving's HTTP codes; bodies may come gzipped. The requests' work is done
in a thread pool, so that a slow model never holds up status and metrics; that of models which have shown to be
quick in the thread that reads requests, since handing it over and back costs as much again (`rest_quick`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from google.protobuf import json_format

from serving.server import rest_answers, rest_json
from serving.server.auth import Tokens
from serving.server.calls import Calls
from serving.server.flags import Options
from serving.server.rest_examples import examples_input
from serving.server.rest_gzip import unzipped
from serving.server.rest_numbers import plain_numbers
from serving.server.rest_quick import QUICK_BYTES, QuickCalls
from serving.server.status import Code, Refused, http_status
from serving.server.tls import Tls
from serving.stubs import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    regression_pb2,
)

if sys.version_info >= (3, 11):  # unlike asyncio.wait_for they make no task, which is dear
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["RestApp", "RestServer"]

log = logging.getLogger(__name__)

_VERSION = r"(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_CALL = re.compile(
    rf"/v1/models/(?P<name>[^/:]+){_VERSION}:(?P<method>classify|regress|predict)", re.IGNORECASE
)
_READ = re.compile(rf"/v1/models(?:/(?P<name>[^/:]+))?{_VERSION}(?:/(?P<metadata>metadata))?", re.IGNORECASE)
_API = re.compile(r"/v1/", re.IGNORECASE)
_MAX_INT64 = (1 << 63) - 1
_JSON = b"application/json"
_PATIENCE = 8
_CORS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"POST, GET"),
    (b"access-control-allow-headers", b"Content-Type, Authorization"),
]

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class RestApp:
    """The ASGI application of one server."""

    def __init__(self, calls: Calls, tokens: Tokens | None = None) -> None:
        self._calls = calls
        self._tokens = tokens
        options = calls.options
        self._max_bytes = options.max_message_bytes
        self._timeout_s = options.rest_timeout_s
        self._cors = options.cors
        self._metrics_path = options.metrics_path
        self._free = options.max_concurrent_requests
        self._pool = ThreadPoolExecutor(options.rest_threads, "rest")
        self._quick = QuickCalls(ever=options.batching is None)

    def close(self) -> None:
        """End the worker threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope.get("raw_path", b"").decode("latin-1").partition("?")[0]
        if self._cors:
            send = _with_cors(send)
            if method == "OPTIONS":  # a browser asks before it calls; it sends no token yet
                await _answer(send, 200, b"{}")
                return
        if self._tokens is not None and (refusal := self._refusal(scope, path)):
            await _answer(send, 401, _error(refusal), close=True, more=[(b"www-authenticate", b"Bearer")])
            return
        if path == self._metrics_path and method == "GET":
            await _answer(send, 200, self._calls.metrics.page().encode(), b"text/plain; version=0.0.4")
            return
        if self._free <= 0:
            await _answer(send, 429, _error("Too many requests in flight; try again"))
            return
        self._free -= 1  # one event loop: no lock needed
        try:
            try:
                async with timeout(self._timeout_s):
                    body = await self._body(receive)
            except asyncio.TimeoutError:
                message = f"The request's body did not come within {self._timeout_s:g} s"
                await _answer(send, 408, _error(message), close=True)
                return
            if body is None:
                message = f"Request body is larger than {self._max_bytes} bytes; send a smaller batch"
                await _answer(send, 413, _error(message), close=True)
                return
            if query := scope.get(
                "query_string"
            ):  # TF Serving knows no queries, and matches them with the path
                path = f"{path}?{query.decode('latin-1')}"
            zipped = any(k == b"content-encoding" and b"gzip" in v for k, v in scope.get("headers", ()))
            respond = functools.partial(self.respond, method, path, body, zipped)
            if not zipped and len(body) <= QUICK_BYTES and self._quick.has(path):
                status, answer = self._quick.timed(path, respond)
            else:
                status, answer = await self._in_pool(path, respond)
            await _answer(send, status, answer)
        finally:
            self._free += 1

    async def _in_pool(self, path: str, respond: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._quick.timed, path, respond)
        try:
            async with timeout(self._timeout_s):
                return await work
        except asyncio.TimeoutError:
            message = f"The request took longer than rest_api_timeout_in_ms, {self._timeout_s * 1000:.0f}"
            return http_status(Code.DEADLINE_EXCEEDED), _error(message)

    def _refusal(self, scope: dict[str, Any], path: str) -> str | None:
        if path == self._metrics_path and self._tokens.exempt("metrics"):
            return None
        read = _READ.fullmatch(path) if scope["method"] == "GET" else None
        if read and read["metadata"] and self._tokens.exempt("metadata"):
            return None
        return self._tokens.refusal(next((v for k, v in scope["headers"] if k == b"authorization"), None))

    async def _body(self, receive: Receive) -> bytes | None:
        """The request's body, None where it is over the limit."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= self._max_bytes:
                parts.append(chunk)
            else:
                parts.clear()
                # Read on for a while without keeping it: a client that is cut off never sees the answer.
                if size > _PATIENCE * self._max_bytes:
                    return None
            if not message.get("more_body"):
                return b"".join(parts) if size <= self._max_bytes else None

    def respond(self, method: str, path: str, body: bytes, zipped: bool = False) -> tuple[int, bytes]:
        """Status and JSON body of one request; never raises."""
        try:
            if not _API.match(path):
                return 404, _error(f"Not found: {method} {path}")
            if zipped:
                body = unzipped(body, self._max_bytes)
            if method == "POST" and (found := _CALL.fullmatch(path)):
                return 200, self._call(found["method"].lower(), _spec(found), body)
            if method == "GET" and (found := _READ.fullmatch(path)):
                return 200, self._read(found)
            raise Refused(Code.INVALID_ARGUMENT, f"Malformed request: {method} {path}")
        except Refused as e:
            return http_status(e.code), _error(e.message)
        except Exception:
            log.exception("%s %s failed", method, path)
            return 500, _error("Internal error; the server's log says more")

    def _call(self, method: str, spec: Any, body: bytes) -> bytes:
        if method == "predict":
            return self._predict(spec, body)
        document = rest_json.parse(body)
        spec.signature_name = rest_json.signature_name(document)
        examples = examples_input(document)
        if method == "classify":
            classify = classification_pb2.ClassificationRequest(model_spec=spec, input=examples)
            return rest_answers.results_body(self._calls.classify(classify, "REST"))
        regress = regression_pb2.RegressionRequest(model_spec=spec, input=examples)
        return rest_answers.results_body(self._calls.regress(regress, "REST"))

    def _predict(self, spec: Any, body: bytes) -> bytes:
        plain = plain_numbers(body)
        if plain is not None:
            outputs = self._calls.predict_arrays(spec, plain.signature_name, plain.feeds)
            return rest_answers.outputs_body(outputs, plain.row)
        document = rest_json.parse(body)
        name = rest_json.signature_name(document)
        outputs = self._calls.predict_arrays(spec, name, lambda sig: rest_json.feeds(document, sig))
        return rest_answers.outputs_body(outputs, rest_json.is_row(document))

    def _read(self, found: re.Match[str]) -> bytes:
        if not found["name"]:
            raise Refused(Code.INVALID_ARGUMENT, "Missing model name in request.")
        spec = _spec(found)
        if found["metadata"]:
            request = get_model_metadata_pb2.GetModelMetadataRequest(
                model_spec=spec, metadata_field=["signature_def"]
            )
            return _metadata(self._calls.metadata(request))
        status = self._calls.status(get_model_status_pb2.GetModelStatusRequest(model_spec=spec))
        return json_format.MessageToJson(
            status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ).encode()


def _spec(found: re.Match[str]) -> Any:
    spec = model_pb2.ModelSpec(name=unquote(found["name"]))
    if found["version"]:
        version = int(found["version"]) if len(found["version"]) < 20 else _MAX_INT64 + 1
        if version > _MAX_INT64:
            raise Refused(Code.INVALID_ARGUMENT, f"Failed to convert version: {found['version']} to numeric.")
        spec.version.value = version
    elif found["label"]:
        spec.version_label = unquote(found["label"])
    return spec


def _metadata(response: Any) -> bytes:
    signatures = get_model_metadata_pb2.SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)

    def plain(message: Any) -> Any:
        return json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    body = {"model_spec": plain(response.model_spec), "metadata": {"signature_def": plain(signatures)}}
    return json.dumps(body, indent=1).encode()


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    kind: bytes = _JSON,
    *,
    close: bool = False,
    more: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_cors(send: Send) -> Send:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] += _CORS
        await send(message)

    return sending


class RestServer:
    """uvicorn around the application, on a socket that is bound at once."""

    def __init__(self, app: RestApp, options: Options, tls: Tls | None = None) -> None:
        import uvicorn

        from serving.server.limits import patient

        host, port = options.host, options.rest_api_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._app = app
        config = uvicorn.Config(
            app,
            http=patient(options.header_timeout_s),
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="rest-api", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        self._socket.listen(128)
        self._thread.start()

    def stop(self) -> None:
        """Answer what is in flight, then close."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._app.close()
