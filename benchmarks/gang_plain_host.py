"""The embedded platform's supervisor with Airflow's own defaults where Trainyard chooses others for speed."""

from __future__ import annotations

import sys

from trainyard.platform import host

TUNED = {
    "scheduler": ("scheduler_idle_sleep_time",),
    "dag_processor": ("parsing_processes", "refresh_interval"),
    "workers": ("missing_dag_retry_delay", "missing_dag_retries"),
}


def plain_options(*args: object) -> dict[str, dict[str, str]]:
    """Airflow's options without those that make it quick."""
    return {
        section: {name: value for name, value in values.items() if name not in TUNED.get(section, ())}
        for section, values in _options(*args).items()  # type: ignore[arg-type]
    }


_options, host.airflow_options = host.airflow_options, plain_options  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(host.main())
