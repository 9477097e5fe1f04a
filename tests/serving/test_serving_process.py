"""The server as users start it: a process of its own, real signals, real files."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from serving.client import PredictClient
from serving.errors import ConfigInvalid, ServingError
from serving.rest_client import RestPredictClient

from .server_process import ServerProcess


@pytest.fixture
def spawn(tmp_path):
    servers = []

    def spawn(*flags, wait=True):
        server = ServerProcess(tmp_path, *flags, name=f"server-{len(servers)}", wait=wait)
        servers.append(server)
        return server

    yield spawn
    for server in servers:
        server.close()


def test_a_process_serves_drains_and_serves_again_after_its_death(
    spawn, make_config, base_path, images, expected, tmp_path
):
    config = tmp_path / "models.config"
    config.write_text(str(make_config(digits=(base_path, [1], {"stable": 1}))))
    server = spawn(f"--model_config_file={config}")
    assert server.ports["pid"] == server.process.pid
    with PredictClient(server.grpc, "digits") as client:
        np.testing.assert_allclose(
            client.predict({"image": images})["logits"], expected[1]["logits"], rtol=1e-5
        )
    rest = RestPredictClient(server.rest, "digits")
    assert rest.predict({"image": images})["classes"].shape == (4,)

    # Requests in flight when SIGTERM comes are answered; those after it are refused, never half answered.
    answered, refused = [], []

    def ask():
        with PredictClient(server.grpc, "digits", timeout=5) as mine:
            while not refused:
                try:
                    answered.append(mine.predict({"image": images})["logits"])
                except ServingError as e:
                    refused.append(e)

    asking = threading.Thread(target=ask)
    asking.start()
    while len(answered) < 20:
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    asking.join()
    assert refused[0].code == "serving.unavailable"
    assert not server.ready.exists(), "a server that has gone must not look ready"

    second = spawn(f"--model_config_file={config}")
    with PredictClient(second.grpc, "digits") as client:
        assert client.predict({"image": images})
    second.close()
    third = spawn(f"--model_config_file={config}", "--enable_batching")
    with PredictClient(third.grpc, "digits") as client:
        assert client.predict({"image": images})


def test_an_empty_list_is_served_and_grows(spawn, make_config, base_path, images, tmp_path):
    config = tmp_path / "models.config"
    config.write_text("model_config_list {\n}\n")
    server = spawn(f"--model_config_file={config}")
    with PredictClient(server.grpc, "digits", version=1) as client:
        assert client.status() == {}
        client.reload(make_config(digits=(base_path, [1], {})))
        assert client.predict({"image": images})
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_config_file=/nowhere/models.config"], "/nowhere/models.config can't be read"),
        (["--model_config_file={bad}"], "must be a ModelServerConfig"),
        (["--model_base_path=/tmp", "--port={taken}"], "can't be opened"),
        (["--model_base_path=/tmp", "--rest_api_port={taken}"], "can't be opened"),
    ],
)
def test_what_keeps_it_from_starting_is_said_in_a_line(spawn, tmp_path, flags, message):
    (tmp_path / "bad").write_text("model_config_list { what }")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"bad": tmp_path / "bad", "taken": taken.getsockname()[1]}
        server = spawn(*[flag.format(**given) for flag in flags], wait=False)
        assert server.process.wait(60) == 2
    log = server.log.read_text()
    assert message in log
    assert "Traceback" not in log


def test_a_taken_http_port_is_told_in_process_too(start_server, make_config, base_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigInvalid, match="can't be opened"),
    ):
        start_server(make_config(digits=(base_path, 1, {})), rest_api_port=taken.getsockname()[1])


def test_one_model_needs_no_config_file(start_server, base_path, client_of, images):
    server = start_server(
        model_config_file=None, model_name="m", model_base_path=str(base_path), rest_api_port=None
    )
    assert server.rest_port is None
    assert client_of(server, "m", label=None).predict({"image": images})


def test_run_in_this_process_ends_with_its_signals(
    start_server, make_config, base_path, tmp_path, monkeypatch
):
    from serving.server.app import ModelServer
    from serving.server.flags import Options

    handlers = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    config = tmp_path / "models.config"
    config.write_text(str(make_config(digits=(base_path, 1, {}))))
    server = ModelServer(Options(port=0, model_config_file=config, ready_file=tmp_path / "ready"))
    codes = []
    running = threading.Thread(target=lambda: codes.append(server.run()))
    running.start()
    assert server.wait_ready(60)
    assert json.loads((tmp_path / "ready").read_text()) == {
        "grpc": server.port,
        "rest": None,
        "pid": os.getpid(),
    }
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    running.join(20)
    assert codes == [0]
    assert not (tmp_path / "ready").exists()


def test_a_server_that_can_not_load_tensorflow_ends_with_1(make_config, base_path, tmp_path, monkeypatch):
    from serving.server import app
    from serving.server.flags import Options

    def broken():
        raise ImportError("no tensorflow here")

    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(app, "load_runtime", broken)
    config = tmp_path / "models.config"
    config.write_text(str(make_config(digits=(base_path, 1, {}))))
    assert app.ModelServer(Options(port=0, model_config_file=config)).run() == 1
