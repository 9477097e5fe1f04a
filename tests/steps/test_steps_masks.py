"""A model that takes masks: trained by the default dataset, evaluated, exported and served from both kinds of input."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tests.steps.conftest import quiet
from trainers import evaluate, export
from trainers.records.build import prepare
from trainers.records.read import RecordsDataset
from trainers.runtime.datasets import default_dataset, model_features
from trainers.runtime.restore import load_trained

MODEL = """
    import keras
    def build_model(hparams):
        km = keras.Input((), name="km", dtype="float32")
        none = keras.Input((), name="km_missing", dtype="int64")
        there = keras.layers.Reshape((1,))(km)
        gone = keras.layers.Reshape((1,))(keras.ops.cast(none, "float32"))
        both = keras.layers.Concatenate()([there, gone])
        return keras.Model([km, none], keras.layers.Dense(1, kernel_initializer="ones", name="fare")(both))
    def loss(hparams):
        return keras.losses.MeanSquaredError()
"""


class Context:
    """What `default_dataset` asks of its context."""

    shard, batch_size, seed, draws_seeds, start_step, devices = (0, 1), 32, 1, False, 0, 1

    def shuffle_seed(self):
        return 1


@pytest.mark.parametrize(("layout", "compression"), [("rows", "GZIP"), ("blocks", "")])
def test_masks_from_records_to_the_served_model(layout, compression, trainer, tmp_path):
    rng = np.random.default_rng(0)
    km = pa.array(rng.random(300), mask=rng.random(300) < 0.3)
    fare = [1.0 if v is None else v for v in km.to_pylist()]
    (tmp_path / "schema.json").write_text(
        json.dumps(
            {
                "version": 1,
                "features": [
                    {"name": "km", "type": "float32", "presence": "optional", "default": 0.0},
                    {"name": "fare", "type": "float32"},
                ],
            }
        )
    )
    pq.write_table(pa.table({"km": km, "fare": fare}), tmp_path / "raw.parquet")
    manifest = prepare(
        tmp_path / "raw.parquet", tmp_path / "records", name="taxi", label="fare", layout=layout,
        compression=compression, schema=tmp_path / "schema.json", progress=quiet,
    )  # fmt: skip
    job = trainer(MODEL, manifest)
    model = load_trained(job).model
    records = RecordsDataset.open(manifest.path)
    assert model_features(model, records) == ["km", "km_missing"]
    features, label = next(iter(default_dataset(records, Context(), ["km", "km_missing"])))
    np.testing.assert_allclose(features["km"] + tf.cast(features["km_missing"], tf.float32), label, atol=1e-6)
    result = evaluate.main({"job": str(job)})
    assert result["metrics"]["loss"] == pytest.approx(0, abs=1e-9)
    exported = export.main({"job": str(job)})
    loaded = tf.saved_model.load(str(Path(exported["export"])))
    there = tf.train.Example()
    there.features.feature["km"].float_list.value.append(0.25)
    examples = tf.constant([there.SerializeToString(), tf.train.Example().SerializeToString()])
    answers = loaded.signatures["examples"](examples=examples)["predictions"].numpy().reshape(-1)
    np.testing.assert_allclose(answers, [0.25, 1.0], atol=1e-6)
    tensors = {"km": tf.constant([0.25, 0.0]), "km_missing": tf.constant([0, 1], tf.int64)}
    answers = loaded.signatures["serving_default"](**tensors)["predictions"].numpy().reshape(-1)
    np.testing.assert_allclose(answers, [0.25, 1.0], atol=1e-6)
