"""Exports: what is written, that it answers as the trained model does, and that nothing half is ever there."""

import base64
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from serving.release.exported import Export
from trainers import export
from trainers.exporting import golden as goldens
from trainers.exporting import package, warmup
from trainers.job.errors import ConfigError, DataError, InvalidSpec
from trainers.job.failures import FailureClass
from trainers.records.build import prepare
from trainers.records.read import RecordsDataset


def tensor(document):
    return np.array(document["values"], document["dtype"]).reshape(document["shape"])


def manifest_of(folder):
    return json.loads((folder / "export.json").read_text())


def golden_of(folder):
    return json.loads((folder / "golden.json").read_text())


def test_what_is_in_the_folder(exported):
    manifest = manifest_of(exported)
    files = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert files == set(manifest["files"]) | {"export.json"}
    assert files >= {"saved_model.pb", "golden.json", "assets.extra/tf_serving_warmup_requests"}
    assert manifest["format"] == 1
    assert manifest["bytes"] == sum((exported / f).stat().st_size for f in manifest["files"])
    lines = "".join(
        f"{name} {hashlib.sha256((exported / name).read_bytes()).hexdigest()}\n"
        for name in sorted(manifest["files"])
    )
    assert manifest["digest"] == hashlib.sha256(lines.encode()).hexdigest()
    assert not list(exported.parent.glob(".export.*"))


def test_the_serving_side_reads_it(exported):
    found = Export.load(exported)
    found.verify()
    assert len(found.golden().labels) == 10


def test_the_manifest_says_where_it_comes_from(exported, digits):
    manifest = manifest_of(exported)
    assert manifest["records_digest"] == digits.digest
    assert manifest["trainer"] == "trainers.models.digits"
    assert manifest["step"] == 120
    assert manifest["run_id"] == "run-1"
    assert manifest["job"].endswith("digits_retrain/run-1")
    assert manifest["classes"] == [str(n) for n in range(10)]
    assert manifest["load_s"] > 0
    assert abs(manifest["created"] - time.time()) < 3600
    assert manifest["code_version"]


def test_signatures(exported):
    outputs = {
        "classes": {"dtype": "int64", "shape": [None]},
        "logits": {"dtype": "float32", "shape": [None, 10]},
        "probabilities": {"dtype": "float32", "shape": [None, 10]},
    }
    assert manifest_of(exported)["signatures"] == {
        "serving_default": {
            "inputs": {"image": {"dtype": "uint8", "shape": [None, 8, 8, 1]}},
            "outputs": outputs,
        },
        "examples": {"inputs": {"examples": {"dtype": "string", "shape": [None]}}, "outputs": outputs},
    }


def test_golden_examples_are_one_of_each_class_and_held_out(exported, digits):
    document = golden_of(exported)
    assert document["signature"] == "serving_default"
    assert document["tolerance"] == 1e-4
    assert document["labels"] == list(range(10))
    images = tensor(document["inputs"]["image"])
    assert images.shape == (10, 8, 8, 1)
    held_out = np.concatenate([b["image"] for b in RecordsDataset.open(digits.path).dataset("eval", 512)])
    assert all((held_out == image).all(axis=(1, 2, 3)).any() for image in images)


def test_golden_outputs_are_what_the_reloaded_model_answers(exported):
    document = golden_of(exported)
    loaded = tf.saved_model.load(str(exported))
    answers = loaded.signatures["serving_default"](image=tf.constant(tensor(document["inputs"]["image"])))
    assert set(answers) == set(document["outputs"])
    for name, value in answers.items():
        np.testing.assert_allclose(value, tensor(document["outputs"][name]), atol=1e-6)
    assert (tensor(document["outputs"]["classes"]) == np.array(document["labels"])).mean() >= 0.7


def test_training_and_serving_cannot_skew(exported, digits):
    """Both roads, by name and by serialised Example, over everything held out; the label may be missing."""
    records = RecordsDataset.open(digits.path)
    loaded = tf.saved_model.load(str(exported))
    paths = [str(digits.folder / shard.file) for shard in digits.split("eval")]
    for serialized in tf.data.TFRecordDataset(paths).batch(128):
        by_name = loaded.signatures["serving_default"](image=records.parse(serialized)["image"])
        without_label = []
        for record in serialized.numpy():
            example = tf.train.Example.FromString(record)
            del example.features.feature["label"]
            without_label.append(example.SerializeToString())
        for road in (serialized, tf.constant(without_label)):
            by_example = loaded.signatures["examples"](examples=road)
            for name in by_name:
                np.testing.assert_array_equal(by_name[name], by_example[name])


def test_warm_up_requests_can_be_played(exported):
    loaded = tf.saved_model.load(str(exported))
    played = []
    for record in tf.data.TFRecordDataset(str(exported / warmup.FILE)):
        log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
        request = log.predict_log.request
        assert request.model_spec.name == "digits"
        inputs = {name: tf.constant(tf.make_ndarray(proto)) for name, proto in request.inputs.items()}
        answers = loaded.signatures[request.model_spec.signature_name](**inputs)
        played.append((request.model_spec.signature_name, len(answers["classes"])))
    assert played == [(s, n) for n in (1, 8, 32) for s in ("serving_default", "examples")]


# ---- again, and when something is wrong


@pytest.mark.usefixtures("loads_here")
def test_exported_again_it_is_reused_until_the_weights_change(job, digits, monkeypatch):
    first = export.main({"job": str(job), "manifest": str(digits.path)})
    assert first["export"] == str(job / "export")
    assert first["reused"] is False
    assert first["bytes"] > 10_000
    with monkeypatch.context() as patch:
        patch.setattr(export, "import_tensorflow", lambda: pytest.fail("TensorFlow is not needed for that"))
        again = export.main({"job": str(job), "manifest": str(digits.path)})
    assert again == {**first, "reused": True}
    assert json.loads((job / "times" / "export.json").read_text())["seconds"] > 0

    (job / "export" / "golden.json").write_text("{}")
    assert export.main({"job": str(job)})["reused"] is False
    assert golden_of(job / "export")["labels"] == list(range(10))

    index = next((job / "checkpoints").glob("*.index"))
    for path in index.parent.glob(f"{index.stem}.*"):
        shutil.copy(path, path.with_name(path.name.replace(index.stem, "step-121")))
    other = export.main({"job": str(job)})
    assert other["reused"] is False
    assert manifest_of(job / "export")["digest"] == other["digest"]
    assert [p.name for p in job.iterdir() if p.name.startswith(".")] == []


@pytest.mark.usefixtures("loads_here")
def test_an_export_that_fails_leaves_the_old_one_and_no_rubbish(job, monkeypatch):
    before = export.main({"job": str(job)})
    shutil.copytree(job / "export", job / "copy")
    (job / "export" / "golden.json").unlink()
    monkeypatch.setattr(
        warmup, "write_warmup", lambda *a, **k: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space"):
        export.main({"job": str(job)})
    assert manifest_of(job / "export")["digest"] == before["digest"]
    assert [p.name for p in job.iterdir() if p.name.startswith(".")] == []


@pytest.mark.usefixtures("loads_here")
def test_a_regression_with_text(houses_job, houses):
    result = export.main({"job": str(houses_job)})
    document = golden_of(Path(result["export"]))
    assert set(document["inputs"]) == {"rooms", "city"}
    cities = [base64.b64decode(v["b64"]).decode() for v in document["inputs"]["city"]["values"]]
    assert set(cities) <= {"Oslo", "Bergen"}
    assert document["inputs"]["city"]["dtype"] == "string"
    rooms = tensor(document["inputs"]["rooms"])
    predictions = tensor(document["outputs"]["predictions"])
    np.testing.assert_allclose(predictions.reshape(-1), rooms + 1, atol=1e-5)
    assert 5 <= len(document["labels"]) <= 16
    assert manifest_of(Path(result["export"]))["classes"] is None
    Export.load(result["export"]).verify()


@pytest.mark.usefixtures("loads_here")
def test_nothing_held_out_shows_training_examples(job, digits, tmp_path):
    everything = prepare(
        Path(digits.sources[0].removeprefix("file://")),
        tmp_path / "records",
        name="digits",
        label="label",
        eval_fraction=0.0,
        progress=lambda line: None,
    )
    export.main({"job": str(job), "manifest": str(everything.path)})
    assert golden_of(job / "export")["labels"] == list(range(10))


RANDOM = """
    import keras
    @keras.saving.register_keras_serializable()
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x), seed=None)
    def build_model(hparams):
        image = keras.Input((8, 8, 1), name="image")
        x = keras.layers.Dense(10)(keras.layers.Flatten()(image))
        return keras.Model(image, Noise()(x))
    def loss(hparams):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""


@pytest.mark.usefixtures("loads_here")
def test_a_model_that_answers_differently_each_time_is_not_exported(trainer, digits):
    folder = trainer(RANDOM, digits)
    with pytest.raises(goldens.SavedModelDiffers, match="give different") as info:
        export.main({"job": str(folder)})
    assert "random" in info.value.hint
    assert not (folder / "export").exists()


OTHER_INPUT = """
    import keras
    def build_model(hparams):
        pixels = keras.Input((64,), name="pixels")
        return keras.Model(pixels, keras.layers.Dense(10)(pixels))
    def loss(hparams):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""


@pytest.mark.usefixtures("loads_here")
def test_a_model_that_the_records_cannot_feed(trainer, digits):
    with pytest.raises(ConfigError, match="pixels"):
        export.main({"job": str(trainer(OTHER_INPUT, digits))})


REFUSED = [
    ({}, "job"),
    ({"job": ""}, "job"),
    ({"job": "x", "output": 7}, "output"),
    ({"job": "x", "manifest": ["m"]}, "manifest"),
    ({"job": "x", "folder": "y"}, "spec"),
]


@pytest.mark.parametrize(("spec", "field"), REFUSED)
def test_refused(spec, field):
    with pytest.raises(InvalidSpec) as info:
        export.main(spec)
    assert info.value.field == field


def test_no_records_at_all(digits):
    class Empty:
        manifest = digits

        @staticmethod
        def count(split):
            return 0

    with pytest.raises(goldens.NoRecordsToShow) as info:
        goldens.choose(Empty(), ["image"], 10)
    assert isinstance(info.value, DataError)


# ---- golden examples


@pytest.mark.parametrize(
    ("classes", "count", "distinct"), [(2, 5, 5), (10, 10, 10), (1000, 16, 10), (None, 8, 8)]
)
def test_how_many_golden_examples(digits, classes, count, distinct):
    chosen = goldens.choose(RecordsDataset.open(digits.path), ["image"], classes)
    assert len(chosen) == len(chosen.labels) == len(chosen.inputs["image"]) == count
    assert len(set(chosen.labels.tolist())) >= min(distinct, count) - 3
    assert len(set(chosen.serialized.tolist())) == count


def test_examples_of_many_numbers_are_fewer(digits, monkeypatch):
    monkeypatch.setattr(goldens, "_NUMBERS", 64 * 7)
    assert len(goldens.choose(RecordsDataset.open(digits.path), ["image"], 10)) == 7
    monkeypatch.setattr(goldens, "_NUMBERS", 64)
    assert len(goldens.choose(RecordsDataset.open(digits.path), ["image"], 10)) == 5


DIFFERENT = [
    ({"a": [1.0]}, {"a": [1.001]}),
    ({"a": [1.0]}, {"a": [[1.0]]}),
    ({"a": [1.0]}, {"b": [1.0]}),
    ({"a": [1]}, {"a": [2]}),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_check_same(one, other):
    one, other = ({k: np.array(v) for k, v in d.items()} for d in (one, other))
    goldens.check_same(one, {k: v + 1e-6 if v.dtype.kind == "f" else v for k, v in one.items()}, "two")
    with pytest.raises(goldens.SavedModelDiffers) as info:
        goldens.check_same(one, other, "two")
    assert info.value.failure_class is FailureClass.USER


# ---- the package


def write(folder, text="x"):
    (folder / "variables").mkdir()
    (folder / "variables" / "a").write_text(text)
    (folder / "saved_model.pb").write_text("b")
    return package.describe(folder, {"job": "j"})


def test_a_reader_never_sees_a_mixture(tmp_path):
    target = tmp_path / "export"
    with package.staged(target) as folder:
        first = write(folder, "first")
        assert not target.exists()
    assert package.complete(target) == first
    with package.staged(target) as folder:
        second = write(folder, "second")
        assert package.complete(target) == first
    assert package.complete(target) == second != first
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_failure_within_leaves_what_was(tmp_path):
    target = tmp_path / "export"
    with package.staged(target) as folder:
        first = write(folder)
    with pytest.raises(FileExistsError), package.staged(target) as folder:
        write(folder, "second")["files"] and write(folder)
    assert package.complete(target) == first
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_what_killed_exports_left_is_swept_after_an_hour(tmp_path):
    old, new = tmp_path / ".export.1.ab.tmp", tmp_path / ".export.2.cd.tmp"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    with package.staged(tmp_path / "export") as folder:
        write(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == [new.name, "export"]


def damage(folder, kind):
    manifest = folder / "export.json"
    data = json.loads(manifest.read_text())
    if kind == "missing file":
        (folder / "saved_model.pb").unlink()
    elif kind == "changed file":
        (folder / "saved_model.pb").write_text("c")
    elif kind == "longer file":
        (folder / "saved_model.pb").write_text("bb")
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "cut manifest":
        manifest.write_text("{")
    elif kind == "other format":
        manifest.write_text(json.dumps({**data, "format": 2}))
    elif kind == "other digest":
        manifest.write_text(json.dumps({**data, "digest": "0" * 64}))
    elif kind == "no files":
        manifest.write_text(json.dumps({"format": 1}))


DAMAGES = ["missing file", "changed file", "longer file", "no manifest", "cut manifest", "other format"]


@pytest.mark.parametrize("kind", [*DAMAGES, "other digest", "no files"])
def test_a_damaged_folder_is_not_complete(tmp_path, kind):
    with package.staged(tmp_path / "export") as folder:
        write(folder)
    damage(tmp_path / "export", kind)
    assert package.complete(tmp_path / "export") is None


def test_checkpoint_id(job, tmp_path):
    assert len(package.checkpoint_id(job)) == 64
    assert package.checkpoint_id(job) == package.checkpoint_id(job)
    assert package.checkpoint_id(tmp_path) == ""


def test_code_version(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINYARD_CODE_VERSION", "v7")
    assert package.code_version() == "v7"
    monkeypatch.delenv("TRAINYARD_CODE_VERSION")
    assert package.code_version()
    monkeypatch.setattr(package, "__file__", str(tmp_path / "trainers" / "exporting" / "package.py"))
    (tmp_path / ".git").mkdir()  # no repository: git fails
    version = package.code_version()
    assert version == package.metadata.version("trainyard")
    monkeypatch.setattr(package.metadata, "version", raise_not_found)
    assert package.code_version() == "unknown"


def raise_not_found(name):
    raise package.metadata.PackageNotFoundError(name)
