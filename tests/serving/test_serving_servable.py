"""One version in memory: TensorFlow's two roads, odd signatures, warm-up."""

from __future__ import annotations

import struct
import time
from dataclasses import replace

import crc32c
import numpy as np
import pytest

from serving.server import runtime
from serving.server.flags import Options
from serving.server.metrics import Metrics
from serving.server.runtime import load_runtime
from serving.server.servable import Servable
from serving.server.status import Code, Refused
from serving.server.tfrecord import CorruptRecord, read_records
from serving.server.warmup import FILE, warm_up
from serving.stubs import example_pb2, prediction_log_pb2

OPTIONS = Options(model_base_path="unused")


def _load(path, tensorflow=None):
    return Servable("digits", 1, path, tensorflow or load_runtime(), OPTIONS)


def test_both_roads_into_tensorflow_answer_the_same(saved_models, images, expected):
    for tensorflow in (runtime._narrow(), runtime._public()):
        servable = _load(saved_models / "1", tensorflow)
        outputs = servable.signature("").run({"image": images})
        np.testing.assert_allclose(outputs["logits"], expected[1]["logits"], rtol=1e-5)
        assert servable.close(time.monotonic() + 1)


def test_without_the_parts_all_of_tensorflow_is_used(monkeypatch, caplog):
    def moved():
        raise ImportError("no module named tensorflow.python.client")

    monkeypatch.setattr(runtime, "_loaded", None)
    monkeypatch.setattr(runtime, "_narrow", moved)
    assert load_runtime().loader is runtime._PublicLoader
    assert "importing all of it" in caplog.text


def test_without_the_private_callable_the_session_runs(saved_models, images, expected, caplog):
    found = load_runtime()

    class Session(found.session):
        _make_callable_from_options = None

    plain = runtime.Runtime(found.graph, Session, found.loader, found.op_error, found.config_pb2)
    servable = _load(saved_models / "1", plain)
    outputs = servable.signature("").run({"image": images})
    np.testing.assert_allclose(outputs["logits"], expected[1]["logits"], rtol=1e-5)
    assert "requests cost more" in caplog.text


def test_signatures_of_old_models(tmp_path):
    """One tensor under two names, and a sparse input, as TensorFlow 1 wrote them."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (None,), "x")
        y = tf.identity(x * 2, "y")
        sparse = v1.sparse_placeholder(tf.float32, name="s")
        info = v1.saved_model.utils.build_tensor_info
        definitions = {
            "twice": v1.saved_model.build_signature_def(
                {"x": info(x)}, {"b": info(y), "a": info(y), "c": info(x)}
            ),
            "sparse": v1.saved_model.build_signature_def({"s": info(sparse)}, {"y": info(y)}),
        }
        builder = v1.saved_model.Builder(str(tmp_path / "old"))
        builder.add_meta_graph_and_variables(session, ["serve"], definitions)
        builder.save()
    servable = _load(tmp_path / "old")
    outputs = servable.signature("twice").run({"x": np.float32([1, 2])})
    assert {name: array.tolist() for name, array in outputs.items()} == {
        "a": [2, 4],
        "b": [2, 4],
        "c": [1, 2],
    }
    with pytest.raises(Refused, match="sparse or composite"):
        servable.signature("sparse").run({"s": np.float32([1])})
    with pytest.raises(Refused, match='key "serving_default" not found') as caught:
        servable.signature("")
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_a_servable_waits_for_its_callers_and_takes_no_more(saved_models):
    servable = _load(saved_models / "1")
    assert servable.acquire()
    assert not servable.close(time.monotonic() + 0.05)
    assert not servable.acquire()
    servable.release()
    assert servable.close(time.monotonic() + 1)


# ---- warm-up


def _record(data):
    def masked(part):
        crc = crc32c.crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def _logs(folder, *logs):
    (folder / "assets.extra").mkdir(exist_ok=True)
    (folder / FILE).write_bytes(b"".join(_record(log.SerializeToString()) for log in logs))


@pytest.fixture
def version(base_path):
    return base_path / "1"


def _example_log(kind, image):
    log = prediction_log_pb2.PredictionLog()
    request = getattr(log, f"{kind}_log").request
    request.model_spec.name = "digits"
    request.model_spec.signature_name = kind
    example = example_pb2.Example()
    example.features.feature["image"].bytes_list.value.append(image.tobytes())
    request.input.example_list.examples.append(example)
    return log


def test_every_kind_of_request_warms_up(version, images):
    assert warm_up(_load(version), OPTIONS) == 0
    _logs(version, _example_log("classify", images[0]), _example_log("regress", images[0]))
    assert warm_up(_load(version), OPTIONS) == 2


def test_warm_up_can_be_repeated_or_left_out(version, images):
    servable = _load(version)
    _logs(version, _example_log("classify", images[0]))
    runs = []
    classify = servable.signatures["classify"]
    real = classify.run
    classify.run = lambda given: runs.append(1) or real(given)
    assert warm_up(servable, replace(OPTIONS, warm_up_iterations=3)) == 1
    assert len(runs) == 3
    assert warm_up(servable, replace(OPTIONS, warm_up=False)) == 0
    assert len(runs) == 3


def test_several_inferences_warm_up_too(version, images):
    """The digits' heads have inputs of their own, which MultiInference refuses: so the one head alone."""
    log = prediction_log_pb2.PredictionLog()
    request = log.multi_inference_log.request
    request.input.CopyFrom(_example_log("regress", images[0]).regress_log.request.input)
    task = request.tasks.add(method_name="tensorflow/serving/regress")
    task.model_spec.name, task.model_spec.signature_name = "digits", "regress"
    _logs(version, log)
    assert warm_up(_load(version), OPTIONS) == 1


def test_warm_ups_that_can_not_be_run_are_told(version, images):
    servable = _load(version)
    session_run = prediction_log_pb2.PredictionLog()
    session_run.session_run_log.SetInParent()
    _logs(version, _example_log("classify", images[0]), session_run)
    with pytest.raises(
        Refused, match="warm-up request 2 failed: Unsupported log_type for warmup: session_run_log"
    ):
        warm_up(servable, OPTIONS)
    (version / FILE).write_bytes(_record(b"\xff no message"))
    with pytest.raises(Refused, match="warm-up file"):
        warm_up(servable, OPTIONS)
    _logs(version, *[_example_log("regress", images[0])] * 1001)
    with pytest.raises(Refused, match="exceeds the maximum of 1000"):
        warm_up(servable, OPTIONS)


def _flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


WHOLE = _record(b"payload")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE[:5], "ends within a record header at byte 0"),
        (_flip(WHOLE, 0), "corrupt record length"),
        (WHOLE[:15], "ends within the record"),
        (WHOLE + _flip(WHOLE, 13), "corrupt record at byte 23"),
        (_record(b"x" * 101), "has a record of 101 bytes at byte 0, over 100"),
    ],
)
def test_damaged_record_files_are_told(tmp_path, data, message):
    file = tmp_path / "records"
    file.write_bytes(data)
    with pytest.raises(CorruptRecord, match=message):
        list(read_records(file, max_bytes=100))


def test_records_are_tensorflow_s(tmp_path):
    import tensorflow as tf

    file = tmp_path / "records"
    with tf.io.TFRecordWriter(str(file)) as writer:
        writer.write(b"one")
        writer.write(b"")
    assert list(read_records(file, max_bytes=100)) == [b"one", b""]


def test_labels_of_metrics_are_escaped():
    metrics = Metrics()
    metrics.request('a"b\\c\nd', "Predict", "GRPC", "OK", 25.0)
    metrics.examples("m", 3)
    page = metrics.page()
    labels = 'model_name="a\\"b\\\\c\\nd",API="Predict",entrypoint="GRPC"'
    assert f':tensorflow:serving:request_latency_bucket{{{labels},le="10"}} 0' in page
    assert f':tensorflow:serving:request_latency_bucket{{{labels},le="32.4"}} 1' in page
    assert ':tensorflow:serving:request_example_count_total{model="m"} 3' in page
