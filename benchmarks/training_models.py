"""The models that benchmarks/training.py trains: an MLP 784-500-10 and a LeNet-like CNN, as a trainer module.

The peers build the same ones, from `build_model` (Keras) or from `weights` and `logits` (plain TensorFlow).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["build_model", "logits", "loss", "optimizer", "weights"]

LEARNING_RATE = 0.02


def build_model(hparams: Mapping[str, Any]) -> Any:
    """Pictures uint8 [batch, 28, 28, 1] to logits [batch, 10]; hparams["model"] is "mlp" or "cnn"."""
    import keras
    from keras import layers

    image = keras.Input((28, 28, 1), dtype="uint8", name="image")
    x = layers.Rescaling(1 / 255)(image)
    if hparams.get("model", "mlp") == "mlp":
        x = layers.Dense(500, activation="relu")(layers.Flatten()(x))
    else:
        for filters in (16, 32):
            x = layers.Conv2D(filters, 5, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D()(x)
        x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(10)(x))


def loss(hparams: Mapping[str, Any]) -> Any:
    """Cross-entropy of logits and labels."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer(hparams: Mapping[str, Any], learning_rate: float) -> Any:
    """Plain gradient descent, which costs the least: what differs is the way there."""
    import keras

    return keras.optimizers.SGD(learning_rate)


def weights(model: str, tf: Any) -> list[Any]:
    """The same weights as plain tf.Variables, Glorot-uniform and zeros; works in TF1 graphs too."""

    def kernel(*shape: int) -> Any:
        area = shape[0] * shape[1] if len(shape) == 4 else 1
        most = (6.0 / (area * (shape[-2] + shape[-1]))) ** 0.5
        return tf.Variable(tf.random.uniform(shape, -most, most))

    def pair(*shape: int) -> list[Any]:
        return [kernel(*shape), tf.Variable(tf.zeros(shape[-1:]))]

    if model == "mlp":
        return [*pair(784, 500), *pair(500, 10)]
    return [*pair(5, 5, 1, 16), *pair(5, 5, 16, 32), *pair(7 * 7 * 32, 128), *pair(128, 10)]


def logits(model: str, values: list[Any], image: Any, tf: Any) -> Any:
    """Pictures uint8 [batch, 28, 28, 1] to logits, by plain ops on `values` as `weights` made them."""
    x = tf.cast(image, tf.float32) * (1 / 255)
    values = list(values)
    if model == "cnn":
        while len(values) > 4:
            kernel, bias, *values = values
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=1, padding="SAME") + bias)
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    size = 784 if model == "mlp" else 7 * 7 * 32
    w1, b1, w2, b2 = values
    return tf.nn.relu(tf.reshape(x, [-1, size]) @ w1 + b1) @ w2 + b2
