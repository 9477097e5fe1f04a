"""Score every month's flights with the champion, in four pods."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag
from trainyard import batch_score


@dag(schedule="@monthly", start_date=dt.datetime(2013, 1, 1, tzinfo=dt.timezone.utc), catchup=False)
def score_flights() -> None:
    """One group: the version is looked up, the work planned, scored in pods, published."""
    batch_score("storage://raw/flights/*.parquet", name="flights", slices=4, columns=["carrier", "flight"])


score_flights()
