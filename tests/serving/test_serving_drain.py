"""What happens to requests in flight when a server is told to stop: real processes, real signals, both ports."""

from __future__ import annotations

import signal
import threading

import grpc
import pytest

from serving.client import PredictClient
from serving.errors import ServingError
from serving.rest_client import RestPredictClient
from serving.server.protos import HealthCheckRequest, HealthCheckResponse
from serving.server.tfrecord import read_records

from .server_process import ServerProcess


@pytest.fixture(scope="module")
def gate_model(tmp_path_factory):
    """A model whose run says that it has begun (a file) and ends when it is let go (another file)."""
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="folder")])
    def gate(folder):
        begun = tf.io.write_file(folder[0] + "/begun", "")
        with tf.control_dependencies([begun]):
            turns = tf.while_loop(
                lambda i: tf.equal(tf.size(tf.io.matching_files(folder[0] + "/go")), 0),
                lambda i: [i + 1],
                [tf.constant(0)],
                parallel_iterations=1,
            )
        return {"turns": tf.fill([tf.size(folder)], turns[0])}

    root = tmp_path_factory.mktemp("gate")
    tf.saved_model.save(tf.Module(), str(root / "gate" / "1"), signatures={"serving_default": gate})
    return root / "gate"


@pytest.fixture
def spawn(gate_model, tmp_path):
    servers = []

    def spawn(*flags):
        model = ("--model_name=gate", f"--model_base_path={gate_model}")
        server = ServerProcess(tmp_path, *model, *flags, name=f"server-{len(servers)}")
        servers.append(server)
        return server

    yield spawn
    for server in servers:
        server.close()


class Asking(threading.Thread):
    """One request in flight; `outcome` is its answer or its error."""

    def __init__(self, client, folder, until):
        super().__init__(daemon=True)
        self.client, self.folder, self.outcome = client, folder, None
        folder.mkdir()
        self.start()
        until(lambda: (folder / "begun").exists() or self.outcome is not None, "the request")
        assert self.outcome is None, self.outcome

    def run(self):
        try:
            self.outcome = self.client.predict({"folder": [str(self.folder).encode()]}, timeout=60)
        except ServingError as e:
            self.outcome = e

    def let_go(self):
        (self.folder / "go").write_text("")


@pytest.fixture
def asking(tmp_path, until):
    """Puts one request in flight over each port."""
    clients = []

    def ask(server):
        clients.append(PredictClient(server.grpc, "gate", label=None, timeout=60))
        rest = RestPredictClient(server.rest, "gate", label=None, timeout=60)
        return [
            Asking(client, tmp_path / name, until)
            for client, name in ((clients[-1], "by-grpc"), (rest, "by-rest"))
        ]

    yield ask
    for client in clients:
        client.close()


def _health(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    return HealthCheckResponse.FromString(check(HealthCheckRequest().SerializeToString(), timeout=20)).status


def test_requests_in_flight_are_answered_new_ones_refused_and_the_server_ends_with_0(
    spawn, asking, until, tmp_path
):
    server = spawn(
        "--drain_seconds=60", f"--request_log_dir={tmp_path / 'log'}", "--request_log_sample_rate=1"
    )
    in_flight = asking(server)
    with grpc.insecure_channel(server.grpc) as channel:
        assert _health(channel) == 1
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.ready.exists(), "the drain")

        def refused():
            try:
                return _health(channel) == 2
            except grpc.RpcError as e:
                return e.code() is grpc.StatusCode.UNAVAILABLE

        until(refused, "the refusal")
    fresh = RestPredictClient(server.rest, "gate", label=None, timeout=5)

    def rest_refused():
        try:
            fresh.status()
        except ServingError as e:
            return e.code == "serving.unavailable"

    until(rest_refused, "the refusal over HTTP")
    assert server.process.poll() is None, "it waits for what is in flight"
    for request in in_flight:
        request.let_go()
    for request in in_flight:
        request.join(60)
        assert not isinstance(request.outcome, Exception), request.outcome
    assert server.process.wait(60) == 0
    assert list(tmp_path.glob("log/gate/1/[!.]*.tfrecord")), "their log is closed"


def test_a_killed_server_s_request_log_is_closed_by_the_next_one(spawn, asking, tmp_path, until):
    flags = (f"--request_log_dir={tmp_path / 'log'}", "--request_log_sample_rate=1")
    server = spawn(*flags)
    for request in asking(server):
        request.let_go()
        request.join(60)
        assert not isinstance(request.outcome, Exception), request.outcome
    until(lambda: list(tmp_path.glob("log/gate/1/.*.tfrecord")), "the log")  # its writer is a thread
    (left,) = tmp_path.glob("log/gate/1/.*.tfrecord")
    until(lambda: len(list(read_records(left, max_bytes=1 << 20))) == 2, "both requests in the log")
    server.close()
    spawn(*flags)
    (closed,) = tmp_path.glob("log/gate/1/[!.]*.tfrecord")
    assert closed.name == left.name[1:]
    assert len(list(read_records(closed, max_bytes=1 << 20))) == 2


def test_the_grace_has_an_end(spawn, asking):
    server = spawn("--drain_seconds=1")
    in_flight = asking(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    for request in in_flight:
        request.join(60)
        assert isinstance(request.outcome, ServingError)


def test_a_second_signal_ends_it_at_once(spawn, asking, until):
    server = spawn("--drain_seconds=600")
    in_flight = asking(server)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not server.ready.exists(), "the drain")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 128 + signal.SIGTERM
    for request in in_flight:
        request.join(60)
        assert isinstance(request.outcome, ServingError)
