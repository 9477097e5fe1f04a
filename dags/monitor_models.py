"""Compare every hour what the served models are asked with what they were trained on."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import Param, dag
from trainyard import Resources, monitor

MODELS = ("digits", "flights")
SMALL = Resources(cpu=0.25, memory="2Gi")


@dag(
    schedule="@hourly",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    tags=["trainyard", "serving", "monitoring"],
    params={
        "min_rows": Param(
            300, type="integer", minimum=1, title="Least rows", description_md="Fewer are *unknown*."
        ),
        "hours": Param(24, type="number", minimum=1, title="Window", description_md="In hours."),
    },
    doc_md="""
    ### Have requests drifted?

    The model server logs a sample of what it is asked (`TRAINYARD_REQUEST_LOG_RATE`). `monitor` counts each log file
    once and compares the last day with the records that the serving version was trained on, and its answers with
    those to held-out records. The task's link shows the report.

    **Drift** makes an event of the asset `drift/NAME`. A pipeline with `schedule=on_drift(NAME)` then trains again.
    Too few requests are *unknown*, and no event.
    """,
)
def monitor_models() -> None:
    """A task a model."""
    for name in MODELS:
        monitor(
            name,
            task_id=name,
            hours="{{ params.hours }}",
            min_rows="{{ params.min_rows }}",
            keep_days=14,
            resources=SMALL,
        )


monitor_models()
