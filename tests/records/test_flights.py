"""The flights example: its raw data, and a model made from the statistics of its records."""

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from trainers.job.errors import ConfigError
from trainers.models.flights_raw import FLIGHTS, MONTHS, months_until, read_flights, write_months
from trainers.records.build import prepare


def test_they_are_all_there():
    flights = read_flights()
    assert flights.num_rows == FLIGHTS == 336_776
    assert pc.sum(pc.is_valid(flights["arr_delay"])).as_py() == 327_346


@pytest.fixture(scope="module")
def january(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    (part,) = write_months(folder, ["2013-01"], progress=lambda line: None)
    return part


def test_nothing_is_kept_that_is_known_after_landing_only(january):
    table = pq.read_table(january["source"])
    assert set(table.column_names) == {
        *("day", "weekday", "dep_minute", "arr_minute", "dep_delay", "distance", "carrier", "origin", "dest"),
        "arr_delay",
    }
    assert table.num_rows == 27_004 - 606
    assert not any(table[name].null_count for name in table.column_names)
    # 2013-01-01, UA 1545 from EWR to IAH: scheduled 5:15 to 8:19, on a Tuesday.
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["dep_minute"], first["arr_minute"], first["weekday"]) == (315, 499, 1)
    assert pc.max(table["dep_minute"]).as_py() < 24 * 60


def test_a_file_that_is_there_stays(january):
    path = Path(january["source"])
    before = path.stat().st_mtime_ns
    assert write_months(path.parent, ["2013-01"]) == [january]
    assert path.stat().st_mtime_ns == before
    assert [p.name for p in path.parent.iterdir()] == ["2013-01.parquet"]


def test_months():
    assert months_until("2013-01", 3) == ["2013-01"]
    assert months_until("2013-12", 3) == list(MONTHS[-3:])
    with pytest.raises(ConfigError, match="month must be one of"):
        months_until("2014-01", 3)


def test_the_model_scales_by_statistics_and_takes_raw_values(january, tmp_path):
    import keras

    from trainers.models import flights
    from trainers.records.read import RecordsDataset
    from trainers.runtime.module import TrainerModule, UnusableTrainer

    manifest = prepare(
        january["source"],
        tmp_path,
        name="flights",
        label="arr_delay",
        split={"by": "time", "column": "day", "eval_from": 24},
        progress=lambda line: None,
    )
    records = RecordsDataset.open(manifest.path)
    days = np.concatenate([batch["day"] for batch in records.dataset("eval", 4096)])
    assert days.min() == 24, "held out is the last week"
    module = TrainerModule(flights)
    model = module.build_model({}, str(manifest.path))
    batch = next(iter(records.dataset("train", 8192)))
    inputs = {tensor.name: batch[tensor.name] for tensor in model.inputs}
    assert model(inputs).shape == (8192, 1)
    scaled = keras.Model(model.inputs, model.get_layer("dep_delay_normalized").output)
    every = {name: np.concatenate([b[name] for b in records.dataset("train", 4096)]) for name in inputs}
    values = np.asarray(scaled(every))
    assert abs(values.mean()) < 1e-3
    assert abs(values.std() - 1) < 1e-3
    with pytest.raises(UnusableTrainer, match="takes records, and the job has none"):
        module.build_model({})


def test_the_layers_of_the_statistics_are_in_the_exported_graph(january, tmp_path):
    import tensorflow as tf

    from trainers.exporting.saved_model import write_saved_model
    from trainers.models import flights
    from trainers.records.examples import examples
    from trainers.records.read import RecordsDataset
    from trainers.runtime.module import TrainerModule
    from trainers.task import Task

    manifest = prepare(
        january["source"], tmp_path / "records", name="flights", label="arr_delay", progress=lambda line: None
    )
    module = TrainerModule(flights)
    model = module.build_model({}, str(manifest.path))
    statistics = manifest.statistics["train"]
    normalized = model.get_layer("distance_normalized")
    assert float(np.asarray(normalized.mean).reshape(())) == pytest.approx(statistics["distance"]["mean"])
    assert model.get_layer("carrier_index").get_vocabulary()[1:4] == [
        v for v, _ in statistics["carrier"]["top"][:3]
    ]
    assert len(model.get_layer("dep_minute_binned").bin_boundaries) == flights.BINNED["dep_minute"] - 1
    records = RecordsDataset.open(manifest.path)
    names = [tensor.name for tensor in model.inputs]
    write_saved_model(tmp_path / "saved", model, names, Task.of(module, {}), records)
    batch = next(iter(records.dataset("eval", 64)))
    raw = {name: batch[name] for name in names}
    raw["carrier"] = tf.concat([[b"??"], raw["carrier"][1:]], 0)  # an airline that nobody has seen
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    answers = loaded.signatures["serving_default"](**raw)["predictions"].numpy().reshape(-1)
    np.testing.assert_allclose(answers, np.asarray(model(raw)).reshape(-1), rtol=1e-5, atol=1e-4)
    served = tf.constant(next(examples(records, "eval", 64)))
    answers = loaded.signatures["examples"](examples=served)["predictions"].numpy().reshape(-1)
    np.testing.assert_allclose(answers[1:], np.asarray(model(raw)).reshape(-1)[1:], rtol=1e-5, atol=1e-4)
