"""The trainer of the flights example: by how many minutes a flight will arrive late, as known when it departs.

A dense network beside a straight line from the departure delay. Numbers are normalised and categories looked up by
layers that are made from the statistics of the records, without a pass over the data; they are part of the model, so
the server takes raw values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

    from trainers.records.read import RecordsDataset

__all__ = ["CATEGORIES", "NUMBERS", "build_model", "loss"]

NUMBERS = ("dep_delay", "distance", "dep_minute", "arr_minute", "weekday")
CATEGORIES = {"carrier": 4, "origin": 2, "dest": 8}
"""Each category, and the width of its embedding."""


def build_model(hparams: Mapping[str, Any], records: RecordsDataset) -> keras.Model:
    """Raw columns [batch] to minutes [batch, 1]; `units` sets the width."""
    import keras

    statistics = records.manifest.statistics["train"]
    integers = {feature.name for feature in records.schema if feature.type == "int64"}
    inputs, parts = [], []
    for name in NUMBERS:
        column = keras.Input((), name=name, dtype="int64" if name in integers else "float32")
        inputs.append(column)
        flat = keras.layers.Reshape((1,))(column)
        mean, std = statistics[name]["mean"], statistics[name]["std"] or 1.0
        # A layer of weights would be trained or saved; scale and offset are neither.
        parts.append(keras.layers.Rescaling(1 / std, offset=-mean / std, name=f"{name}_scaled")(flat))
    for name, width in CATEGORIES.items():
        column = keras.Input((), name=name, dtype="string")
        inputs.append(column)
        domain = records.schema[name].domain or {}
        known = sorted(domain.get("values") or [value for value, _ in statistics[name]["top"]])
        index = keras.layers.StringLookup(vocabulary=known, name=f"{name}_index")(column)
        parts.append(keras.layers.Embedding(len(known) + 1, width, name=f"{name}_vector")(index))
    x = keras.layers.Concatenate()(parts)
    units = int(hparams.get("units", 64))
    x = keras.layers.Dense(units, activation="relu")(x)
    x = keras.layers.Dense(units // 2, activation="relu")(x)
    # In units of the label's own spread, so that the first step is neither too small nor too large.
    spread, center = statistics["arr_delay"]["std"] or 1.0, statistics["arr_delay"]["mean"]
    line = keras.layers.Dense(1, use_bias=False, name="line")(parts[0])
    minutes = keras.layers.Add()([keras.layers.Dense(1, name="rest")(x), line])
    minutes = keras.layers.Rescaling(spread, offset=center, name="minutes")(minutes)
    return keras.Model(inputs, minutes, name="flights")


def loss(hparams: Mapping[str, Any]) -> keras.losses.Loss:
    """Huber's: squared below 15 minutes, absolute above, since a few flights are late by hours."""
    import keras

    return keras.losses.Huber(delta=15.0)
