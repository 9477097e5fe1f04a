"""Small SavedModels, exports as the trainer side writes them, and model servers in this process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.client import PredictClient
from serving.server.app import ModelServer
from serving.server.flags import Options
from serving.stubs import model_server_config_pb2, prediction_log_pb2
from serving.tensors import to_proto

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _save_digits(path: Path, scale: int) -> None:
    import tensorflow as tf

    class Digits(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = tf.Variable(tf.random.stateless_normal((64, 10), seed=(scale, 7)))
            self.names = tf.constant([f"digit {i}" for i in range(10)])

        @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.uint8, name="image")])
        def raw(self, image):
            logits = tf.cast(tf.reshape(image, (-1, 64)), tf.float32) / 255.0 @ self.weights
            return {
                "logits": logits,
                "probabilities": tf.nn.softmax(logits),
                "classes": tf.argmax(logits, axis=1),
            }

        def parsed(self, serialized):
            parsed = tf.io.parse_example(serialized, {"image": tf.io.FixedLenFeature([], tf.string)})
            pixels = tf.io.decode_raw(parsed["image"], tf.uint8)
            return self.raw(tf.reshape(pixels, (-1, 8, 8, 1)))

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="examples")])
        def examples(self, examples):
            return self.parsed(examples)

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="inputs")])
        def classify(self, inputs):
            scores = self.parsed(inputs)["probabilities"]
            return {"scores": scores, "classes": tf.tile(self.names[None, :], [tf.shape(scores)[0], 1])}

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="inputs")])
        def regress(self, inputs):
            return {"outputs": tf.reduce_max(self.parsed(inputs)["probabilities"], axis=1)}

    model = Digits()
    signatures = {
        "serving_default": model.raw,
        "examples": model.examples,
        "classify": model.classify,
        "regress": model.regress,
    }
    tf.saved_model.save(model, str(path), signatures=signatures)


def _save_kinds(path: Path) -> None:
    """A model of many types: two inputs, strings, bytes, scalars, every number."""
    import tensorflow as tf

    class Kinds(tf.Module):
        @tf.function(
            input_signature=[
                tf.TensorSpec((None, 2), tf.float32, name="numbers"),
                tf.TensorSpec((None,), tf.string, name="names"),
            ]
        )
        def two(self, numbers, names):
            return {
                "total": tf.reduce_sum(numbers, axis=1),
                "upper": tf.strings.upper(names),
                "echo_bytes": tf.identity(names),
            }

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32, name="x")])
        def scalar(self, x):
            return {"mean": tf.reduce_mean(x), "x": x * 1.0}

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="names")])
        def upper(self, names):
            return {"upper": tf.strings.upper(names)}

    model = Kinds()
    functions: dict[str, Any] = {
        "serving_default": model.two,
        "scalar": model.scalar,
        "upper": model.upper,
    }
    for name in (
        "float16",
        "float64",
        "int8",
        "int32",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "bfloat16",
        "complex64",
    ):
        dtype = tf.dtypes.as_dtype(name)
        functions[name] = tf.function(
            lambda x: {"y": tf.identity(x)}, input_signature=[tf.TensorSpec(None, dtype, name="x")]
        ).get_concrete_function()
    tf.saved_model.save(model, str(path), signatures=functions)


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders 1, 2, 3 (digits, different weights) and `kinds`: copy from here, change nothing."""
    root = tmp_path_factory.mktemp("saved-models")
    for version in (1, 2, 3):
        _save_digits(root / str(version), version)
    _save_kinds(root / "kinds")
    return root


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)


@pytest.fixture(scope="session")
def expected(saved_models: Path, images: np.ndarray) -> dict[int, dict[str, np.ndarray]]:
    """TensorFlow's own answers for `images`, by version."""
    import tensorflow as tf

    answers = {}
    for version in (1, 2, 3):
        loaded = tf.saved_model.load(str(saved_models / str(version)))
        outputs = loaded.signatures["serving_default"](image=tf.constant(images))
        answers[version] = {name: tensor.numpy() for name, tensor in outputs.items()}
    return answers


def _tensor(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "values": array.tolist()}


@pytest.fixture(scope="session")
def exports(
    saved_models: Path,
    images: np.ndarray,
    expected: dict[int, dict[str, np.ndarray]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, Path]:
    """Export folders of the digits models: SavedModel, warm-up requests, golden examples, manifest."""
    import tensorflow as tf

    root = tmp_path_factory.mktemp("exports")
    folders = {}
    for version in (1, 2, 3):
        folder = root / f"export-{version}"
        shutil.copytree(saved_models / str(version), folder)
        warm_up = prediction_log_pb2.PredictionLog()
        request = warm_up.predict_log.request
        request.model_spec.name = "digits"
        to_proto(images[:1], request.inputs["image"])
        (folder / "assets.extra").mkdir()
        with tf.io.TFRecordWriter(str(folder / "assets.extra" / "tf_serving_warmup_requests")) as writer:
            writer.write(warm_up.SerializeToString())
        outputs = {name: _tensor(array) for name, array in expected[version].items()}
        golden = {
            "signature": "serving_default",
            "inputs": {"image": _tensor(images)},
            "outputs": outputs,
            "labels": [1, 2, 3, 4],
            "tolerance": 1e-4,
        }
        (folder / "golden.json").write_text(json.dumps(golden))
        write_manifest(folder)
        folders[version] = folder
    return folders


def write_manifest(folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / "export.json"
    }
    listed = "".join(f"{name} {files[name]['sha256']}\n" for name in sorted(files))
    manifest = {
        "format": 1,
        "files": files,
        "digest": hashlib.sha256(listed.encode()).hexdigest(),
        "signatures": {"serving_default": {}, "examples": {}},
        "records_digest": "d" * 64,
        "job": "digits",
        "run_id": "run",
        "trainer": "trainers.models.digits",
        "code_version": "c0ffee",
        "created": "2026-01-01T00:00:00+00:00",
        "classes": None,
    }
    (folder / "export.json").write_text(json.dumps(manifest))


@pytest.fixture
def fake_export(tmp_path: Path) -> Callable[..., Path]:
    """Makes export folders of a few bytes, for tests that load no model."""

    def make(content: str = "graph", name: str = "export") -> Path:
        folder = tmp_path / name
        (folder / "variables").mkdir(parents=True)
        (folder / "saved_model.pb").write_text(content)
        (folder / "variables" / "variables.index").write_text(content * 3)
        (folder / "golden.json").write_text("{}")
        write_manifest(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Any]:
    """ModelServerConfig of name -> (base_path, versions or policy name, labels)."""

    def make(**models: tuple[Path, Any, dict[str, int]]) -> Any:
        config = model_server_config_pb2.ModelServerConfig()
        config.model_config_list.SetInParent()
        for name, (base_path, versions, labels) in models.items():
            model = config.model_config_list.config.add(
                name=name, base_path=str(base_path), model_platform="tensorflow"
            )
            if versions == "all":
                model.model_version_policy.all.SetInParent()
            elif isinstance(versions, int):
                model.model_version_policy.latest.num_versions = versions
            elif versions:
                model.model_version_policy.specific.versions.extend(versions)
            model.version_labels.update(labels)
        return config

    return make


@pytest.fixture
def base_path(saved_models: Path, tmp_path: Path) -> Path:
    """A model's base path with version 1 in it."""
    shutil.copytree(saved_models / "1", tmp_path / "models" / "digits" / "1")
    return tmp_path / "models" / "digits"


@pytest.fixture(scope="session")
def add_version(saved_models: Path) -> Callable[..., None]:
    """Publish a version as releases do: whole, by one rename."""

    def add(base_path: Path, version: int, *, source: str | int = 2, corrupt: bool = False) -> None:
        staging = base_path / f".staging-{version}"
        shutil.copytree(saved_models / str(source), staging)
        if corrupt:
            (staging / "variables" / "variables.data-00000-of-00001").write_bytes(b"garbage")
        staging.rename(base_path / str(version))

    return add


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., ModelServer]]:
    """Starts model servers in this process on free ports, and stops them after the test."""
    running: list[ModelServer] = []

    def start(config: Any = None, *, wait: bool = True, **options: Any) -> ModelServer:
        path = tmp_path / f"models-{len(running)}.config"
        if config is not None:
            path.write_text(str(config))
        defaults = {
            "port": 0,
            "rest_api_port": 0,
            "model_config_file": path,
            "poll_s": 0.05,
            "load_retry_s": 0.01,
            "drain_s": 5.0,
        }
        server = ModelServer(Options(**{**defaults, **options}))
        running.append(server)
        server.start()
        if wait:
            assert server.wait_ready(60)
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def shared_server(
    saved_models: Path, tmp_path_factory: pytest.TempPathFactory, make_config: Any
) -> Iterator[ModelServer]:
    """One server with digits 1 (stable) and 2 (canary), and kinds; for tests that change nothing."""
    root = tmp_path_factory.mktemp("shared")
    for name in ("1", "2"):
        shutil.copytree(saved_models / name, root / "digits" / name)
    shutil.copytree(saved_models / "kinds", root / "kinds" / "5")
    config = make_config(
        digits=(root / "digits", [1, 2], {"stable": 1, "canary": 2}),
        kinds=(root / "kinds", None, {"stable": 5}),
    )
    path = root / "models.config"
    path.write_text(str(config))
    server = ModelServer(Options(port=0, rest_api_port=0, model_config_file=path, max_message_bytes=1 << 20))
    server.start()
    assert server.wait_ready(60)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client_of() -> Iterator[Callable[..., PredictClient]]:
    """A gRPC client of a server object."""
    opened: list[PredictClient] = []

    def make(server: ModelServer, model: str = "digits", **options: Any) -> PredictClient:
        opened.append(PredictClient(f"127.0.0.1:{server.port}", model, **options))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition, at most 20 s."""

    def wait(condition: Callable[[], Any], what: str = "condition") -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true in 20 s"
            time.sleep(0.01)

    return wait
