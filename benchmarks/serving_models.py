"""Make what benchmarks/serving.py serves and asks: serving_models.py FOLDER

FOLDER/models/{mlp,cnn}/1        SavedModels: 784-500-10 on pictures as rows, and a convolutional one of 10 MB
FOLDER/mlflow/{mlp,cnn}          the same functions as MLflow models
FOLDER/exports/{1,2,3}           the convolutional one with other weights each, as an export step writes it
FOLDER/requests/MODEL-BATCH.*    bodies: .grpc of TF Serving's Predict, .json of its REST API and MLflow's,
                                 .v2grpc and .v2json of the Open Inference Protocol that MLServer speaks
FOLDER/requests/MODEL-BATCH.npy  the right answer, .answer as a PredictResponse
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from serving.stubs import predict_pb2
from serving.tensors import to_proto
from trainers.exporting import package
from trainers.exporting.golden import Golden, document
from trainers.exporting.warmup import write_warmup

BATCHES = (1, 32)
SHAPES = {"mlp": (784,), "cnn": (28, 28, 1)}
WIDTH = 784


def weight(rng: np.random.Generator, *shape: int) -> tf.Variable:
    return tf.Variable(rng.normal(0, 1 / np.sqrt(np.prod(shape[:-1])), shape).astype("f4"))


class Mlp(tf.Module):
    """784-500-10: 1.6 MB, 0.4 million multiplications an example."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.first, self.second = weight(rng, WIDTH, 500), weight(rng, 500, 10)

    @tf.function(input_signature=[tf.TensorSpec((None, *SHAPES["mlp"]), tf.float32, name="image")])
    def __call__(self, image):
        return tf.nn.softmax(tf.nn.relu(image @ self.first) @ self.second)


class Cnn(tf.Module):
    """Two convolutions and two dense layers: 10 MB, 6.4 million multiplications an example."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.kernels = [weight(rng, 3, 3, 1, 32), weight(rng, 3, 3, 32, 64)]
        self.first, self.second = weight(rng, 7 * 7 * 64, 800), weight(rng, 800, 10)

    @tf.function(input_signature=[tf.TensorSpec((None, *SHAPES["cnn"]), tf.float32, name="image")])
    def __call__(self, image):
        for kernel in self.kernels:
            image = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(image, kernel, 1, "SAME")), 2, 2, "SAME")
        return tf.nn.softmax(tf.nn.relu(tf.reshape(image, (-1, 7 * 7 * 64)) @ self.first) @ self.second)


MODELS = {"mlp": Mlp, "cnn": Cnn}


def save(model: tf.Module, folder: Path, shape: tuple[int, ...]) -> None:
    spec = tf.TensorSpec((None, *shape), tf.float32, name="image")

    @tf.function(input_signature=[spec])
    def serving_default(image):
        return {"probabilities": model(image)}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="examples")])
    def examples(examples):
        return serving_default(
            tf.io.parse_example(examples, {"image": tf.io.FixedLenFeature(shape, tf.float32)})["image"]
        )

    tf.saved_model.save(
        model, str(folder), signatures={"serving_default": serving_default, "examples": examples}
    )


def save_mlflow(model: tf.Module, folder: Path, shape: tuple[int, ...]) -> None:
    """The function as MLflow's quickest road takes it: a tf.Module, called with an array."""
    import mlflow.tensorflow
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    float32 = np.dtype("f4")
    signature = ModelSignature(
        inputs=Schema([TensorSpec(float32, (-1, *shape))]), outputs=Schema([TensorSpec(float32, (-1, 10))])
    )
    requirements = [f"tensorflow=={tf.__version__}"]
    mlflow.tensorflow.save_model(model, str(folder), signature=signature, pip_requirements=requirements)


def export(model: tf.Module, folder: Path, shape: tuple[int, ...], seed: int) -> None:
    """An export folder with golden examples and warm-up requests, as the platform's export step leaves it."""
    images = np.random.default_rng(seed).random((8, *shape), np.float32)
    serialized = np.array(
        [
            tf.train.Example(
                features=tf.train.Features(
                    feature={"image": tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel()))}
                )
            ).SerializeToString()
            for image in images
        ],
        object,
    )
    golden = Golden(serialized, {"image": images}, np.arange(8))
    save(model, folder, shape)
    outputs = {"probabilities": model(images).numpy()}
    (folder / package.GOLDEN).write_text(json.dumps(document(golden, outputs)))
    write_warmup(folder, "cnn", golden)
    facts = {
        "signatures": {"serving_default": {}, "examples": {}},
        "records_digest": "0" * 64, "job": "benchmark", "run_id": str(seed), "trainer": "benchmark",
        "code_version": package.code_version(), "created": 0.0, "classes": None,
    }  # fmt: skip
    package.describe(folder, facts)


def requests(name: str, batch: int, answer: Any, images: np.ndarray, folder: Path) -> None:
    stem = str(folder / f"{name}-{batch}")
    request = predict_pb2.PredictRequest()
    request.model_spec.name = name
    to_proto(images, request.inputs["image"])
    Path(f"{stem}.grpc").write_bytes(request.SerializeToString())
    values = [[float(f"{value:.4g}") for value in image.ravel()] for image in images]
    nested = np.array(values).reshape(images.shape).tolist()
    Path(f"{stem}.json").write_text(json.dumps({"instances": nested}, separators=(",", ":")))
    flat = [value for row in values for value in row]
    tensor = {"name": "input-0", "datatype": "FP32", "shape": list(images.shape), "data": flat}
    v2 = {"parameters": {"content_type": "np"}, "inputs": [tensor]}
    Path(f"{stem}.v2json").write_text(json.dumps(v2, separators=(",", ":")))
    Path(f"{stem}.v2grpc").write_bytes(infer_request(name, images))
    np.save(f"{stem}.npy", answer)
    response = predict_pb2.PredictResponse()
    response.model_spec.name, response.model_spec.signature_name = name, "serving_default"
    response.model_spec.version.value = 1
    to_proto(answer, response.outputs["probabilities"])
    Path(f"{stem}.answer").write_bytes(response.SerializeToString())


def infer_request(name: str, images: np.ndarray) -> bytes:
    """inference.ModelInferRequest of the Open Inference Protocol, written by hand: its stubs are MLServer's."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    def field(number: int, data: bytes | str) -> bytes:
        data = data.encode() if isinstance(data, str) else data
        return varint(number << 3 | 2) + varint(len(data)) + data

    parameter = field(1, "content_type") + field(2, field(3, "np"))
    shape = field(3, b"".join(map(varint, images.shape)))
    tensor = field(1, "input-0") + field(2, "FP32") + shape
    return field(1, name) + field(4, parameter) + field(5, tensor) + field(7, images.tobytes())


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "requests").mkdir(parents=True)
    for name, shape in SHAPES.items():
        model = MODELS[name](seed=1)
        save(model, folder / "models" / name / "1", shape)
        save_mlflow(model, folder / "mlflow" / name, shape)
        for batch in BATCHES:
            # Values with few digits, as pictures scaled to 0..1 have; the same ones in every protocol.
            images = np.random.default_rng(0).integers(0, 256, (batch, *shape)) / 255
            images = np.vectorize(lambda value: float(f"{value:.4g}"))(images).astype("f4")
            requests(name, batch, model(images).numpy(), images, folder / "requests")
    for seed in (1, 2, 3):
        export(Cnn(seed), folder / "exports" / str(seed), SHAPES["cnn"], seed)


if __name__ == "__main__":
    main()
