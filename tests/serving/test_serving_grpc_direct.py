"""The gRPC server beneath the services: what grpcio's own does, by threads that answer what they receive."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from serving.server import grpc_direct
from serving.server.grpc_direct import Unsupported, direct_server


def _own(threads, interceptors=(), options=(), limit=1024):
    return direct_server(threads, interceptors, options, limit)


def _grpcios(threads, interceptors=(), options=(), limit=1024):
    return grpc.server(
        ThreadPoolExecutor(threads), interceptors=interceptors, options=options, maximum_concurrent_rpcs=limit
    )


class Service:
    """Methods that do what servers are asked for; `hold` holds until it is let go."""

    def __init__(self):
        self.go = threading.Event()
        self.inside = threading.Semaphore(0)
        self.seen = []

    def echo(self, request, context):
        self.seen.append((context.is_active(), context.peer(), dict(context.invocation_metadata())))
        return request

    def hold(self, request, context):
        self.inside.release()
        self.go.wait(20)
        return request

    def abort(self, request, context):
        context.set_trailing_metadata((("why", "because"),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not so: ä")

    def fail(self, request, context):
        raise ValueError("a bug")

    def code(self, request, context):
        context.send_initial_metadata((("first", "1"),))
        context.set_code(grpc.StatusCode.DATA_LOSS)
        context.set_details("half of it")
        return request

    def left(self, request, context):
        return repr(context.time_remaining()).encode()

    def handlers(self):
        def parse(data):
            if data == b"garbage":
                raise ValueError("no message")
            return data

        methods = {
            name: grpc.unary_unary_rpc_method_handler(getattr(self, name), parse, bytes)
            for name in ("echo", "hold", "abort", "fail", "code", "left")
        }
        methods["stream"] = grpc.unary_stream_rpc_method_handler(lambda request, context: iter([request]))
        return grpc.method_handlers_generic_handler("test.Service", methods)


@pytest.fixture
def serve():
    """Starts a server of a kind with a Service; returns it, the service and a function that calls a method."""
    opened = []

    def start(make=_own, threads=2, **options):
        service, server = Service(), make(threads, **options)
        server.add_generic_rpc_handlers((service.handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        opened.append((service, server, channel))

        def method(name):
            return channel.unary_unary(f"/test.Service/{name}")

        return server, service, method

    yield start
    for service, server, channel in opened:
        service.go.set()
        channel.close()
        assert server.stop(5).wait(10)


both = pytest.mark.parametrize("make", [_own, _grpcios])


def _failure(call, request=b"x", **options):
    with pytest.raises(grpc.RpcError) as failed:
        call(request, timeout=10, **options)
    return failed.value


@both
def test_answers_metadata_and_statuses_are_those_of_grpcio(serve, make):
    _, service, method = serve(make)
    assert method("echo")(b"x" * 100_000, metadata=(("who", "me"),)) == b"x" * 100_000
    active, peer, metadata = service.seen[0]
    assert active
    assert peer.startswith("ipv4:127.0.0.1:")
    assert metadata["who"] == "me"
    aborted = _failure(method("abort"))
    assert (aborted.code(), aborted.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "not so: ä")
    assert ("why", "because") in aborted.trailing_metadata()
    coded = _failure(method("code"))
    assert (coded.code(), coded.details()) == (grpc.StatusCode.DATA_LOSS, "half of it")
    assert ("first", "1") in coded.initial_metadata()
    assert 1 < float(method("left")(b"", timeout=50)) < 60
    assert float(method("left")(b"")) > 1e6


@both
def test_bad_calls_are_refused_and_the_server_goes_on(serve, make, caplog):
    _, _, method = serve(make, options=[("grpc.max_receive_message_length", 1000)])
    assert _failure(method("fail")).code() is grpc.StatusCode.UNKNOWN
    assert _failure(method("nothing")).code() is grpc.StatusCode.UNIMPLEMENTED
    assert _failure(method("echo"), b"garbage").code() is grpc.StatusCode.INTERNAL
    assert _failure(method("echo"), b"x" * 2000).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert method("echo")(b"x") == b"x"
    assert "a bug" in caplog.text


def test_streams_are_unimplemented(serve):
    _, _, method = serve()
    assert _failure(method("stream")).code() is grpc.StatusCode.UNIMPLEMENTED


@both
def test_interceptors_see_calls_in_order_and_may_replace_their_handlers(serve, make):
    order = []

    class Noting(grpc.ServerInterceptor):
        def __init__(self, name):
            self.name = name

        def intercept_service(self, continuation, details):
            order.append((self.name, details.method))
            if ("token", "wrong") in details.invocation_metadata:
                return grpc.unary_unary_rpc_method_handler(
                    lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
                )
            return continuation(details)

    _, service, method = serve(make, interceptors=(Noting("first"), Noting("second")))
    assert method("echo")(b"x") == b"x"
    assert order == [("first", "/test.Service/echo"), ("second", "/test.Service/echo")]
    assert _failure(method("echo"), metadata=(("token", "wrong"),)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(service.seen) == 1


@both
def test_calls_beyond_the_threads_wait_and_beyond_the_limit_are_refused(serve, make):
    _, service, method = serve(make, threads=2, limit=4)
    held = [method("hold").future(b"x", timeout=20) for _ in range(2)]
    for _ in held:
        assert service.inside.acquire(timeout=10)
    more = [method("hold").future(b"x", timeout=20) for _ in range(5)]
    codes = [future.exception(10).code() for future in more if _refused(future)]
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
    service.go.set()
    assert [f.result(10) for f in (*held, *more) if not f.exception(10)] == [b"x"] * 4


def _refused(future):
    """True where the call ends while its method is held: only refused ones do."""
    try:
        return future.exception(1) is not None
    except grpc.FutureTimeoutError:
        return False


@both
def test_a_call_whose_caller_left_does_no_harm(serve, make):
    _, service, method = serve(make)
    futures = [method("hold").future(b"x") for _ in range(2)]
    for _ in futures:
        assert service.inside.acquire(timeout=10)
    assert all(future.cancel() for future in futures)
    service.go.set()
    assert method("echo")(b"x", timeout=10) == b"x"


@both
def test_stopping_lets_calls_end_and_refuses_new_ones(serve, make):
    server, service, method = serve(make)
    future = method("hold").future(b"x")
    assert service.inside.acquire(timeout=10)
    stopped = server.stop(20)
    assert not stopped.is_set()
    # gRPC's core cancels a call that crosses the server's goodbye on its connection; later ones find no server.
    while (code := _failure(method("echo")).code()) is not grpc.StatusCode.UNAVAILABLE:
        assert code is grpc.StatusCode.CANCELLED
    service.go.set()
    assert future.result(10) == b"x"
    assert stopped.wait(10)


def test_calls_that_outlast_the_grace_are_cut_off(serve):
    server, service, method = serve()
    futures = [method("hold").future(b"x") for _ in range(5)]
    assert service.inside.acquire(timeout=10)
    assert server.stop(0.1).wait(10)
    codes = {future.exception(10).code() for future in futures}
    assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_servers_stop_amid_load_again_and_again(serve):
    for grace in (None, 0.05, 1.0) * 3:
        server, _, method = serve(threads=4)
        echo, done = method("echo"), threading.Event()
        failures = []

        def ask(echo=echo, done=done, failures=failures):
            while not done.is_set():
                try:
                    assert echo(b"x" * 1000) == b"x" * 1000
                except grpc.RpcError as e:
                    failures.append(e.code())

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        assert echo(b"x") == b"x"
        assert server.stop(grace).wait(10)
        done.set()
        for asker in askers:
            asker.join()
        assert set(failures) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    server, _, _ = serve()
    assert server.stop(None).is_set()
    assert server.stop(None).is_set()


def test_a_server_that_never_started_stops_at_once():
    server = direct_server(2)
    server.add_insecure_port("127.0.0.1:0")
    assert server.stop(None).is_set()


def test_a_taken_port_is_an_error(serve):
    with pytest.raises(RuntimeError):
        direct_server(1).add_insecure_port("256.0.0.1:1")


def test_another_grpcio_is_told_apart(monkeypatch):
    monkeypatch.setattr(grpc_direct, "_core", None)
    with pytest.raises(Unsupported, match="CompletionQueue"):
        direct_server(1)


def test_the_model_server_falls_back_on_grpcios_own(
    start_server, make_config, base_path, client_of, images, monkeypatch, caplog
):
    monkeypatch.setattr(grpc_direct, "_core", None)
    server = start_server(make_config(digits=(base_path, None, {})))
    assert "thread pool" in caplog.text
    assert "logits" in client_of(server, label=None).predict({"image": images})
