"""When a job has succeeded, how often it may start again, and how long each stage may take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from trainers.job.checks import check, frozen_map, is_number, is_whole
from trainers.job.errors import InvalidSpec
from trainers.job.failures import RETRY_POLICIES, FailureClass

__all__ = ["Budgets", "RestartPolicy", "Success"]


@dataclasses.dataclass(frozen=True)
class Success:
    """When the job has succeeded: the chief has made the asked steps, and enough workers were left to the end.

    A worker is *given up* when a failure class that may be retried (INFRA, STALLED, PEER_LOST, OOM) has used up its
    cap in `restart`; its launcher then leaves with that failure. It no longer counts as given up once its pod comes
    again. USER, DATA and CONFIG failures of a worker end the job at once under every rule.

    chief        the job goes on while steps can be made: with `min_replicas` workers, where that is not said with
                 one, under `sync` with as many as a step takes (workers - backup_workers)
    fraction     and at least ceil(fraction * workers) must not have been given up, to the last step
    all_workers  and none may have been given up

    With fewer left the job ends, with one failure. All that is for the passive workers of `parameter_server`. Under
    `multi_worker` every step needs every peer: `chief` and `all_workers` are the same, a fraction below 1 is refused.
    `local` and `mirrored` have no workers that could be given up: every rule is kept.
    """

    rule: str = "chief"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        rules = ("chief", "all_workers", "fraction")
        check(self.rule in rules, "success.rule", f"be one of {', '.join(rules)}", self.rule)
        check(
            is_number(self.fraction) and 0 < self.fraction <= 1,
            "success.fraction",
            "be above 0 and at most 1",
            self.fraction,
        )


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """How often each failure class may restart a replica in one job; classes that never retry can't be named."""

    caps: Mapping[FailureClass, int] = dataclasses.field(default_factory=dict)

    DEFAULT_CAP = 5

    def __post_init__(self) -> None:
        caps = {}
        for cls, cap in frozen_map("restart.caps", self.caps).items():
            try:
                key = FailureClass(cls)
            except ValueError as e:
                raise InvalidSpec(
                    "restart.caps", f"name classes of {[c.value for c in FailureClass]}", cls
                ) from e
            check(
                RETRY_POLICIES[key].retry, "restart.caps", "not name a class that is never retried", key.value
            )
            check(is_whole(cap) and cap >= 0, f"restart.caps.{key}", "be a whole number of 0 or more", cap)
            caps[key] = cap
        object.__setattr__(self, "caps", MappingProxyType(caps))

    def cap(self, failure_class: FailureClass) -> float:
        """How many restarts this class is allowed: 0 for never, infinite for free ones."""
        policy = RETRY_POLICIES[failure_class]
        if not policy.retry:
            return 0
        if failure_class in self.caps:
            return self.caps[failure_class]
        if not policy.charged:
            return math.inf
        return 1 if failure_class is FailureClass.OOM else self.DEFAULT_CAP


@dataclasses.dataclass(frozen=True)
class Budgets:
    """How long each stage may take, in seconds; kept as absolute deadlines, never as counted polls.

    admit: until the cluster has room for the whole gang; schedule: until nodes are found; start: from the first
    replica up until all have met; stall: without a finished step; total: the whole job; evaluate: after its end, for
    an evaluator to look at the last checkpoint.
    """

    admit: float = 3600.0
    schedule: float = 600.0
    start: float = 600.0
    stall: float = 180.0
    total: float = 7 * 24 * 3600.0
    evaluate: float = 600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check(is_number(value) and value > 0, f"budgets.{field.name}", "be seconds above 0", value)
