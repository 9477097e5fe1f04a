"""HTTP around the API: loopback unless told otherwise, a token on every request but probes, a thread a connection.

The standard library's threading server, not an ASGI one: pods' lives are blocking calls on threads anyway, a
log follower or watcher that sleeps costs a sleeping thread, and leaving out uvicorn and starlette keeps the
kubelet small and quick to start.
"""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from trainyard.kubelet.api import Answer, Api, Request, Stream
from trainyard.kubelet.errors import ApiError

__all__ = ["MAX_BODY", "Server"]

log = logging.getLogger(__name__)

MAX_BODY = 3 * 1024 * 1024  # bytes, as the API server takes at most
_OPEN = ("/healthz", "/livez", "/readyz")  # for probes, as on a cluster: they only say "ok"
_IDLE = 300.0  # seconds that a connection may stay silent between requests


class Server:
    """Listens on `host`; `port` 0 takes a free one. Clients elsewhere call it by the name `advertise`."""

    def __init__(
        self, api: Api, token: str, port: int = 0, host: str = "127.0.0.1", advertise: str = ""
    ) -> None:
        self._http = _HttpServer((host, port), _Handler)
        self._http.api = api
        self._http.token = token
        self.port: int = self._http.server_address[1]
        # A page in a browser that resolves its own name to 127.0.0.1 still sends that name.
        names = (*filter(None, [advertise.lower()]), "127.0.0.1", "localhost")
        self._http.hosts = tuple(f"{name}:{self.port}" for name in names)
        self.url = f"http://{self._http.hosts[0]}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="kubelet-http", daemon=True)

    def start(self) -> None:
        """Answer requests on threads."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.close_connections()
        self._http.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    api: Api
    token: str
    hosts: tuple[str, ...]

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, threading.Thread] = {}
        self._guard = threading.Lock()
        super().__init__(address, handler)  # type: ignore[arg-type]

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open[request] = threading.current_thread()
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._guard:
                self._open.pop(request, None)

    def close_connections(self) -> None:
        """Wake threads that wait for their clients, and wait for them."""
        with self._guard:
            waiting = dict(self._open)
        for connection in waiting:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as e:  # the client was faster
                log.debug("a connection is closed already: %s", e)
        for thread in waiting.values():
            thread.join(5)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that goes in the middle of an answer is nothing to report; all else was answered with 500.
        log.debug("a connection ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "trainyard-process-kubelet"
    sys_version = ""
    timeout = _IDLE
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer's headers and body in one packet
    server: _HttpServer

    def do_GET(self) -> None:
        try:
            reply = self.server.api.handle(self._request())
        except ApiError as e:
            self._send(Answer(e.status(), e.code))
        except Exception:
            # The edge of the process: whatever went wrong, the client gets an answer and the log the reason.
            log.exception("%s %s failed", self.command, self.path)
            error = ApiError(500, "InternalError", "the process kubelet failed on this request; see its log")
            self._send(Answer(error.status(), error.code))
        else:
            if isinstance(reply, Answer):
                self._send(reply)
            else:
                self._stream(reply)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the names that http.server calls

    def _request(self) -> Request:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if length < 0 or length > MAX_BODY or self.headers.get("Transfer-Encoding"):
            self.close_connection = True  # the body is not read
            raise ApiError(
                413, "RequestEntityTooLarge", f"a request must say its length, at most {MAX_BODY} bytes"
            )
        body = self.rfile.read(length)
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            raise ApiError(
                403,
                "Forbidden",
                f"the Host of a request must be {' or '.join(self.server.hosts)}",
            )
        url = urlsplit(self.path)
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(
            token.strip().encode(), self.server.token.encode()
        )
        if not known and url.path not in _OPEN:
            raise ApiError(401, "Unauthorized", "Unauthorized: send the bearer token of the kubeconfig")
        return Request(
            method=self.command,
            path=url.path,
            query=dict(parse_qsl(url.query, keep_blank_values=True)),
            body=body,
            content_type=self.headers.get("Content-Type", ""),
        )

    def _send(self, answer: Answer) -> None:
        data = json.dumps(answer.body).encode()
        self.send_response(answer.code)
        if answer.code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def _stream(self, stream: Stream) -> None:
        self.send_response(200)
        self.send_header("Content-Type", stream.content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for chunk in stream.chunks:
            if chunk:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            elif self._client_left():
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _client_left(self) -> bool:
        """Whether the other side has closed; there is nothing else to notice it by while nothing is sent."""
        # Not `select`, which takes no descriptor above 1023: a thousand pods have three each.
        sight = select.poll()
        sight.register(self.connection, select.POLLIN)
        return bool(sight.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)  # no access log: it would hold names of users' pods
