"""What the steps of all groups are told alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.job.spec import Resources
from trainyard.failing import RETRIES, RETRY_DELAY, RetryByClass

__all__ = ["MAPPED", "for_pods"]

# The scheduler reads a mapped task's retries here: what an operator sets when it is made is too late.
MAPPED: Mapping[str, Any] = {
    "map_index_template": "{{ task.part }}",
    "retries": RETRIES,
    "retry_policy": RetryByClass(),
    "retry_delay": RETRY_DELAY,
}


def for_pods(resources: Resources | None, pod: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """A step operator's arguments for what a group was told of pods; not given, a DAG's `default_args` say."""
    given = {"pod_resources": resources, "pod": pod}
    return {name: value for name, value in given.items() if value is not None}
