"""The example of docs/records.md, on rides that are made up here."""

import datetime as dt
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.records.read import RecordsDataset

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in ("taxi_checks", "taxi_model"):
        sys.modules.pop(name, None)


def rides(count=600):
    rng = np.random.default_rng(1)
    km = rng.gamma(2.0, 3.0, count).round(1)
    started = [dt.datetime(2013, 1, 1) + dt.timedelta(minutes=i) for i in range(count)]
    ended = [start + dt.timedelta(minutes=10) for start in started]
    fare = 3 + 2 * km
    ended[7], fare[9] = started[7], 5000.0
    zone = [("centre", "airport", f"corner-{i}")[min(i % 5, 2)] for i in range(count)]
    return pa.table({"km": km, "zone": zone, "started": started, "ended": ended, "fare": fare})


def test_checks_and_layers(run, tmp_path, examples):
    pq.write_table(rides(), tmp_path / "rides.parquet")
    manifest = run(
        tmp_path / "rides.parquet",
        label="fare",
        checks=["taxi_checks:ends_after_it_starts", "taxi_checks:plausible_fare"],
        split={"by": "time", "column": "started", "eval_from": "2013-01-01T08:00"},
    )
    refused = pq.read_table(manifest.folder / "quarantine.parquet").to_pylist()
    assert [(row["row"], row["reason"]) for row in refused] == [
        (8, "ends_after_it_starts refuses it"),
        (10, "plausible_fare: costs far more than its way"),
    ]
    assert manifest.counts == {"train": 478, "eval": 120}
    import taxi_model

    records = RecordsDataset.open(manifest.path)
    model = taxi_model.build_model({}, records)
    (batch,) = records.dataset("eval", 200)
    assert model({"km": batch["km"], "zone": batch["zone"]}).shape == (120, 1)
    assert model.get_layer("zone_index").get_vocabulary() == ["[UNK]", "airport", "centre"]
