"""A job of plain Python on several replicas: line_by_sockets.py in place of a trainer module."""

from __future__ import annotations

import datetime as dt
from typing import Any

from airflow.sdk import Param, dag, task
from trainyard import Resources, Success, form, train


@dag(
    schedule="@weekly",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    params={
        **form(strategy="custom", workers=2, steps=200),
        "pause": Param(0.0, type="number", minimum=0, title="Pause", description_md="Seconds between steps."),
    },
)
def line_weekly() -> None:
    """Train, and tell what came out."""

    @task
    def tell(trained: dict[str, Any]) -> str:
        line = trained["metrics"]
        return f"y = {line['w']:.2f} x + {line['b']:.2f} after {trained['step']} steps, in {trained['job']}"

    trained = train(
        name="line",
        command=["python", "-m", "line_by_sockets"],
        success=Success("all_workers"),
        resources={"default": Resources(0.1, "128Mi")},
    )
    tell(trained)


line_weekly()
