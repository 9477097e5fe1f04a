"""Requests on file: what is logged, where, and what happens when that goes wrong."""

from __future__ import annotations

import fcntl
import json
import os
import re
import urllib.request

import numpy as np
import pytest

from serving.errors import ConfigInvalid
from serving.server.flags import parse
from serving.server.metrics import Metrics
from serving.server.request_log import LogOptions, RequestLog
from serving.server.request_log_files import LogFiles
from serving.server.tfrecord import framed, read_records
from serving.stubs import classification_pb2, predict_pb2, prediction_log_pb2
from serving.tensors import from_proto, to_proto


def _records(path):
    return [
        prediction_log_pb2.PredictionLog.FromString(data) for data in read_records(path, max_bytes=1 << 20)
    ]


def _logged(folder):
    return [record for path in sorted(folder.glob("*/*/[!.]*.tfrecord")) for record in _records(path)]


def _pair(value=1.0, model="m", version=3):
    request = predict_pb2.PredictRequest(model_spec={"name": model})
    to_proto(np.float32([value]), request.inputs["x"])
    response = predict_pb2.PredictResponse(model_spec={"name": model, "version": {"value": version}})
    to_proto(np.float32([value / 2]), response.outputs["y"])
    return request, response


def test_predict_classify_and_rest_are_logged_as_tf_serving_logs_them(
    start_server, make_config, base_path, images, client_of, tmp_path
):
    import tensorflow as tf

    folder = tmp_path / "log"
    server = start_server(
        make_config(digits=(base_path, 1, {"stable": 1})), request_log=LogOptions(folder, 1.0)
    )
    client = client_of(server)
    answer = client.predict({"image": images})
    request = classification_pb2.ClassificationRequest(
        model_spec={"name": "digits", "signature_name": "classify"}
    )
    feature = request.input.example_list.examples.add().features.feature["image"]
    feature.bytes_list.value.append(images[0].tobytes())
    client._predictions.Classify(request)
    body = json.dumps({"instances": images[:1].tolist()}).encode()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.rest_port}/v1/models/digits:predict", body, timeout=30
    ) as said:
        rest = json.loads(said.read())
    with pytest.raises(Exception, match="does not match"):
        client.predict({})
    assert list(folder.glob("digits/1/.*.tfrecord")), "an open file is a dot file"
    server.stop()

    (path,) = folder.glob("digits/1/*.tfrecord")
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}-{os.getpid()}-\d+\.tfrecord", path.name)
    assert path.stat().st_mode & 0o777 == 0o600
    # TensorFlow's own reader agrees with ours.
    assert len(list(tf.data.TFRecordDataset(str(path)))) == 3
    grpc_log, classify_log, rest_log = _records(path)
    assert from_proto(grpc_log.predict_log.request.inputs["image"]).tolist() == images.tolist()
    assert grpc_log.predict_log.request.model_spec.version_label == "stable"
    np.testing.assert_array_equal(
        from_proto(grpc_log.predict_log.response.outputs["logits"]), answer["logits"]
    )
    spec = grpc_log.log_metadata.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("digits", 1, "serving_default")
    assert grpc_log.log_metadata.sampling_config.sampling_rate == 1.0
    assert list(grpc_log.log_metadata.saved_model_tags) == ["serve"]
    assert grpc_log.log_metadata.timestamp_secs > 1_600_000_000
    assert len(classify_log.classify_log.response.result.classifications) == 1
    assert from_proto(rest_log.predict_log.request.inputs["image"]).tolist() == images[:1].tolist()
    logits = from_proto(rest_log.predict_log.response.outputs["logits"])
    np.testing.assert_allclose(logits[0], rest["predictions"][0]["logits"], rtol=1e-5)
    assert ':tensorflow:serving:request_log_count{model_name="digits",status_code="OK"} 3' in (
        server.metrics.page()
    )


def test_the_model_s_config_has_the_last_word_on_its_rate(
    start_server, make_config, base_path, images, client_of, tmp_path
):
    config = make_config(digits=(base_path, 1, {}), other=(base_path, 1, {}))
    config.model_config_list.config[1].logging_config.sampling_config.sampling_rate = 1.0
    folder = tmp_path / "log"
    server = start_server(config, request_log=LogOptions(folder))
    quiet, loud = client_of(server, "digits", label=None), client_of(server, "other", label=None)
    for client in (quiet, loud):
        client.predict({"image": images})
    config.model_config_list.config[1].logging_config.sampling_config.sampling_rate = 0.0
    quiet.reload(config)
    loud.predict({"image": images})
    server.stop()
    assert [record.log_metadata.model_spec.name for record in _logged(folder)] == ["other"]


def test_a_share_is_sampled(tmp_path):
    draws = iter([0.1, 0.5, 0.24, 0.25, 0.9])
    log = RequestLog(LogOptions(tmp_path, 0.25), Metrics(), lambda model: None, sample=lambda: next(draws))
    for value in range(5):
        log.offer(*_pair(value))
    log.close()
    values = [from_proto(r.predict_log.request.inputs["x"])[0] for r in _logged(tmp_path)]
    assert values == [0, 2]
    assert {r.log_metadata.sampling_config.sampling_rate for r in _logged(tmp_path)} == {0.25}


def test_a_full_queue_drops_and_counts(tmp_path):
    metrics = Metrics()
    log = RequestLog(LogOptions(tmp_path, 1.0, queue_length=2), metrics, lambda model: None)
    with log._changed:  # the writer can't take anything meanwhile
        for value in range(5):
            log.offer(*_pair(value))
    log.close()
    assert len(_logged(tmp_path)) == 2
    assert ':trainyard:serving:request_log_dropped_count{model_name="m",reason="queue_full"} 3' in (
        metrics.page()
    )
    log.offer(*_pair())  # after its end
    assert 'reason="queue_full"} 4' in metrics.page()


def test_the_queue_is_bounded_in_bytes_too(tmp_path):
    metrics = Metrics()
    log = RequestLog(LogOptions(tmp_path, 1.0, queue_bytes=100), metrics, lambda model: None)
    log.offer_arrays("m", 1, "s", {"x": np.zeros(100)}, {})
    log.offer_arrays("m", 1, "s", {"x": np.array([b"a" * 101], object)}, {})
    log.offer_arrays("m", 1, "s", {"x": np.zeros(1)}, {"y": np.zeros(1)})
    log.close()
    assert 'reason="queue_full"} 2' in metrics.page()
    (record,) = _logged(tmp_path)
    assert from_proto(record.predict_log.response.outputs["y"]).tolist() == [0.0]


def test_a_full_disk_is_a_warning_a_count_and_a_pause(tmp_path, monkeypatch, caplog, until):
    from serving.server import request_log_files

    now = [1000.0]
    metrics = Metrics()
    log = RequestLog(LogOptions(tmp_path, 1.0), metrics, lambda model: None, clock=lambda: now[0])
    log.offer(*_pair(1))
    until(lambda: "request_log_count" in metrics.page())
    real, full = request_log_files._write, [True]

    def write(handle, data):
        if full[0]:
            os.write(handle, data[:7])  # a part gets in, as on real disks
            raise OSError(28, "No space left on device")
        real(handle, data)

    monkeypatch.setattr(request_log_files, "_write", write)
    log.offer(*_pair(2))
    until(lambda: 'reason="disk"} 1' in metrics.page())
    full[0] = False
    log.offer(*_pair(3))  # still within the pause
    until(lambda: 'reason="disk"} 2' in metrics.page())
    now[0] += 11
    log.offer(*_pair(4))
    log.close()
    assert [from_proto(r.predict_log.request.inputs["x"])[0] for r in _logged(tmp_path)] == [1, 4]
    assert caplog.text.count("No space left on device") == 1
    assert "they are served all the same" in caplog.text


def test_a_folder_that_can_not_be_written_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="can't be written"):
        RequestLog(LogOptions(tmp_path / "file" / "log"), Metrics(), lambda model: None)


def _files(folder, clock, **limits):
    defaults = {"max_bytes": 1 << 20, "max_age_s": 60.0, "keep_bytes": 1 << 30}
    return LogFiles(folder, clock=clock, **{**defaults, **limits})


def test_files_are_closed_by_size_and_by_age(tmp_path):
    now = [0.0]
    files = _files(tmp_path, lambda: now[0], max_bytes=100)
    assert files.next_due() is None
    files.append("m", 1, b"a" * 90)
    assert [p.name for p in tmp_path.glob("m/1/*")] == [f"19700101T000000-{os.getpid()}-1.tfrecord"]
    files.append("m", 1, b"b")
    files.append("m", 2, b"c")
    now[0] = 59.0
    files.close_old()
    assert files.next_due() == 1.0
    now[0] = 60.0
    files.close_old()
    assert sorted(p.name.startswith(".") for p in tmp_path.glob("m/*/*")) == [False] * 3
    assert files.next_due() is None


def test_old_files_make_room(tmp_path):
    files = _files(tmp_path, lambda: 0.0, max_bytes=1, keep_bytes=250)
    for at in range(5):
        files.append("m", 1, bytes([at]) * 84)  # 100 bytes with the frame
        for path in tmp_path.glob("m/1/[!.]*"):
            number = int(path.stem.rsplit("-", 1)[1])
            os.utime(path, (number, number))
    left = [next(iter(read_records(p, max_bytes=1000)))[0] for p in sorted(tmp_path.glob("m/1/*"))]
    assert left == [3, 4]


def test_what_a_killed_writer_left_is_cut_to_whole_records_and_named(tmp_path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / ".20260101T000000-1-1.tfrecord").write_bytes(
        framed(b"one") + framed(b"two") + framed(b"x")[:-2]
    )
    (folder / ".20260101T000000-1-2.tfrecord").write_bytes(framed(b"x")[:5])
    (folder / ".20260101T000000-1-3.tfrecord").write_bytes(framed(b"alive"))
    (folder / "20260101T000000-1-1.tfrecord").write_bytes(framed(b"older, of the same name"))
    with (folder / ".20260101T000000-1-3.tfrecord").open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert _files(tmp_path, lambda: 0.0).recover() == 2
    assert sorted(p.name for p in folder.iterdir()) == [
        ".20260101T000000-1-3.tfrecord",
        "20260101T000000-1-1-1.tfrecord",
        "20260101T000000-1-1.tfrecord",
    ]
    assert list(read_records(folder / "20260101T000000-1-1-1.tfrecord", max_bytes=100)) == [b"one", b"two"]


@pytest.mark.parametrize("name", ["../../etc", "..", "a/b", "x" * 300])
def test_no_model_name_leaves_the_folder(tmp_path, name):
    files = _files(tmp_path / "log", lambda: 0.0)
    files.append(name, 1, b"x")
    files.close()
    (path,) = tmp_path.rglob("*.tfrecord")
    assert path.parent.parent.parent == tmp_path / "log"


def test_flags(tmp_path, capsys):
    base = ["--model_base_path=/m"]
    assert parse(base).request_log is None
    options = parse([*base, f"--request_log_dir={tmp_path}", "--request_log_sample_rate=0.1"])
    assert options.request_log == LogOptions(tmp_path, 0.1)
    for wrong in (
        ["--request_log_sample_rate=0.1"],
        [f"--request_log_dir={tmp_path}", "--request_log_sample_rate=2"],
    ):
        with pytest.raises(SystemExit):
            parse([*base, *wrong])
    assert "needs --request_log_dir" in capsys.readouterr().err
