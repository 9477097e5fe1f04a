"""What each try of a task came to, by the failure card in its log."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tests.pipeline_runs import Run

__all__ = ["classes", "log_of_try"]

_HEAD = re.compile(r"FAILED ([A-Z_]+)")


def log_of_try(run: Run, name: str, number: int) -> str:
    """The log of one try of a task, as text."""
    task = dataclasses.replace(run.tasks[name], try_number=number)
    rows: list[Any] = run.client.task_log(run.dag_id, run.run_id, task)
    return "\n".join(
        "\n".join(str(row[key]) for key in ("event", "error_detail") if row.get(key)) for row in rows
    )


def classes(run: Run, name: str) -> list[str]:
    """The failure class of each try that failed with a card, oldest first.

    A try without one is Airflow's own matter: on a busy machine a task that comes back from the triggerer at once may
    be taken for one whose process has died, and is tried again.
    """
    heads = (_HEAD.search(log_of_try(run, name, n)) for n in range(1, run.tasks[name].try_number + 1))
    return [head[1] for head in heads if head]
