"""A trainer module: 13 measurements of a wine to the one of three cultivars that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

CLASSES = ["first", "second", "third"]

TYPICAL = {
    "alcohol": 13.0,
    "malic_acid": 2.3,
    "ash": 2.4,
    "alcalinity_of_ash": 19.5,
    "magnesium": 100.0,
    "total_phenols": 2.3,
    "flavanoids": 2.0,
    "nonflavanoid_phenols": 0.4,
    "proanthocyanins": 1.6,
    "color_intensity": 5.0,
    "hue": 1.0,
    "od280_od315": 2.6,
    "proline": 750.0,
}


def build_model(hparams: Mapping[str, Any]) -> keras.Model:
    """One input a column, named like it; logits out. Scaling is part of the model, so serving can't forget it."""
    import keras

    columns = [keras.Input((), name=name) for name in TYPICAL]
    scaled = [
        keras.layers.Rescaling(2 / TYPICAL[column.name], offset=-2)(keras.layers.Reshape((1,))(column))
        for column in columns
    ]
    x = keras.layers.Concatenate()(scaled)
    x = keras.layers.Dense(int(hparams.get("units", 16)), activation="relu")(x)
    return keras.Model(columns, keras.layers.Dense(len(CLASSES), name="logits")(x), name="wine")


def loss(hparams: Mapping[str, Any]) -> keras.losses.Loss:
    """Cross-entropy of logits and labels."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metrics(hparams: Mapping[str, Any]) -> list[keras.metrics.Metric]:
    """What is logged while it trains."""
    import keras

    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
