"""XGBoost on several replicas: the chief runs the tracker, and all of them train."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag
from trainyard import Resources, Success, form, train


@dag(
    schedule="@weekly",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    params=form(strategy="custom", workers=4, steps=200),
)
def xgboost_weekly() -> None:
    """Train on the shards that lie in the storage root."""
    train(
        name="delays-xgboost",
        command=["python", "-m", "xgboost_train"],
        args={"max_depth": 8},
        image="registry.example/xgboost:1",
        resources={"default": Resources(4, "16Gi")},
        success=Success("all_workers"),
    )


xgboost_weekly()
