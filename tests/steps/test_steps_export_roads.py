"""Training and serving can't skew: the training's own road against both signatures, fed by hand from the raw rows.

Each row goes three ways: raw -> our records -> the training pipeline -> the trained model; raw -> an Example that is
written here, with missing values left out -> signature `examples`; raw -> tensors, as a client has them -> signature
`serving_default`. The answers are those of a SavedModel that is loaded from the disk: both signatures the same bit for
bit, and the trained model's own to a millionth.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from trainers import export
from trainers.exporting.loading import NotLoadable
from trainers.records.build import prepare
from trainers.records.read import RecordsDataset
from trainers.runtime.restore import load_trained
from trainers.task import call

# (name, type, what a client sends where there is nothing)
COLUMNS = [
    ("area", "float", float("nan")),  # a number, sometimes missing
    ("size", "float", None),
    ("rooms", "int", None),
    ("floor", "int", -1),  # an integer, sometimes missing
    ("city", "string", ""),  # text, sometimes missing, with values that training never saw
    ("kind", "string", None),
]


@pytest.fixture(scope="module")
def flats(tmp_path_factory):
    """A table with gaps: the manifest, and its rows by id."""
    folder = tmp_path_factory.mktemp("flats")
    rng = np.random.default_rng(5)
    rows = {}
    for i in range(300):
        rows[f"flat-{i}"] = {
            "area": "" if i % 5 == 0 else f"{rng.uniform(20, 200):.3f}",
            "size": f"{rng.normal(5, 2):.4f}",
            "rooms": str(rng.integers(1, 6)),
            "floor": "" if i % 6 == 0 else str(rng.integers(0, 9)),
            "city": "" if i % 7 == 0 else ["Oslo", "Bergen", "Tromsø", f"village {i}"][i % 4],
            "kind": "abc"[i % 3],
            "price": f"{rng.uniform(1, 9):.3f}",
        }
    with (folder / "flats.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, ["id", *next(iter(rows.values()))])
        table.writeheader()
        table.writerows({"id": key, **row} for key, row in rows.items())
    manifest = prepare(
        folder / "flats.csv",
        folder / "records",
        name="flats",
        label="price",
        key="id",
        progress=lambda line: None,
    )
    return manifest, rows


HEAD = """
    import keras
    import tensorflow as tf
    def loss(hparams):
        return keras.losses.MeanSquaredError()
"""

ADAPTED = (
    HEAD
    + """
    def build_model(hparams, records):
        def column(name):
            return records.dataset("train", 64).map(lambda batch: batch[name][:, None])
        inputs = {
            "area": keras.Input((), name="area"), "size": keras.Input((), name="size"),
            "rooms": keras.Input((), name="rooms", dtype="int64"),
            "floor": keras.Input((), name="floor", dtype="int64"),
            "city": keras.Input((), name="city", dtype="string"),
            "kind": keras.Input((), name="kind", dtype="string"),
        }
        size = keras.layers.Normalization(axis=None)
        size.adapt(column("size"))
        bins = keras.layers.Discretization(num_bins=4, output_mode="one_hot")
        bins.adapt(column("size"))
        city = keras.layers.StringLookup(output_mode="one_hot")
        city.adapt(column("city"))
        floor = keras.layers.IntegerLookup(output_mode="one_hot")
        floor.adapt(column("floor"))
        crossed = keras.layers.HashedCrossing(num_bins=16, output_mode="one_hot")
        one = lambda x: keras.layers.Reshape((1,))(x)
        area = keras.ops.where(keras.ops.isnan(one(inputs["area"])), 0.0, one(inputs["area"])) / 100.0
        parts = [
            area, size(one(inputs["size"])), bins(one(inputs["size"])), city(one(inputs["city"])),
            floor(one(inputs["floor"])), crossed((one(inputs["kind"]), one(inputs["rooms"]))),
            keras.ops.cast(one(inputs["rooms"]), "float32"),
        ]
        x = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(parts))
        return keras.Model(list(inputs.values()), keras.layers.Dense(1)(x))
"""
)

FROM_STATISTICS = (
    HEAD
    + """
    from trainers.records import layers
    def build_model(hparams, records):
        size = keras.Input((), name="size")
        floor = keras.Input((), name="floor", dtype="int64")
        city = keras.Input((), name="city", dtype="string")
        kind = keras.Input((), name="kind", dtype="string")
        one = lambda x: keras.layers.Reshape((1,))(x)
        parts = [
            layers.normalization(records, "size")(one(size)),
            layers.discretization(records, "size", 4, output_mode="one_hot")(one(size)),
            layers.integer_lookup(records, "floor", output_mode="one_hot")(one(floor)),
            layers.string_lookup(records, "city", least=3, output_mode="one_hot")(one(city)),
            keras.layers.Flatten()(keras.layers.Embedding(9, 3)(layers.string_lookup(records, "kind")(one(kind)))),
        ]
        return keras.Model([size, floor, city, kind], keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
"""
)

MODULE = (
    HEAD
    + """
    class Flats(tf.Module):
        def __init__(self):
            super().__init__()
            self.features = ("area", "city", "floor")
            keys, values = tf.constant(["Oslo", "Bergen"]), tf.constant([1.0, 2.0])
            pairs = tf.lookup.KeyValueTensorInitializer(keys, values)
            self.cities = tf.lookup.StaticHashTable(pairs, 0.25)
            self.weights = tf.Variable([0.1, 0.7, 1.3])
        def __call__(self, features):
            area = tf.where(tf.math.is_nan(features["area"]), 50.0, features["area"])
            parts = [area, self.cities.lookup(features["city"]), tf.cast(features["floor"], tf.float32)]
            return {"predictions": tf.tensordot(tf.stack(parts, axis=1), self.weights, 1)}
    def build_model(hparams):
        return Flats()
"""
)


def by_hand(row, names):
    """A row as a client of the signature `examples` writes it: what is missing is not there."""
    example = tf.train.Example()
    for name, kind, _ in COLUMNS:
        if name not in names or row[name] == "":
            continue
        feature = example.features.feature[name]
        if kind == "float":
            feature.float_list.value.append(float(row[name]))
        elif kind == "int":
            feature.int64_list.value.append(int(row[name]))
        else:
            feature.bytes_list.value.append(row[name].encode())
    return example.SerializeToString()


def tensors(rows, signature):
    """Rows as a client of `serving_default` has them."""
    out = {}
    for name, kind, missing in COLUMNS:
        if name in signature:
            read = {"float": float, "int": int, "string": str}[kind]
            values = [missing if row[name] == "" else read(row[name]) for row in rows]
            out[name] = tf.constant(values, dtype=signature[name].dtype)
    return out


@pytest.mark.parametrize("text", [ADAPTED, FROM_STATISTICS, MODULE], ids=["adapted", "statistics", "module"])
@pytest.mark.usefixtures("loads_here")
def test_three_roads_one_answer(trainer, flats, text):
    manifest, rows = flats
    folder = trainer(text, manifest)
    result = export.main({"job": str(folder)})
    loaded = tf.saved_model.load(result["export"])
    named = loaded.signatures["serving_default"]
    names = dict(named.structured_input_signature[1])
    records = RecordsDataset.open(manifest.path)
    trained = load_trained(folder)
    seen, answers = 0, set()
    for split in ("train", "eval"):
        for batch in records.dataset(split, 64):
            raw = [rows[key.decode()] for key in batch["id"].numpy()]
            training = call(trained.model, batch)
            training = training["predictions"] if isinstance(training, dict) else training
            by_name = named(**tensors(raw, names))["predictions"]
            by_example = loaded.signatures["examples"](examples=tf.constant([by_hand(r, names) for r in raw]))
            np.testing.assert_array_equal(by_name, by_example["predictions"])
            # Called one by one, operations are not fused as in a graph: the last bit of a float may differ.
            np.testing.assert_allclose(training, by_name, rtol=1e-6, atol=1e-6)
            assert np.isfinite(training).all()
            seen += len(raw)
            answers.update(np.asarray(by_name).ravel().tolist())
    assert seen == len(rows)
    # Not all the same: the features do reach the answers.
    assert len(answers) > 100


def test_a_model_that_only_its_maker_can_run_is_refused(trainer, flats):
    """A tf.py_function holds a token of this process: a server would fail at the first request."""
    text = (
        HEAD
        + """
    class Python(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(2.0)
        def __call__(self, features):
            doubled = tf.py_function(lambda x: 2 * x, [features["size"]], tf.float32)
            return {"predictions": tf.ensure_shape(doubled, [None]) * self.weight}
    def build_model(hparams):
        return Python()
"""
    )
    folder = trainer(text, flats[0])
    with pytest.raises(NotLoadable, match="a process of its own") as caught:
        export.main({"job": str(folder)})
    assert "py_function" in caught.value.hint
    assert not (folder / "export").exists()
    assert [p for p in folder.iterdir() if p.name.startswith(".")] == []


def test_the_same_checkpoint_exports_to_the_same_model(trainer, flats, tmp_path):
    """By two processes of their own, as two tries of the step are. TensorFlow orders its graph as it likes."""
    import os
    import subprocess
    import sys

    folder = trainer(FROM_STATISTICS, flats[0])
    outputs = []
    for i in range(2):
        target = tmp_path / f"export-{i}"
        spec = json.dumps({"job": str(folder), "output": str(target)})
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())]),
            "PYTHONHASHSEED": str(i),
        }
        env["TRAINYARD_TERMINATION_LOG"] = str(tmp_path / "log")
        run = subprocess.run(
            [sys.executable, "-m", "trainers.export", "--spec", spec],
            env=env, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        outputs.append(json.loads((target / "export.json").read_text()))
    one, two = (output["files"] for output in outputs)
    assert set(one) == set(two)
    graph = {"saved_model.pb", "fingerprint.pb", "variables/variables.index"}
    graph.add("variables/variables.data-00000-of-00001")
    assert {name for name in one if one[name] != two[name]} <= graph
    assert "golden.json" not in graph  # the answers are the same to the last digit
    assert outputs[0]["load_s"] > 0
    assert outputs[0]["first_answer_s"] > 0
    assert Path(outputs[0]["lineage"]["records"]["manifest"]) == flats[0].path
