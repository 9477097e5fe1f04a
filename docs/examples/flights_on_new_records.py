"""A pipeline that runs when there are new records, and not by the clock."""

from __future__ import annotations

import datetime as dt
from typing import Any

from airflow.sdk import dag, task
from trainyard import announced_records, records_asset

NAME = "flights"


@dag(
    schedule=[records_asset(NAME)],
    start_date=dt.datetime(2013, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    max_active_runs=1,
)
def flights_on_new_records() -> None:
    """Take what was announced; train(records=records, ...) would take it too."""

    @task
    def tell(records: dict[str, Any]) -> str:
        spans = records.get("spans") or [records.get("span", "")]
        return f"{records['counts']['train']} flights of {' '.join(spans)}"

    tell(announced_records(NAME))


flights_on_new_records()
