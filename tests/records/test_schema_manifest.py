import dataclasses
import json
import subprocess
import sys

import pytest

from trainers.job.failures import FailureClass
from trainers.job.files import sha256_of_file
from trainers.records.errors import ColumnError, DatasetCorrupt, DatasetMissing, InvalidOption
from trainers.records.manifest import Manifest, Shard, content_digest
from trainers.records.options import Options, fingerprint
from trainers.records.schema import Feature, Schema

IMAGE = Feature("image", "uint8", (8, 8, 1), "raw", domain={"min": 0, "max": 255})
LABEL = Feature("label", "int64", domain={"min": 0, "max": 1, "names": ["cat", "dog"]})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "", "type": "int64"}, "name must be"),
        ({"name": "x", "type": "int32"}, "type of 'x' must be one of float32"),
        ({"name": "x", "type": "int64", "encoding": "zip"}, "encoding of 'x' must be"),
        ({"name": "x", "type": "int64", "presence": "maybe"}, "presence of 'x' must be"),
        ({"name": "x", "type": "int64", "shape": [0]}, "shape of 'x' must be"),
        ({"name": "x", "type": "int64", "shape": [None, 2]}, "shape of 'x' must be"),
        ({"name": "x", "type": "uint8"}, "go together"),
        ({"name": "x", "type": "int64", "encoding": "raw", "shape": [2]}, "go together"),
        ({"name": "x", "type": "uint8", "encoding": "raw"}, "must be fixed"),
        ({"name": "x", "type": "int64", "encoding": "image"}, "must have type bytes"),
        ({"name": "x", "typ": "int64"}, "unknown fields: typ"),
        ({"name": "x"}, "lacks type"),
    ],
)
def test_bad_features_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Feature.from_dict(arguments)


def test_schema_round_trip_and_lookup(tmp_path):
    schema = Schema((IMAGE, LABEL))
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema.to_dict()))
    loaded = Schema.load(path)
    assert loaded == schema
    assert loaded.digest == schema.digest
    assert schema.names == ("image", "label")
    assert "label" in schema
    assert len(schema) == 2
    assert schema["image"].size == 64
    assert schema["image"].names is None
    assert schema["label"].names == ("cat", "dog")
    assert Feature("l", "int64", (None,)).size == 0
    with pytest.raises(ColumnError, match="column 'x' isn't in the schema; it holds image, label"):
        schema["x"]
    other = schema.replace([dataclasses.replace(LABEL, presence="optional")])
    assert other["label"].presence == "optional"
    assert other.digest != schema.digest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not a schema"),
        ("[]", "must be an object"),
        ('{"version": 2, "features": []}', "version must be 1, got 2"),
        ('{"version": 1, "features": []}', "at least one feature"),
        ('{"version": 1, "features": [{"name": "a", "type": "int64"}, {"name": "a", "type": "int64"}]}', "must differ"),
    ],
)  # fmt: skip
def test_what_is_no_schema(tmp_path, text, problem):
    path = tmp_path / "schema.json"
    path.write_text(text)
    with pytest.raises(DatasetCorrupt, match=problem):
        Schema.load(path)


def test_no_schema(tmp_path):
    with pytest.raises(DatasetMissing, match="no schema at"):
        Schema.load(tmp_path / "schema.json")


@pytest.fixture
def dataset(tmp_path):
    """A dataset of two small shards, whole."""
    schema = Schema((IMAGE, LABEL))
    (tmp_path / "schema.json").write_text(json.dumps(schema.to_dict()))
    shards = []
    for split, records in (("train", 3), ("eval", 1)):
        path = tmp_path / f"{split}-00000-of-00001.tfrecord"
        path.write_bytes(bytes(records * 10))
        shards.append(Shard(split, path.name, records, records * 10, sha256_of_file(path)))
    return Manifest(
        name="pets",
        digest=content_digest(schema.digest, shards),
        fingerprint="ab" * 32,
        schema_digest=schema.digest,
        label="label",
        counts={"train": 3, "eval": 1},
        shards=shards,
        sources=["raw/pets"],
        statistics={"train": {}, "eval": {}},
        options={"name": "pets"},
        quarantined=0,
        code_version="trainyard.records/1",
        created=1.5,
    ).save(tmp_path / "manifest.json")


def test_manifest_round_trip(dataset):
    assert Manifest.load(dataset.path) == dataset
    assert Manifest.load(dataset.folder) == dataset
    assert Manifest.load(f"file://{dataset.path}") == dataset
    assert dataset.schema().names == ("image", "label")
    assert [shard.records for shard in dataset.split("train")] == [3]
    dataset.verify()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"counts": {"train": 4, "eval": 1}}, "must be that of the shards, 3, got 4"),
        ({"counts": {"train": 3}}, "counts must have train and eval"),
        ({"digest": "0" * 64}, "digest must be"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(dataset, changes, problem):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(dataset, **changes)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("dev", "a", 1, 1, ""), "split must be"),
        (("train", "../a", 1, 1, ""), "file must be a name"),
        (("train", "a", -1, 1, ""), "0 or more"),
    ],
)
def test_bad_shards_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Shard(*arguments)


def test_a_manifest_without_a_place_has_no_folder(dataset):
    with pytest.raises(ValueError, match="path must be set"):
        _ = dataclasses.replace(dataset, path=None).folder
    with pytest.raises(ValueError, match="split must be one of"):
        dataset.split("dev")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 9}'])
def test_what_is_no_manifest(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DatasetCorrupt, match="is not a manifest that this version can read"):
        Manifest.load(tmp_path)


def test_no_manifest_no_dataset(tmp_path):
    with pytest.raises(DatasetMissing, match="run the prepare step first") as e:
        Manifest.load(tmp_path / "manifest.json")
    assert e.value.failure_class is FailureClass.DATA


def test_damage_names_the_file(dataset):
    shard = dataset.folder / "train-00000-of-00001.tfrecord"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(DatasetCorrupt, match=r"train-00000-of-00001.tfrecord has 29 bytes.*says 30.*again"):
        dataset.verify(checksums=False)
    shard.write_bytes(data[:-1] + b"x")
    dataset.verify(checksums=False)
    with pytest.raises(DatasetCorrupt, match=r"train-00000-of-00001.tfrecord has SHA-256"):
        dataset.verify()
    dataset.verify(splits=["eval"])
    shard.unlink()
    with pytest.raises(DatasetCorrupt, match="is not there") as e:
        dataset.verify(checksums=False)
    assert e.value.file == str(shard)


def test_another_schema_than_the_manifests(dataset):
    (dataset.folder / "schema.json").write_text(json.dumps(Schema((LABEL,)).to_dict()))
    with pytest.raises(DatasetCorrupt, match=r"schema.json has digest"):
        dataset.verify()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("source", ""),
        ("output", None),
        ("output", "gs://bucket/records"),
        ("name", "a/b"),
        ("name", ""),
        ("label", ""),
        ("key", ""),
        ("eval_fraction", 1.0),
        ("eval_fraction", "0.2"),
        ("quarantine_threshold", -0.1),
        ("shards", 0),
        ("shards", True),
        ("batch_rows", 2.5),
        ("image", "png"),
    ],
)
def test_bad_options_are_refused(option, value):
    good = {"source": "raw", "output": "out", "name": "n", "label": "y"}
    with pytest.raises(InvalidOption, match="must be") as e:
        Options.parse(**{**good, option: value})
    assert e.value.failure_class is FailureClass.CONFIG


def test_the_fingerprint_is_of_content_not_of_speed():
    good = {"source": "raw", "output": "out", "name": "n", "label": "y"}
    files = [("a", 1, "00"), ("b", 2, "11")]
    base = fingerprint(Options.parse(**good), files)
    for same in (
        {"batch_rows": 7},
        {"quarantine_threshold": 0.5},
        {"source": "elsewhere"},
        {"output": "there"},
    ):
        assert fingerprint(Options.parse(**{**good, **same}), files) == base
    for other in ({"label": "z"}, {"key": "k"}, {"shards": 3}, {"eval_fraction": 0.1}, {"image": "encoded"}):
        assert fingerprint(Options.parse(**{**good, **other}), files) != base
    assert fingerprint(Options.parse(**good), files[:1]) != base
    assert fingerprint(Options.parse(**good), [("a", 1, "01"), ("b", 2, "11")]) != base


@pytest.mark.parametrize("module", ["manifest", "schema", "options", "errors", "__main__"])
def test_what_airflow_reads_needs_the_standard_library_only(module):
    """In a bare interpreter, without site-packages."""
    code = f"""
import sys
sys.path.insert(0, {str(__import__("pathlib").Path(__file__).parents[2])!r})
import trainers.records.{module}
top = {{name.split(".")[0] for name in sys.modules}}
foreign = sorted(top - set(sys.stdlib_module_names) - {{"trainers", "__main__", "__mp_main__"}})
assert not foreign, foreign
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
