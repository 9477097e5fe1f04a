"""Datasets of records, and the drift of what models are asked, as Airflow assets: training can be scheduled on them.

    @dag(schedule=[records_asset("flights")], ...)
    def flights_on_new_records(): ...

`prepare` makes an asset event when it has published something new. The event's `extra` holds what a consumer
needs: {"manifest", "digest", "counts"}, with "span" and "spans" for a dataset that has them.

    @dag(schedule=on_drift("digits", or_at="@weekly"), ...)

`monitor` makes an event of `drift_asset(NAME)` when requests have drifted, and none when they have not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context

__all__ = ["announce", "drift_asset", "extra_of", "on_drift", "records_asset"]

_EXTRA = ("manifest", "digest", "counts", "span", "spans")


def records_asset(name: str) -> Asset:
    """The asset of the records that `prepare(name=...)` publishes."""
    return Asset(name=f"records/{name}", uri=f"storage://records/{name}", group="trainyard")


def drift_asset(name: str) -> Asset:
    """The asset that has an event whenever `monitor(name)` finds that requests have drifted."""
    return Asset(name=f"drift/{name}", uri=f"storage://monitoring/{name}", group="trainyard")


def on_drift(name: str, *, or_at: str = "", timezone: str = "UTC") -> Any:
    """A schedule for training again when a model's requests have drifted; `or_at`, a cron expression, besides."""
    if not or_at:
        return [drift_asset(name)]
    from airflow.sdk import AssetOrTimeSchedule, CronTriggerTimetable

    return AssetOrTimeSchedule(
        timetable=CronTriggerTimetable(or_at, timezone=timezone), assets=[drift_asset(name)]
    )


def extra_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What an event says of a dataset, from what `prepare` returned."""
    return {key: result[key] for key in _EXTRA if key in result}


def announce(operator: BaseOperator, context: Context, result: Mapping[str, Any]) -> bool:
    """Put a dataset into the event of the task's outlet; False, and no event, when it is nothing new.

    A dataset that was there before is nothing new, unless this is a later try: the one before may have published
    it and then not lived to say so. So whoever waits for it hears of it at least once.
    """
    if not operator.outlets:
        return False
    if result.get("reused") and context["ti"].try_number == 1:
        # Airflow makes an event of each outlet that a task has when it ends.
        operator.outlets = []
        return False
    for asset in operator.outlets:
        context["outlet_events"][asset].extra = extra_of(result)
    return True
