"""A short training whose pods find the keys of the object store in a Secret, as docs/kubernetes.md has it."""

from __future__ import annotations

import datetime as dt
from typing import Any

from airflow.sdk import dag, task
from trainyard import Resources, check_form, form, prepare, storage_path, train

SMALL = Resources(cpu=0.25, memory="2Gi")
S3_KEYS: dict[str, Any] = {
    "spec": {"containers": [{"name": "base", "envFrom": [{"secretRef": {"name": "s3-keys"}}]}]}
}


@dag(
    schedule=None,
    default_args={"pod": S3_KEYS},  # of steps; replicas have theirs from the plan
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    params=form(strategy="parameter_server", workers=1, ps=1, steps=100, batch_size=64, learning_rate=0.003),
)
def cluster_in_store() -> None:
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
        name="stored",
        resources={"default": SMALL},
        pods={"default": S3_KEYS},
    )


cluster_in_store()
