from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from serving.client import PredictClient, VersionStatus
from serving.errors import (
    BadRequest,
    ConfigInvalid,
    DeadlineExceeded,
    ModelNotFound,
    RequestTooLarge,
    ServerFailed,
    ServerUnavailable,
    ServingError,
)
from serving.rest_client import RestPredictClient


@pytest.fixture(params=["gRPC", "REST"])
def make(request, shared_server):
    """Makes a client of either kind."""

    def make(model="digits", **options):
        if request.param == "gRPC":
            return PredictClient(f"127.0.0.1:{shared_server.port}", model, **options)
        return RestPredictClient(f"http://127.0.0.1:{shared_server.rest_port}", model, **options)

    return make


@pytest.mark.parametrize(
    ("options", "version"), [({}, 1), ({"label": "canary"}, 2), ({"version": 2}, 2), ({"label": None}, 2)]
)
def test_both_clients_answer_the_same(make, images, expected, options, version):
    outputs = make(**options).predict({"image": images})
    assert sorted(outputs) == ["classes", "logits", "probabilities"]
    for name, array in outputs.items():
        np.testing.assert_allclose(array, expected[version][name], rtol=1e-5)


def test_strings_and_bytes_travel(make):
    outputs = make("kinds").predict({"numbers": np.float32([[1, 2]]), "names": np.array([b"a\xff"], object)})
    assert outputs["echo_bytes"].tolist() == [b"a\xff"]
    outputs = make("kinds", signature="upper").predict({"names": ["x", "y"]})
    (upper,) = outputs.values()
    assert [v if isinstance(v, str) else v.decode() for v in upper.tolist()] == ["X", "Y"]


def test_status_and_metadata(make):
    assert make().status() == {1: VersionStatus("AVAILABLE"), 2: VersionStatus("AVAILABLE")}
    assert make("unknown").status() == {}
    assert make().metadata()


@pytest.mark.parametrize(
    ("options", "inputs", "error", "failure_class"),
    [
        ({"version": 9}, None, ModelNotFound, "CONFIG"),
        ({"label": "none"}, None, ModelNotFound, "CONFIG"),
        ({"model": "none"}, None, ModelNotFound, "CONFIG"),
        ({"signature": "none"}, None, BadRequest, "USER"),
        ({}, {"wrong": np.zeros(3)}, BadRequest, "USER"),
        ({}, {"image": np.zeros(1_100_000, np.uint8)}, RequestTooLarge, "USER"),
    ],
)
def test_errors_have_kinds(make, images, options, inputs, error, failure_class):
    with pytest.raises(error) as caught:
        make(**options).predict(inputs or {"image": images})
    assert caught.value.failure_class == failure_class
    assert caught.value.code.startswith("serving.")
    assert "127.0.0.1" in str(caught.value)


def _closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_nobody_there():
    port = _closed_port()
    for client in (
        PredictClient(f"127.0.0.1:{port}", "m"),
        RestPredictClient(f"http://127.0.0.1:{port}", "m"),
    ):
        with pytest.raises(ServerUnavailable, match="is the model server running"):
            client.predict({"x": [1]}, timeout=5)


def test_somebody_who_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for client in (
            PredictClient(f"127.0.0.1:{port}", "m"),
            RestPredictClient(f"http://127.0.0.1:{port}", "m"),
        ):
            with pytest.raises((DeadlineExceeded, ServerUnavailable)):
                client.predict({"x": [1]}, timeout=0.2)


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (200, b"<html>", ServerFailed, "other than JSON"),
        (500, b"<html>proxy</html>", ServerFailed, "proxy"),
        (503, b'{"error": "busy"}', ServerUnavailable, "busy"),
        (429, b'{"error": "many"}', ServerUnavailable, "many"),
        (400, b"[]", BadRequest, "HTTP 400"),
    ],
)
def test_other_servers_on_the_way(status, body, error, message):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(error, match=message):
            RestPredictClient(f"http://127.0.0.1:{server.server_port}", "m").metadata(timeout=5)
        thread.join()


def test_what_can_not_be_sent_never_leaves():
    with pytest.raises(BadRequest, match="input x"):
        PredictClient("127.0.0.1:1", "m").predict({"x": np.array([object()], object)})
    with pytest.raises(ConfigInvalid, match="url must be like"):
        RestPredictClient("ftp://x", "m")


def test_waiting_has_a_deadline(shared_server):
    now = [0.0]

    def sleep(seconds):
        now[0] += max(seconds, 0.01)

    with PredictClient(
        f"127.0.0.1:{shared_server.port}", "digits", clock=lambda: now[0], sleep=sleep
    ) as client:
        assert client.wait_available(2, 10.0).available
        with pytest.raises(
            DeadlineExceeded, match=r"version 7 of digits AVAILABLE in time .*unknown to the server"
        ):
            client.wait_available(7, 10.0)
    with (
        PredictClient(f"127.0.0.1:{_closed_port()}", "digits", timeout=0.2) as client,
        pytest.raises(DeadlineExceeded, match="last:"),
    ):
        client.wait_available(1, time.monotonic() + 0.5)


def test_a_restarted_server_is_found_again(start_server, make_config, base_path, images):
    server = start_server(make_config(digits=(base_path, 1, {"stable": 1})))
    port = server.port
    with PredictClient(f"127.0.0.1:{port}", "digits", timeout=5) as client:
        assert client.predict({"image": images})
        server.stop()
        with pytest.raises(ServingError):
            client.predict({"image": images}, timeout=1)
        start_server(make_config(digits=(base_path, 1, {"stable": 1})), port=port)
        deadline = time.monotonic() + 10
        while True:
            try:
                assert client.predict({"image": images})
                break
            except ServerUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_metadata_names_types_and_shapes(shared_server):
    with PredictClient(f"127.0.0.1:{shared_server.port}", "digits") as client:
        signature = client.metadata()["serving_default"]
    assert signature["inputs"] == {"image": {"dtype": "uint8", "shape": [-1, 8, 8, 1]}}
    assert json.dumps(signature)
