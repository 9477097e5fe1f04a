"""A short training whose pods are told of an MLflow that isn't there."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag, task
from trainyard import Resources, check_form, form, prepare, storage_path, train

SMALL = Resources(cpu=0.25, memory="2Gi")
NOWHERE = {"name": "MLFLOW_TRACKING_URI", "value": "http://127.0.0.1:9"}


@dag(
    schedule=None,
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    params=form(strategy="local", workers=0, ps=0, steps=40, batch_size=64, learning_rate=0.003),
)
def cluster_untracked() -> None:
    """Ingest, prepare, train."""

    @task
    def ingest() -> str:
        from trainers.models.digits_raw import write_raw

        return write_raw(storage_path("raw/digits"))["source"]

    raw = ingest()
    check_form() >> raw
    records = prepare(raw, name="digits", label="label", eval_fraction=0.2, resources=SMALL)
    train(
        trainer="trainers.models.digits",
        records=records,
        name="untracked",
        resources={"default": SMALL},
        pods={"default": {"spec": {"containers": [{"name": "base", "env": [NOWHERE]}]}}},
    )


cluster_untracked()
