"""Clients that are slow, greedy or many, over real sockets."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import grpc
import numpy as np
import pytest

from serving.errors import ConfigInvalid
from serving.server.flags import Options, parse
from serving.stubs import predict_pb2, prediction_service_pb2_grpc
from serving.tensors import to_proto


@pytest.fixture
def server(start_server, make_config, base_path):
    def start(**options):
        return start_server(make_config(digits=(base_path, 1, {"stable": 1})), **options)

    return start


def _ends(connection):
    """True when the server closes the connection; a hang is the test's timeout."""
    connection.settimeout(60)
    with suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def _status(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.rest_port}/v1/models/digits", timeout=30) as said:
        return said.status


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET /v1/models", b"GET /v1/models/digits HTTP/1.1\r\nHost: x\r\nX-Slow: "],
    ids=["nothing", "half a line", "half a head"],
)
def test_a_head_that_does_not_come_closes_its_connection_only(server, beginning):
    running = server(header_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", running.rest_port), timeout=60) as slow:
        slow.sendall(beginning)
        assert _ends(slow)
    assert _status(running) == 200


def test_a_head_that_never_ends_is_cut_off(server):
    running = server()
    with socket.create_connection(("127.0.0.1", running.rest_port), timeout=60) as greedy:
        with suppress(BrokenPipeError, ConnectionResetError):
            greedy.sendall(b"GET /v1/models/digits HTTP/1.1\r\nHost: x\r\n" + b"X-Much: " + b"a" * 300_000)
        assert _ends(greedy)
    assert _status(running) == 200


def test_the_second_request_of_a_connection_has_the_same_patience(server):
    running = server(header_timeout_s=0.5)
    with socket.create_connection(("127.0.0.1", running.rest_port), timeout=60) as connection:
        connection.sendall(b"GET /v1/models/digits HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /v1/mod")
        assert _ends(connection)


def test_a_body_that_does_not_come_is_408(server):
    running = server(rest_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", running.rest_port), timeout=60) as slow:
        slow.sendall(
            b'POST /v1/models/digits:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"ins'
        )
        answer = b""
        while chunk := slow.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not come within 0.3 s" in answer


def _post(server, body, **headers):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.rest_port}/v1/models/digits:predict", body, headers
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]


def test_a_small_gzip_that_becomes_huge_is_refused_without_unpacking_it(server):
    running = server(max_message_bytes=1 << 20)
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 1 << 20
    code, error = _post(running, bomb, **{"Content-Encoding": "gzip"})
    assert (code, "larger than 1048576 bytes unzipped" in error) == (429, True)


@pytest.mark.parametrize(
    "body",
    [b'{"instances": ' + b"[" * 100_000, b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"a":' * 5000],
)
def test_json_that_is_nested_too_deeply_is_refused(server_shared, body):
    code, error = _post(server_shared, body)
    assert code == 400, error


@pytest.fixture(scope="module")
def server_shared(shared_server):
    return shared_server


def test_too_many_requests_at_once_are_told_to_come_again(server):
    """One request holds the only place of each port while others come."""
    running = server(max_concurrent_requests=1, grpc_threads=1)
    inside, go = threading.Event(), threading.Event()
    signature = running.manager._serving["digits"].versions[1].signatures["serving_default"]
    real = signature.run

    def slow(given):
        inside.set()
        assert go.wait(60)
        return real(given)

    signature.run = slow
    request = predict_pb2.PredictRequest(model_spec={"name": "digits"})
    to_proto(np.zeros((1, 8, 8, 1), np.uint8), request.inputs["image"])
    body = json.dumps({"instances": np.zeros((1, 8, 8, 1), int).tolist()}).encode()
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        first = stub.Predict.future(request, timeout=60)
        assert inside.wait(60)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "Concurrent RPC limit exceeded" in caught.value.details()
        go.set()
        assert first.result(60).outputs
    inside.clear()
    go.clear()
    url = f"http://127.0.0.1:{running.rest_port}/v1/models/digits:predict"
    answers = []
    first = threading.Thread(
        target=lambda: answers.append(urllib.request.urlopen(url, body, timeout=60).read()), daemon=True
    )
    first.start()
    assert inside.wait(60)
    assert _post(running, body) == (429, "Too many requests in flight; try again")
    go.set()
    first.join(60)
    assert json.loads(answers[0])["predictions"]


def test_a_rest_request_that_takes_too_long_is_504(server):
    running = server(rest_timeout_s=0.3)
    signature = running.manager._serving["digits"].versions[1].signatures["serving_default"]
    go = threading.Event()
    signature.run = lambda given: go.wait(60)
    body = json.dumps({"instances": np.zeros((1, 8, 8, 1), int).tolist()}).encode()
    code, error = _post(running, body)
    go.set()
    assert (code, "rest_api_timeout_in_ms, 300" in error) == (504, True)


def test_web_pages_may_call_where_it_is_allowed(server):
    running = server(rest_timeout_s=5.0, cors=True)
    url = f"http://127.0.0.1:{running.rest_port}/v1/models/digits"
    for request in (urllib.request.Request(url, method="OPTIONS"), urllib.request.Request(url)):
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "*"
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server().rest_port}/v1/models/digits", timeout=30
    ) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] is None


def test_flags():
    base = ["--model_base_path=/m"]
    options = parse([*base, "--rest_api_timeout_in_ms=500", "--header_timeout_seconds=2"])
    assert (options.rest_timeout_s, options.header_timeout_s) == (0.5, 2.0)
    assert parse([*base, "--enable_model_warmup=false"]).warm_up is False
    assert parse([*base, "--tensorflow_session_parallelism=3"]).intra_op_threads == 3
    assert parse([*base, "--enable_grpc_healthcheck_service"]).inter_op_threads == 1
    with pytest.raises(SystemExit):
        parse([*base, "--tensorflow_session_parallelism=3", "--tensorflow_intra_op_parallelism=2"])
    with pytest.raises(ConfigInvalid, match="max_message_bytes must be over 0"):
        Options(model_base_path="/m", max_message_bytes=0)
