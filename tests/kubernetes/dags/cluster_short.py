"""Short trainings whose pods are told something of their own: of an MLflow that isn't there, or of a store's keys."""

from __future__ import annotations

import datetime as dt
from typing import Any

from airflow.sdk import dag, task
from trainyard import Resources, check_form, form, prepare, storage_path, train

SMALL = Resources(cpu=0.25, memory="2Gi")
NOWHERE: dict[str, Any] = {"env": [{"name": "MLFLOW_TRACKING_URI", "value": "http://127.0.0.1:9"}]}
S3_KEYS: dict[str, Any] = {"envFrom": [{"secretRef": {"name": "s3-keys"}}]}


def short(name: str, container: dict[str, Any], *, step_pods: bool, **fields: Any) -> None:
    """The DAG of that name: ingest, prepare, train. `container` is for replicas and, if `step_pods`, for steps."""
    pod = {"spec": {"containers": [{"name": "base", **container}]}}

    @dag(
        dag_id=name,
        schedule=None,
        default_args={"pod": pod} if step_pods else {},
        start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
        params=form(batch_size=64, learning_rate=0.003, **fields),
    )
    def pipeline() -> None:
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
            name=name,
            resources={"default": SMALL},
            pods={"default": pod},
        )

    pipeline()


short("cluster_untracked", NOWHERE, step_pods=False, strategy="local", workers=0, ps=0, steps=40)
# As docs/kubernetes.md has it.
short("cluster_in_store", S3_KEYS, step_pods=True, strategy="parameter_server", workers=1, ps=1, steps=100)
