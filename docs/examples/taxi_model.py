"""A trainer module whose preprocessing comes from the records' statistics: no adapt(), no pass over the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

    from trainers.records.read import RecordsDataset


def build_model(hparams: Mapping[str, Any], records: RecordsDataset) -> keras.Model:
    """Raw columns in, the fare out; zones of fewer than 20 rides are out of the vocabulary."""
    import keras

    from trainers.records import layers

    km = keras.Input((), name="km")
    zone = keras.Input((), name="zone", dtype="string")
    index = layers.string_lookup(records, "zone", least=20)
    parts = [
        layers.normalization(records, "km")(keras.layers.Reshape((1,))(km)),
        layers.discretization(records, "km", 4, output_mode="one_hot")(km),
        keras.layers.Embedding(index.vocabulary_size(), 4)(index(zone)),
    ]
    x = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(parts))
    return keras.Model([km, zone], keras.layers.Dense(1, name="fare")(x), name="taxi")


def loss(hparams: Mapping[str, Any]) -> keras.losses.Loss:
    """Squared error of the fare."""
    import keras

    return keras.losses.MeanSquaredError()
