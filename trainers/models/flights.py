"""The trainer of the flights example: by how many minutes a flight will arrive late, as known when it departs.

A dense network beside a straight line from the departure delay. Numbers are normalised, the time of day is cut into
bins and categories are looked up by Keras' own layers, whose state comes from the statistics of the records without a
pass over the data (see trainers.records.layers). They are part of the model, so the server takes raw values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

    from trainers.records.read import RecordsDataset

__all__ = ["BINNED", "CATEGORIES", "NUMBERS", "build_model", "loss"]

NUMBERS = ("dep_delay", "distance", "dep_minute", "arr_minute", "weekday")
BINNED = {"dep_minute": 8}
"""Numbers of which the time of day matters more than the size, and into how many bins of equal shares they go."""
CATEGORIES = {"carrier": 4, "origin": 2, "dest": 8}
"""Each category, and the width of its embedding."""


def build_model(hparams: Mapping[str, Any], records: RecordsDataset) -> keras.Model:
    """Raw columns [batch] to minutes [batch, 1]; `units` sets the width."""
    import keras

    from trainers.records import layers

    integers = {feature.name for feature in records.schema if feature.type == "int64"}
    inputs, parts = [], []
    for name in NUMBERS:
        column = keras.Input((), name=name, dtype="int64" if name in integers else "float32")
        inputs.append(column)
        parts.append(layers.normalization(records, name)(keras.layers.Reshape((1,))(column)))
        if name in BINNED:
            parts.append(layers.discretization(records, name, BINNED[name], output_mode="one_hot")(column))
    for name, width in CATEGORIES.items():
        column = keras.Input((), name=name, dtype="string")
        inputs.append(column)
        index = layers.string_lookup(records, name)
        vector = keras.layers.Embedding(index.vocabulary_size(), width, name=f"{name}_vector")
        parts.append(vector(index(column)))
    x = keras.layers.Concatenate()(parts)
    units = int(hparams.get("units", 64))
    x = keras.layers.Dense(units, activation="relu")(x)
    x = keras.layers.Dense(units // 2, activation="relu")(x)
    # In units of the label's own spread, so that the first step is neither too small nor too large.
    label = records.manifest.statistics["train"]["arr_delay"]
    line = keras.layers.Dense(1, use_bias=False, name="line")(parts[0])
    minutes = keras.layers.Add()([keras.layers.Dense(1, name="rest")(x), line])
    minutes = keras.layers.Rescaling(label["std"] or 1.0, offset=label["mean"], name="minutes")(minutes)
    return keras.Model(inputs, minutes, name="flights")


def loss(hparams: Mapping[str, Any]) -> keras.losses.Loss:
    """Huber's: squared below 15 minutes, absolute above, since a few flights are late by hours."""
    import keras

    return keras.losses.Huber(delta=15.0)
