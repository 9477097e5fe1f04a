"""Versions come and go under load: hot swap, failures, policies, labels, reload."""

from __future__ import annotations

import shutil
import threading
import time

import grpc
import numpy as np
import pytest

from serving.errors import (
    BadRequest,
    ModelNotFound,
    ServerFailed,
    ServerUnavailable,
    ServingError,
    VersionFailed,
)


class Load:
    """Callers that ask without a pause, and keep what they got and what went wrong."""

    def __init__(self, clients, images):
        self.answers: list[np.ndarray] = []
        self.errors: list[Exception] = []
        self._images = images
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in clients]

    def _ask(self, client):
        while not self._stop.is_set():
            try:
                self.answers.append(client.predict({"image": self._images})["logits"])
            except ServingError as e:
                self.errors.append(e)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_new_version_replaces_the_old_one_without_a_single_error(
    start_server, make_config, client_of, base_path, add_version, images, expected, until
):
    server = start_server(make_config(digits=(base_path, 1, {})))
    clients = [client_of(server, label=None) for _ in range(4)]
    with Load(clients, images) as load:
        until(lambda: len(load.answers) > 50)
        add_version(base_path, 2)
        clients[0].wait_available(2, time.monotonic() + 20)
        until(lambda: clients[0].status()[1].state == "END", "the old version's end")
        before = len(load.answers)
        until(lambda: len(load.answers) > before + 50)
    assert load.errors == []
    assert all(
        np.allclose(answer, expected[1]["logits"], rtol=1e-4)
        or np.allclose(answer, expected[2]["logits"], rtol=1e-4)
        for answer in load.answers
    )
    np.testing.assert_allclose(load.answers[-1], expected[2]["logits"], rtol=1e-4)
    assert clients[0].status()[1].error_code == 0


def test_a_corrupt_version_ends_with_its_reason_while_the_old_one_serves_on(
    start_server, make_config, client_of, base_path, add_version, images, until
):
    server = start_server(make_config(digits=(base_path, 1, {})))
    client = client_of(server, label=None)
    with Load([client_of(server, label=None)], images) as load:
        add_version(base_path, 2, corrupt=True)
        with pytest.raises(VersionFailed, match="can't load version 2 of digits") as caught:
            client.wait_available(2, time.monotonic() + 20)
        assert caught.value.server_message
        assert client.status()[1].available
        time.sleep(0.2)
    assert load.errors == []
    assert load.answers
    shutil.rmtree(base_path / "2")
    add_version(base_path, 2)
    until(lambda: client.status()[2].available, "the repaired version")


@pytest.mark.parametrize("what", ["empty folder", "no saved model", "bad warm-up", "failing warm-up"])
def test_folders_that_are_no_models_are_told_apart(
    start_server, make_config, client_of, base_path, add_version, what
):
    server = start_server(make_config(digits=(base_path, "all", {})))
    staging = base_path / ".new"
    if what == "empty folder":
        staging.mkdir()
    elif what == "no saved model":
        staging.mkdir()
        (staging / "saved_model.pb").write_bytes(b"nonsense")
    else:
        shutil.copytree(base_path / "1", staging)
        (staging / "assets.extra").mkdir()
        warm_up = staging / "assets.extra" / "tf_serving_warmup_requests"
        if what == "bad warm-up":
            warm_up.write_bytes(b"not a tfrecord at all")
        else:
            import tensorflow as tf

            from serving.stubs import prediction_log_pb2

            log = prediction_log_pb2.PredictionLog()
            log.predict_log.request.model_spec.name = "digits"
            with tf.io.TFRecordWriter(str(warm_up)) as writer:
                writer.write(log.SerializeToString())
    staging.rename(base_path / "2")
    client = client_of(server, label=None)
    with pytest.raises(VersionFailed) as caught:
        client.wait_available(2, time.monotonic() + 20)
    if "warm-up" in what:
        assert "warm-up" in caught.value.server_message
    assert client.status()[1].available


def test_requests_in_flight_keep_their_version(
    start_server, make_config, base_path, add_version, client_of, until
):
    server = start_server(make_config(digits=(base_path, 1, {})))
    from serving.stubs import model_pb2

    with server.manager.hold(model_pb2.ModelSpec(name="digits")) as held:
        add_version(base_path, 2)
        client = client_of(server, label=None)
        client.wait_available(2, time.monotonic() + 20)
        until(lambda: client.status()[1].state == "UNLOADING")
        assert held.version == 1
        image = np.zeros((1, 8, 8, 1), np.uint8)
        assert held.signature("").run({"image": image})["classes"].shape == (1,)
        time.sleep(0.1)
        assert client.status()[1].state == "UNLOADING"
    until(lambda: client.status()[1].state == "END")


def test_versions_follow_their_policy(start_server, make_config, client_of, base_path, add_version, until):
    for version in (2, 10):
        add_version(base_path, version)
    server = start_server(make_config(digits=(base_path, 2, {})))
    client = client_of(server, label=None)
    loaded = lambda: sorted(v for v, s in client.status().items() if s.available)  # noqa: E731
    assert loaded() == [2, 10]
    client.reload(make_config(digits=(base_path, "all", {})))
    until(lambda: loaded() == [1, 2, 10])
    client.reload(make_config(digits=(base_path, [1, 99], {})))
    until(lambda: loaded() == [1])
    client.reload(make_config(digits=(base_path, [2], {})))
    until(lambda: loaded() == [2])
    client.reload(make_config())
    until(lambda: loaded() == [])
    with pytest.raises(ModelNotFound):
        client.predict({"image": np.zeros((1, 8, 8, 1), np.uint8)})


def test_all_versions_gone_unloads_and_a_lost_folder_does_not(
    start_server, make_config, client_of, base_path, until
):
    server = start_server(make_config(digits=(base_path, 1, {})))
    client = client_of(server, label=None)
    base_path.rename(base_path.with_name("elsewhere"))
    time.sleep(0.3)
    assert client.status()[1].available, "a file system that is away must not unload anything"
    base_path.mkdir()
    until(lambda: client.status()[1].state == "END")


def test_labels_are_moved_in_two_phases(
    start_server, make_config, client_of, base_path, add_version, images, expected
):
    server = start_server(make_config(digits=(base_path, [1], {"stable": 1})))
    add_version(base_path, 2)
    client = client_of(server)
    with pytest.raises(
        BadRequest, match="Request to assign label to version 2 of model digits, which is not"
    ) as e:
        client.reload(make_config(digits=(base_path, [1, 2], {"stable": 2})))
    assert e.value.__cause__.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert sorted(client.status()) == [1], "a refused config must change nothing"
    client.reload(make_config(digits=(base_path, [1, 2], {"stable": 1})))
    client.wait_available(2, time.monotonic() + 20)
    client.reload(make_config(digits=(base_path, [1, 2], {"stable": 1, "canary": 2})))
    canary = client_of(server, label="canary").predict({"image": images})["logits"]
    np.testing.assert_allclose(canary, expected[2]["logits"], rtol=1e-5)
    np.testing.assert_allclose(client.predict({"image": images})["logits"], expected[1]["logits"], rtol=1e-5)


def test_labels_may_be_early_where_the_flag_says_so(
    start_server, make_config, client_of, base_path, add_version
):
    server = start_server(make_config(digits=(base_path, [1], {"stable": 1})), allow_unavailable_labels=True)
    add_version(base_path, 2)
    client = client_of(server)
    with pytest.raises(BadRequest, match="not currently available"):
        client.reload(make_config(digits=(base_path, [1, 2], {"stable": 2})))
    client.reload(make_config(digits=(base_path, [1, 2], {"stable": 1, "next": 2})))


@pytest.mark.parametrize("why", ["broken", "missing"])
def test_a_new_model_that_can_not_be_loaded_leaves_the_config_before(
    start_server, make_config, client_of, base_path, add_version, images, why, tmp_path
):
    server = start_server(make_config(digits=(base_path, [1], {"stable": 1})))
    other = tmp_path / "models" / "other"
    other.mkdir()
    if why == "broken":
        add_version(other, 1, corrupt=True)
    client = client_of(server)
    with pytest.raises(ServerFailed, match="did not become available"):
        client.reload(make_config(digits=(base_path, [1], {"other": 1}), other=(other, 1, {})))
    assert client.predict({"image": images})
    with pytest.raises(ModelNotFound):
        client_of(server, label="other").predict({"image": images})


def test_a_failed_version_is_tried_again_by_a_reload(
    start_server, make_config, client_of, base_path, add_version, until, saved_models
):
    server = start_server(make_config(digits=(base_path, [1], {})))
    add_version(base_path, 2, corrupt=True)
    client = client_of(server)
    client.reload(make_config(digits=(base_path, [1, 2], {})))
    until(lambda: client.status().get(2) and client.status()[2].failed)
    data = base_path / "2" / "variables" / "variables.data-00000-of-00001"
    data.write_bytes((saved_models / "2" / "variables" / data.name).read_bytes())
    client.reload(make_config(digits=(base_path, [1, 2], {})))
    client.wait_available(2, time.monotonic() + 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config { base_path: '/x' }", "must have a name"),
        ("config { name: 'a' }", "must have a base_path"),
        ("config { name: 'a' base_path: '/x' } config { name: 'a' base_path: '/y' }", "multiple times"),
        ("config { name: 'a' base_path: '/x' model_platform: 'caffe' }", "unsupported platform caffe"),
        ("config { name: 'a' base_path: '/x' model_version_policy { specific {} } }", "without any version"),
    ],
)
def test_bad_configs_are_refused_whole(shared_server, client_of, text, message):
    client = client_of(shared_server)
    with pytest.raises(BadRequest, match=message):
        client.reload(f"model_config_list {{ {text} }}")
    assert client.status()[1].available


def test_the_config_file_is_polled_where_asked(
    start_server, make_config, client_of, base_path, add_version, until
):
    add_version(base_path, 2)
    server = start_server(make_config(digits=(base_path, [1], {})), model_config_file_poll_s=0.05)
    client = client_of(server)
    file = server.options.model_config_file
    file.write_text("nonsense {")
    time.sleep(0.3)
    assert sorted(client.status()) == [1]
    file.write_text(str(make_config(digits=(base_path, [1, 2], {}))))
    until(lambda: 2 in client.status() and client.status()[2].available)


def test_before_the_models_are_loaded_calls_are_told_to_come_again(
    start_server, make_config, client_of, base_path, images, monkeypatch
):
    from serving.server import app

    go = threading.Event()
    real = app.load_runtime

    def slow():
        assert go.wait(30)
        return real()

    monkeypatch.setattr(app, "load_runtime", slow)
    server = start_server(make_config(digits=(base_path, 1, {"stable": 1})), wait=False)
    client = client_of(server, timeout=5)
    assert client.status()[1].state == "START"
    assert not server.health.serving
    with pytest.raises(ServerUnavailable, match="server is starting"):
        client.predict({"image": images})
    with pytest.raises(ServerUnavailable, match="server is starting"):
        client_of(server, version=1, timeout=5).predict({"image": images})
    go.set()
    assert server.wait_ready(60)
    assert client.predict({"image": images})


def test_what_keeps_tensorflow_away_is_raised(start_server, make_config, base_path, monkeypatch):
    from serving.server import app

    def broken():
        raise ImportError("no tensorflow here")

    monkeypatch.setattr(app, "load_runtime", broken)
    server = start_server(make_config(digits=(base_path, 1, {})), wait=False)
    with pytest.raises(ImportError, match="no tensorflow here"):
        server.wait_ready(20)
