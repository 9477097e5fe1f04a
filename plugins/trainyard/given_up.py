"""Waiting for a pod, and seeing that it will never end or never start although it goes on looking alive.

A pod whose node is gone says "Running" for ever: nobody is left to say anything else, and its deletion never comes to
an end. One whose Secret is missing says "Pending" as long as anybody waits. `Lookout` looks at each reading of a pod
and raises what it means; PodTrigger and the pod managers of `watched` ask it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from airflow.providers.cncf.kubernetes.utils.pod_manager import PodLaunchTimeoutException

from trainyard.pods import never_starts, node_is_silent

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.utils.pod_manager import PodManager
    from kubernetes.client import V1Pod

__all__ = ["GIVEN_UP", "Lookout", "NeverStarts", "PodGivenUp", "PodLost", "watched"]

_OVERDUE = 30.0  # seconds beyond its grace period within which a node that is just busy ends a pod


class PodGivenUp(PodLaunchTimeoutException):
    """There is no use in waiting any longer; to the provider a kind of time-out, after which it waits for nothing."""


class PodLost(PodGivenUp):
    """The pod was lost with its node."""


class NeverStarts(PodGivenUp):
    """The pod waits for something that will not come by itself."""


class Lookout:
    """Looks at the readings of one pod, one after the other.

    Time is what passed between readings here, not what the pod's stamps say: clocks of machines differ.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deleted_at: float | None = None
        self.error: PodGivenUp | None = None

    def look(self, pod: V1Pod) -> V1Pod:
        """The pod; PodLost or NeverStarts, which is kept in `error`, when there is no use in waiting for it."""
        self.error = self._verdict(pod)
        if self.error is not None:
            raise self.error
        return pod

    def _verdict(self, pod: V1Pod) -> PodGivenUp | None:
        if (pod.status and pod.status.phase) in ("Succeeded", "Failed"):
            return None
        if why := never_starts(pod):
            return NeverStarts(f"pod {pod.metadata.name} can't start: {why}")
        if pod.metadata.deletion_timestamp is None:
            return None
        now = self._clock()
        self._deleted_at = now if self._deleted_at is None else self._deleted_at
        node = f"node {pod.spec.node_name}"
        if node_is_silent(pod):
            return PodLost(f"pod {pod.metadata.name} was lost with its {node}, which does not answer")
        waited = now - self._deleted_at
        if waited > (pod.metadata.deletion_grace_period_seconds or 0) + _OVERDUE:
            return PodLost(
                f"pod {pod.metadata.name} was lost: {node} has not ended it {waited:.0f} s after its deletion"
            )
        return None


def watched(manager: PodManager, watch: Lookout) -> PodManager:
    """The provider's pod manager, whose readings of the pod are looked at."""
    read = manager.read_pod
    manager.read_pod = lambda pod: watch.look(read(pod))  # type: ignore[method-assign]
    return manager


GIVEN_UP = {cls.__name__: cls for cls in (PodLost, NeverStarts)}
"""The errors by their names, as a trigger's event has them."""
