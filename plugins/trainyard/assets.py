"""Datasets of records as Airflow assets: training can be scheduled on data.

    @dag(schedule=[records_asset("flights")], ...)
    def flights_on_new_records(): ...

`prepare` makes an asset event when it has published something new. The event's `extra` holds what a consumer
needs: {"manifest", "digest", "counts"}, with "span" and "spans" for a dataset that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context

__all__ = ["announce", "extra_of", "records_asset"]

_EXTRA = ("manifest", "digest", "counts", "span", "spans")


def records_asset(name: str) -> Asset:
    """The asset of the records that `prepare(name=...)` publishes."""
    return Asset(name=f"records/{name}", uri=f"storage://records/{name}", group="trainyard")


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
