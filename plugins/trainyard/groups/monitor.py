"""monitor: what a served model is asked, compared with what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainers.job.spec import Resources
from trainyard.groups.steps import for_pods
from trainyard.operators.monitor import MonitorOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["monitor"]


def monitor(
    name: str,
    *,
    logs: str = "storage://requests",
    hours: float = 24,
    min_rows: int = 300,
    thresholds: Mapping[str, Any] | None = None,
    alarm: str = "warn",
    quiet_hours: float = 24,
    keep_days: float = 0,
    dry_run: bool = False,
    resources: Resources | None = None,
    pod: Mapping[str, Any] | str | None = None,
    task_id: str = "monitor",
) -> XComArg:
    """Compare a model's logged requests with its training data: {"verdict", "alarm", "drifted", "version", ...}.

    Each log file below `logs` is counted once. The requests of the last `hours` and the answers to them are
    compared, for each version that was asked, with the records that it was trained on and with its answers to the
    held-out ones; below `min_rows` the verdict is unknown. `thresholds` is {measure: {"warn", "fail"}}, or {feature:
    {measure: ...}} for one feature. A measure above its limit of `alarm`, "warn" or "fail", is drift: then the asset
    `drift_asset(name)` has an event, and again only when more has drifted or after `quiet_hours`. Log files that
    were counted are removed after `keep_days` (0: never); `dry_run` only says which. `resources` and `pod` are for
    its pod, as of `prepare`.
    """
    return MonitorOperator(
        task_id=task_id,
        model=name,
        spec={
            "name": name,
            "logs": logs,
            "models": "storage://models",
            "records": "storage://records",
            "output": "storage://monitoring",
            "hours": hours,
            "min_rows": min_rows,
            "thresholds": dict(thresholds or {}),
            "alarm": alarm,
            "quiet_hours": quiet_hours,
            "keep_days": keep_days,
            "dry_run": dry_run,
            "run": "{{ run_id }}",
        },
        **for_pods(resources, pod),
    ).output
