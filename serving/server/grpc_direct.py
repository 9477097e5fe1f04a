"""A gRPC server whose threads answer the calls they receive: grpcio's core without its hand-overs.

`grpc.server` receives in one thread, hands each call to a pool's thread, which asks for the message and waits until
the first thread brings it: three hand-overs a call under the interpreter's lock, 0.27 ms of CPU time. Here every
thread waits on the core's completion queue and goes through with what it finds, for 0.1 ms. Handlers, interceptors,
contexts, credentials, limits and statuses are grpcio's; calls are unary only, which all of TF Serving's are.

It stands on the Cython layer beneath `grpc.server`, which is not a public name: `direct_server` raises Unsupported
where a release of grpcio has it otherwise.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc

try:
    from grpc._cython import cygrpc as _core
except ImportError:  # direct_server says so
    _core = None

__all__ = ["DirectServer", "Unsupported", "direct_server"]

log = logging.getLogger(__name__)

_ARRIVED, _SENT, _STOPPED = object(), object(), object()
_NO_FLAGS = 0
_LOOK_S = 1.0
_NEEDED = (
    "CompletionQueue", "ReceiveCloseOnServerOperation", "ReceiveMessageOperation",
    "SendInitialMetadataOperation", "SendMessageOperation", "SendStatusFromServerOperation", "Server",
)  # fmt: skip

Code = grpc.StatusCode
Handler = grpc.RpcMethodHandler


class Unsupported(Exception):
    """This release of grpcio has not the parts that a DirectServer needs."""


class _Aborted(Exception):
    """Ends a handler whose status is set."""


class _Details(
    collections.namedtuple("_Details", ("method", "invocation_metadata")),
    grpc.HandlerCallDetails,
):
    """What interceptors and handlers are told of a call."""


class _Context(grpc.ServicerContext):
    """What a handler may know of its call, and say besides its answer."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.status, self.said = Code.OK, ""
        self.initial: Any = ()
        self.trailing: Any = ()

    def is_active(self) -> bool:
        return bool(self._event.call.is_valid)

    def time_remaining(self) -> float:
        return max(self._event.call_details.deadline - time.time(), 0.0)

    def cancel(self) -> None:
        self._event.call.cancel()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False  # calls end with their handlers: there is nothing left to be called back for

    def invocation_metadata(self) -> Any:
        return self._event.invocation_metadata

    def peer(self) -> str:
        return str(self._event.call.peer().decode())

    def peer_identities(self) -> Any:
        return _core.peer_identities(self._event.call)

    def peer_identity_key(self) -> str | None:
        key = _core.peer_identity_key(self._event.call)
        return None if key is None else key.decode()

    def auth_context(self) -> Mapping[str, Any]:
        found = _core.auth_context(self._event.call) or {}
        return {key.decode(): value for key, value in found.items()}

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        self.initial = tuple(initial_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self.trailing

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status = code

    def set_details(self, details: str) -> None:
        self.said = details

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.said

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        if code is Code.OK:
            log.error("a handler aborted with OK; the client is told UNKNOWN")
            code, details = Code.UNKNOWN, ""
        self.status, self.said = code, details
        raise _Aborted

    def abort_with_status(self, status: Any) -> None:
        self.trailing = tuple(status.trailing_metadata or ())
        self.abort(status.code, status.details)


class _Call:
    """A call from its arrival to its answer."""

    __slots__ = ("event", "handler", "message")

    def __init__(self, event: Any, handler: Handler) -> None:
        self.event = event
        self.handler = handler
        self.message = b""


class DirectServer(grpc.Server):
    """A `grpc.Server` for unary calls; at most `threads` handlers run at a time, further calls wait their turn.

    `limit` is the number of calls accepted and not answered beyond which calls get RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        threads: int,
        interceptors: Sequence[grpc.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        limit: int,
    ) -> None:
        self._queue = _core.CompletionQueue()
        self._server = _core.Server(tuple(options), False)
        self._server.register_completion_queue(self._queue)
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._find: Callable[[Any], Handler | None] = self._handler_of
        for interceptor in reversed(interceptors):
            self._find = _intercepted(interceptor, self._find)
        self._slots = threads
        self._limit = limit
        self._lock = threading.Lock()
        self._running = self._active = 0
        self._waiting: deque[_Call] = deque()
        self._started = self._stopping = False
        self._stopped = threading.Event()
        # One more than may run handlers: so calls are accepted, queued and refused while all of those are busy.
        self._threads = [
            threading.Thread(target=self._serve, name=f"grpc-{number}", daemon=True)
            for number in range(threads + 1)
        ]

    # ---- grpc.Server

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Handler]
    ) -> None:
        """Nothing: generated code gives the same handlers to `add_generic_rpc_handlers`."""

    def add_insecure_port(self, address: str) -> int:
        return self._bound(address, self._server.add_http2_port(address.encode()))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        credentials = server_credentials._credentials
        return self._bound(address, self._server.add_http2_port(address.encode(), credentials))

    @staticmethod
    def _bound(address: str, port: int) -> int:
        if not port:
            raise RuntimeError(f"failed to bind to address {address}")
        return port

    def start(self) -> None:
        with self._lock:
            if self._started:
                raise ValueError("a server can be started once")
            self._server.start()
            self._started = True
            for _ in self._threads:
                self._server.request_call(self._queue, self._queue, _ARRIVED)
        for thread in self._threads:
            thread.start()

    def stop(self, grace: float | None) -> threading.Event:
        """Refuse new calls; cancel those in flight after `grace` seconds, at once for None.

        The event that is returned is set when all calls have ended.
        """
        with self._lock:
            if not self._started:
                self._stopped.set()
            if self._stopped.is_set():
                return self._stopped
            if not self._stopping:
                self._stopping = True
                self._server.shutdown(self._queue, _STOPPED)
        if grace is None:
            self._cancel()
            self._stopped.wait()
        else:
            threading.Thread(target=self._cancel_after, args=(grace,), name="grpc-grace", daemon=True).start()
        return self._stopped

    def wait_for_termination(self, timeout: float | None = None) -> bool:
        return not self._stopped.wait(timeout)

    def _cancel_after(self, grace: float) -> None:
        if not self._stopped.wait(grace):
            self._cancel()

    def _cancel(self) -> None:
        with self._lock:
            if not self._stopped.is_set():
                self._server.cancel_all_calls()

    # ---- the threads

    def _serve(self) -> None:
        while not self._stopped.is_set():
            event = self._queue.poll(time.time() + _LOOK_S)
            tag = event.tag  # None when the time is over
            try:
                if tag is _ARRIVED:
                    self._arrived(event)
                elif tag is _STOPPED:
                    with self._lock:  # the call that began the shutdown may still be in it
                        self._server.destroy()
                    self._stopped.set()
                elif tag is not _SENT and tag is not None:
                    self._received(tag, event)
            except Exception:
                log.exception("a gRPC event could not be handled")
            # An event may be the last that holds its call, which must be gone before the next wait.
            del event, tag

    def _arrived(self, event: Any) -> None:
        """A call has begun: accept the next, find this one's handler, ask for its message."""
        if not event.success:
            return  # the server stops
        with self._lock:
            if not self._stopping:
                self._server.request_call(self._queue, self._queue, _ARRIVED)
        try:
            handler = self._find(_Details(event.call_details.method.decode(), event.invocation_metadata))
        except Exception:
            log.exception("no handler could be found for a gRPC call")
            self._refuse(event.call, Code.UNKNOWN, "Error in service handler!")
            return
        if handler is None or handler.unary_unary is None:
            self._refuse(event.call, Code.UNIMPLEMENTED, "Method not found!")
            return
        with self._lock:
            refused = self._active >= self._limit
            self._active += not refused
        if refused:
            self._refuse(event.call, Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        else:
            # An operation holds what it receives: each call needs its own.
            event.call.start_server_batch((_core.ReceiveMessageOperation(_NO_FLAGS),), _Call(event, handler))

    def _handler_of(self, details: Any) -> Handler | None:
        for generic in self._handlers:
            handler = generic.service(details)
            if handler is not None:
                return handler
        return None

    def _received(self, call: _Call | None, event: Any) -> None:
        """A call's message is here: answer it, and then what waits, unless enough threads do so already."""
        call.message = event.batch_operations[0].message()
        with self._lock:
            if self._running >= self._slots:
                self._waiting.append(call)
                return
            self._running += 1
        while call is not None:
            try:
                self._answer(call)
            except Exception:
                log.exception("a gRPC call could not be answered")
            with self._lock:
                self._active -= 1
                call = self._waiting.popleft() if self._waiting else None
                if call is None:
                    self._running -= 1

    def _answer(self, call: _Call) -> None:
        handler, core = call.handler, call.event.call
        if call.message is None:  # cancelled, too large, or never sent
            self._refuse(core, Code.UNIMPLEMENTED, "The method needs exactly one request message")
            return
        try:
            request = (
                handler.request_deserializer(call.message) if handler.request_deserializer else call.message
            )
        except Exception:  # noqa: BLE001  # whatever the bytes are, they are the client's
            self._refuse(core, Code.INTERNAL, "Exception deserializing request!")
            return
        context = _Context(call.event)
        data = None
        try:
            answer = handler.unary_unary(request, context)
            data = handler.response_serializer(answer) if handler.response_serializer else answer
        except _Aborted:
            pass
        except Exception as e:
            log.exception("a gRPC handler failed")
            context.status, context.said = Code.UNKNOWN, f"Exception calling application: {e}"
        self._send(core, data, context.status, context.said, context.initial, context.trailing)

    def _refuse(self, core: Any, code: grpc.StatusCode, details: str) -> None:
        self._send(core, None, code, details)

    def _send(
        self, core: Any, data: bytes | None, code: grpc.StatusCode, details: str, initial: Any = (), trailing: Any = ()
    ) -> None:  # fmt: skip
        status = _core.SendStatusFromServerOperation(trailing, code.value[0], details.encode(), _NO_FLAGS)
        begin = _core.SendInitialMetadataOperation(initial, _NO_FLAGS)
        end = _core.ReceiveCloseOnServerOperation(_NO_FLAGS)
        if data is None:
            core.start_server_batch((begin, status, end), _SENT)
        else:
            core.start_server_batch((begin, _core.SendMessageOperation(data, _NO_FLAGS), status, end), _SENT)


def _intercepted(
    interceptor: grpc.ServerInterceptor, find: Callable[[Any], Handler | None]
) -> Callable[[Any], Handler | None]:
    return lambda details: interceptor.intercept_service(find, details)


def direct_server(
    threads: int,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
    options: Sequence[tuple[str, Any]] = (),
    limit: int = 1024,
) -> DirectServer:
    """A DirectServer, not started and without a port; raises Unsupported."""
    missing = [name for name in _NEEDED if not hasattr(_core, name)]
    if missing:
        raise Unsupported(f"grpcio {grpc.__version__} has no {', '.join(missing)}")
    try:
        return DirectServer(threads, interceptors, options, limit)
    except (AttributeError, TypeError) as e:
        raise Unsupported(f"grpcio {grpc.__version__}: {e}") from e
