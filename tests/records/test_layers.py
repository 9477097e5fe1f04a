"""Preprocessing layers from statistics: as adapt() makes them, and the same through every road of a model."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.records import layers
from trainers.records.errors import ColumnError, DatasetCorrupt, DatasetMissing, InvalidOption
from trainers.records.read import RecordsDataset

ROWS = 4000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from trainers.records.build import prepare

    folder = tmp_path_factory.mktemp("layers")
    rng = np.random.default_rng(4)
    table = {
        "x": pa.array(rng.gamma(2.0, 30.0, ROWS).astype(np.float32)),
        "n": pa.array(rng.integers(1_000, 1_000_000, ROWS)),
        "code": pa.array(rng.choice([7, 70, 700], ROWS, p=[0.2, 0.5, 0.3])),
        "color": pa.array([["red", "green", "blue", None][i % 4] if i % 50 else "rare" for i in range(ROWS)]),
        "id": pa.array([f"id-{i}" for i in range(ROWS)]),
        "l": pa.array(rng.standard_normal((ROWS, 3)).tolist(), pa.list_(pa.float32(), 3)),
        "y": pa.array(rng.standard_normal(ROWS).astype(np.float32)),
    }
    pq.write_table(pa.table(table), folder / "a.parquet")
    prepared = prepare(folder / "a.parquet", folder / "out", name="t", label="y", progress=lambda line: None)
    return RecordsDataset.open(prepared.path)


@pytest.fixture(scope="module")
def train(data):
    (batch,) = data.dataset("train", ROWS)
    return {name: tensor.numpy() for name, tensor in batch.items()}


def test_normalization_is_what_adapt_makes(data, train):
    import keras

    for name in ("x", "n", "l"):
        ours = layers.normalization(data, name)
        theirs = keras.layers.Normalization(axis=None)
        theirs.adapt(train[name].astype(np.float32))
        values = train[name].astype(np.float32)
        assert np.asarray(ours(values)) == pytest.approx(np.asarray(theirs(values)), abs=1e-4)


def test_bins_hold_equal_shares(data, train):
    layer = layers.discretization(data, "x", 10)
    found = np.asarray(layer(train["x"]))
    assert found.tolist() == np.digitize(train["x"], np.array(layer.bin_boundaries, np.float32)).tolist()
    assert np.bincount(found) / len(found) == pytest.approx([0.1] * 10, abs=0.02)
    # Few values: fewer bins, none empty.
    few = np.asarray(layers.discretization(data, "code", 10)(train["code"].astype(np.float32)))
    assert np.bincount(few).min() > 0


def test_vocabularies_are_by_frequency_and_rare_values_stay_out(data, train):
    color = layers.vocabulary(data, "color")
    values, counts = np.unique(train["color"][train["color"] != b""], return_counts=True)
    want = [v.decode() for _, v in sorted(zip(-counts, values, strict=True))]
    assert list(color.values) == want
    assert layers.vocabulary(data, "code").values == (70, 700, 7)
    kept = layers.string_lookup(data, "color", least=200)
    assert np.asarray(kept(["rare", "", "pink", want[0], want[1]])).tolist() == [0, 0, 0, 1, 2]
    assert np.asarray(layers.string_lookup(data, "color", most=1)([want[1], want[0]])).tolist() == [0, 1]
    codes = layers.integer_lookup(data, "code", output_mode="one_hot")
    assert np.asarray(codes(np.array([70, 5]))).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_a_vocabulary_is_an_artefact_that_only_grows(data, tmp_path):
    layers.Vocabulary("color", ("gone", "blue")).save(tmp_path / "old.json")
    old = layers.Vocabulary.load(tmp_path / "old.json")
    grown = layers.vocabulary(data, "color", after=old)
    assert grown.values[:2] == ("gone", "blue")
    assert sorted(grown.values) == ["blue", "gone", "green", "rare", "red"]
    assert np.asarray(layers.string_lookup(data, grown)(["gone", "blue", "new"])).tolist() == [1, 2, 0]
    grown.save(tmp_path / "new.json")
    assert layers.Vocabulary.load(tmp_path / "new.json") == grown
    assert json.loads((tmp_path / "new.json").read_text())["dataset"] == data.manifest.digest
    with pytest.raises(DatasetMissing, match="no vocabulary"):
        layers.Vocabulary.load(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text('{"feature": "color", "values": ["a", "a"]}')
    with pytest.raises(DatasetCorrupt, match="must differ"):
        layers.Vocabulary.load(tmp_path / "bad.json")


def test_what_makes_no_layer(data, run, tmp_path):
    refused = [
        (lambda: layers.normalization(data, "color"), InvalidOption, "hold finite numbers"),
        (lambda: layers.discretization(data, "x", 1), InvalidOption, "bins must be"),
        (lambda: layers.string_lookup(data, "code"), InvalidOption, "hold string, as code does not"),
        (lambda: layers.integer_lookup(data, "n"), InvalidOption, "each value was counted"),
        (lambda: layers.vocabulary(data, "x"), InvalidOption, "each value was counted"),
        (lambda: layers.vocabulary(data, "color", least=0), InvalidOption, "least must be"),
        (lambda: layers.vocabulary(data, "color", least=9999), InvalidOption, "leave a value of color"),
        (lambda: layers.normalization(data, "nowhere"), ColumnError, "isn't in the schema"),
    ]
    for make, error, match in refused:
        with pytest.raises(error, match=match):
            make()
    pq.write_table(pa.table({"x": [1.0] * 20, "y": [1] * 20}), tmp_path / "a.parquet")
    bare = RecordsDataset.open(run(tmp_path / "a.parquet", statistics=False).path)
    with pytest.raises(DatasetMissing, match="counts rows only"):
        layers.normalization(bare, "x")


# Keras saves variables by np.array(), which TensorFlow's own don't yet take NumPy 2's way.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_the_same_answers_after_reloading_and_from_examples_and_tensors(data, train, tmp_path):
    import keras
    import tensorflow as tf

    from trainers.exporting.saved_model import EXAMPLES, SERVING_DEFAULT, write_saved_model
    from trainers.task import REGRESSION, Task

    inputs = {
        "x": keras.Input((), name="x"),
        "n": keras.Input((), name="n", dtype="int64"),
        "code": keras.Input((), name="code", dtype="int64"),
        "color": keras.Input((), name="color", dtype="string"),
    }
    parts = [
        layers.normalization(data, "x")(keras.layers.Reshape((1,))(inputs["x"])),
        layers.normalization(data, "n")(keras.layers.Reshape((1,))(inputs["n"])),
        keras.layers.Embedding(9, 2)(layers.discretization(data, "x", 8)(inputs["x"])),
        layers.integer_lookup(data, "code", output_mode="one_hot")(inputs["code"]),
        layers.string_lookup(data, "color", least=200, output_mode="one_hot")(inputs["color"]),
    ]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    some = {name: train[name][:64] for name in inputs}
    want = model({name: tf.constant(values) for name, values in some.items()}).numpy()
    assert len(np.unique(want)) > 50

    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(again({n: tf.constant(v) for n, v in some.items()}).numpy(), want)

    write_saved_model(tmp_path / "export", model, list(inputs), Task(REGRESSION), data)
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    by_name = loaded.signatures[SERVING_DEFAULT](**{n: tf.constant(v) for n, v in some.items()})
    paths = [str(data.manifest.folder / shard.file) for shard in data.manifest.split("train")]
    examples = next(iter(tf.data.TFRecordDataset(paths).batch(64)))
    by_example = loaded.signatures[EXAMPLES](examples=examples)
    (name,) = by_name
    assert by_name[name].numpy().ravel() == pytest.approx(want.ravel(), abs=1e-5)
    assert np.array_equal(by_example[name].numpy(), by_name[name].numpy())
