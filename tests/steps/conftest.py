"""Trained jobs for the steps after training: real records, real checkpoints, trainers of several kinds."""

from __future__ import annotations

import csv
import random
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainers.job.plan import Cluster, make_plan
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import TrainingJob
from trainers.lean import import_tensorflow
from trainers.models.digits_raw import write_raw
from trainers.records.build import prepare
from trainers.records.manifest import Manifest

# In several of these processes' lives TensorFlow comes first; without this Keras would bring matplotlib along.
import_tensorflow()


def quiet(line: str) -> None:
    """No progress in tests."""


def make_job(folder: Path, trainer: str, manifest: Path | str, **args: Any) -> TrainingJob:
    """A recorded job in `folder`."""
    job = TrainingJob("digits", trainer, args=args, inputs={"records": str(manifest)}, output=str(folder))
    JobRecord.create(make_plan(job, Cluster.process([1]), gang="digits"))
    return job


def save(job: TrainingJob, model: Any, step: int) -> None:
    """Write a checkpoint as training does, and end the job."""
    import keras

    from trainers.runtime.checkpoints import Checkpoints

    Checkpoints(job.output, model, keras.optimizers.Adam()).save(step)
    JobRecord.open(job.output).finish(JobState.SUCCEEDED, step=step)


class _ThisProcess:
    """Loads exports here and not in a process of its own, which costs an import of TensorFlow each time."""

    def __enter__(self) -> _ThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def measure(self, folder: Path) -> dict[str, float]:
        from trainers.exporting.loading import measure

        return measure(folder)


@pytest.fixture
def loads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of something else; the export of the fixture `exported` is loaded by a fresh process."""
    from trainers import export

    monkeypatch.setattr(export, "FreshProcess", _ThisProcess)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The digits' records."""
    folder = tmp_path_factory.mktemp("digits")
    write_raw(folder / "raw", progress=quiet)
    return prepare(folder / "raw", folder / "records", name="digits", label="label", progress=quiet)


@pytest.fixture(scope="session")
def _trained(digits: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import keras
    import tensorflow as tf

    from trainers.records.read import RecordsDataset
    from trainers.runtime.module import load_module
    from trainers.runtime.steps import make_run, make_step

    folder = tmp_path_factory.mktemp("jobs") / "digits_retrain" / "run-1"
    job = make_job(folder, "trainers.models.digits", digits.path)
    module = load_module(job.trainer)
    keras.utils.set_random_seed(1)
    model = module.build_model({})
    optimizer = module.optimizer({}, 0.005)
    optimizer.build(model.trainable_variables)
    batches = RecordsDataset.open(digits.path).dataset(
        "train", 128, shuffle=True, seed=1, repeat=True, cache=True
    )
    data = batches.map(lambda batch: ({"image": batch["image"]}, batch["label"]))
    run = make_run(tf.distribute.get_strategy(), make_step(model, module.loss({}), optimizer, 1), replicas=1)
    run(iter(data), tf.constant(120))
    save(job, model, 120)
    return folder


@pytest.fixture
def job(_trained: Path, tmp_path: Path) -> Path:
    """The folder of a digits job that was trained for 120 steps, for one test to write into."""
    folder = tmp_path / "jobs" / "digits_retrain" / "run-1"
    shutil.copytree(_trained, folder)
    return folder


@pytest.fixture(scope="session")
def exported(_trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits job's export; tests read it."""
    from trainers import export

    target = tmp_path_factory.mktemp("exported") / "export"
    export.main({"job": str(_trained), "output": str(target)})
    return target


HOUSES = """
    import keras
    CITIES = ["Bergen", "Oslo", "Tromso"]
    def build_model(hparams):
        rooms = keras.Input((), name="rooms", dtype="float32")
        city = keras.Input((), name="city", dtype="string")
        lookup = keras.layers.StringLookup(vocabulary=CITIES, output_mode="one_hot")
        numbers = keras.layers.Reshape((1,))(rooms)
        x = keras.layers.Concatenate()([numbers, lookup(city)])
        return keras.Model([rooms, city], keras.layers.Dense(1, kernel_initializer="ones", name="price")(x))
    def loss(hparams):
        return keras.losses.MeanSquaredError()
    def metrics(hparams):
        return [keras.metrics.MeanAbsolutePercentageError(name="mape")]
"""


@pytest.fixture(scope="session")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Records of a table: rooms, city, and a price to predict: the rooms and one more, 0.5 off."""
    folder = tmp_path_factory.mktemp("houses")
    rng = random.Random(3)
    with (folder / "houses.csv").open("w", newline="") as f:
        table = csv.writer(f)
        table.writerow(["id", "rooms", "city", "price"])
        for i in range(200):
            rooms = rng.choice([1.5, 2.5, 3.5])
            table.writerow([f"house-{i}", rooms, rng.choice(["Oslo", "Bergen"]), rooms + 1.5])
    return prepare(
        folder / "houses.csv", folder / "records", name="houses", label="price", key="id", progress=quiet
    )


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Makes a job of a trainer module given as text, with untrained weights, and gives its folder."""
    made: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str, manifest: Manifest, *, step: int = 1, args: Mapping[str, Any] | None = None) -> Path:
        from trainers.runtime.module import load_module

        name = f"trainer_of_test_{len(made)}_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        made.append(name)
        job = make_job(tmp_path / "jobs" / name, name, str(manifest.path), **(args or {}))
        save(job, load_module(name).build_model(job.args, str(manifest.path)), step)
        return Path(job.output)

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def houses_job(trainer: Callable[..., Path], houses: Manifest) -> Path:
    """A regression's folder; its answers are all 0.5 too low."""
    return trainer(HOUSES, houses)
