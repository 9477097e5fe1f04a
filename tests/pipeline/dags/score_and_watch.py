"""Scores a table with a served model, watches what it was asked, and a pipeline that drift starts."""

from __future__ import annotations

from airflow.sdk import dag, task
from trainyard import Resources, batch_score, monitor, on_drift

SMALL = Resources(cpu=0.25, memory="2Gi")


@dag(schedule=None, is_paused_upon_creation=True)
def score_and_watch() -> None:
    """Two groups beside each other."""
    batch_score("storage://raw/line/*.parquet", name="line", slices=2, columns=["id"], resources=SMALL)
    monitor("line", hours=48, min_rows=100, resources=SMALL)


@dag(schedule=on_drift("line"), is_paused_upon_creation=True)
def line_on_drift() -> None:
    """What drift starts."""

    @task
    def what(**context: object) -> list[str]:
        (events,) = context["triggering_asset_events"].values()  # type: ignore[attr-defined]
        return list(events[-1].extra["drifted"])

    what()


score_and_watch()
line_on_drift()
