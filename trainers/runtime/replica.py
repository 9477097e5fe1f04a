"""One replica as its launcher knows it: the job, its own place in it, and its voice (log and heartbeat)."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainers.job.checks import check
from trainers.job.errors import InvalidSpec
from trainers.job.observations import evaluations
from trainers.job.plan import ReplicaPlan
from trainers.job.record import Heartbeat, JobRecord, JobState, Outcome
from trainers.job.replica_log import ReplicaLog
from trainers.job.spec import RoleKind, StrategyKind
from trainers.runtime.strategies import drives_steps
from trainers.runtime.success import given_up

__all__ = ["ENV_ATTEMPT", "ENV_GENERATION", "ENV_GRACE", "Replica", "Times"]

ENV_ATTEMPT = "TRAINYARD_ATTEMPT"
ENV_GENERATION = "TRAINYARD_GENERATION"
ENV_GRACE = "TRAINYARD_GRACE"  # seconds for a checkpoint after SIGTERM; the pod's grace period less a margin

_WARN_EVERY = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Times:
    """The launcher's own times, in seconds.

    poll: between looks at record and trainer; beat: between signs of life; fresh: a peer that gave one within
    this time is there; grace: for a checkpoint after SIGTERM; leave: for a trainer to end by itself once the job
    is over; dump: for a stack dump; back_off: before the first restart, doubled with each, up to most_back_off.
    """

    poll: float = 0.1
    beat: float = 2.0
    fresh: float = 30.0
    grace: float = 25.0
    leave: float = 3.0
    dump: float = 1.0
    back_off: float = 0.2
    most_back_off: float = 10.0


def _grace(environ: Mapping[str, str]) -> float:
    text = environ.get(ENV_GRACE, str(Times.grace))
    try:
        seconds = float(text)
    except ValueError as e:
        raise InvalidSpec(ENV_GRACE, "be a number of seconds", text) from e
    check(math.isfinite(seconds) and seconds >= 0, ENV_GRACE, "be seconds of 0 or more", text)
    return seconds


class Replica:
    """A replica of the job in `record`; `clock` measures, `now` is the wall clock of the record."""

    def __init__(
        self,
        record: JobRecord,
        role: RoleKind,
        index: int,
        *,
        environ: Mapping[str, str] | None = None,
        times: Times | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        sink: int = 1,
    ) -> None:
        self.record = record
        self.plan = record.plan()
        self.job = self.plan.job
        self.me: ReplicaPlan = self.plan.replica(role, index)
        self.environ = dict(os.environ if environ is None else environ)
        self.times = times or Times(grace=_grace(self.environ))
        self.clock = clock
        self.now = now
        self.sink = sink
        self.log = ReplicaLog(record.folder, self.me.replica, now=now)
        self.drives = drives_steps(self.job, role)
        self.is_chief = role is RoleKind.CHIEF
        # It stands beside the gang: nobody waits for it, and nothing that becomes of it touches the others.
        self.is_evaluator = role is RoleKind.EVALUATOR
        self.is_passive_worker = role is RoleKind.WORKER and not self.drives
        self.all_reduce = self.job.strategy.kind is StrategyKind.MULTI_WORKER and not self.is_evaluator
        # Whoever restarts alone finds the others in the middle of a step with what was there before. Functions of a
        # synchronous chief run on its servers and workers until they end, so with it all begin again.
        driving = role in (RoleKind.CHIEF, RoleKind.PS)
        # What a command of the user's own would make of a peer that begins again, nobody knows.
        self.together = self.all_reduce or self.job.is_custom or (self.job.strategy.sync and driving)
        self._launcher = ""  # until it has taken its place
        self._looked = -1e9
        self._is_replaced = False
        self.last_beat = -1e9
        self._warned = -1e9

    @property
    def name(self) -> str:
        """Its short name, "worker-1"."""
        return self.me.replica

    def say(self, text: str) -> None:
        """Write to the log of the pod, and to the job's."""
        os.write(self.sink, f"[{self.name}] {text}\n".encode(errors="backslashreplace"))
        self.log.write(f"launcher: {text}\n".encode(errors="backslashreplace"))

    def heartbeat(self) -> Heartbeat | None:
        """Its latest sign of life, the trainer's or the launcher's."""
        return self.record.heartbeat(self.me.role, self.me.index)

    def take_place(self) -> None:
        """Say that this launcher has the replica's place: one of before ends its trainer and leaves.

        A node that is cut off still runs its pods, and may still reach the storage: two trainers would write to it.
        """
        launcher = secrets.token_hex(8)

        def take() -> None:
            self.record.take_place(self.me.role, self.me.index, launcher)
            self._launcher = launcher

        self.tolerating("whose place it is", take)

    def is_replaced(self, *, at_once: bool = False) -> bool:
        """Whether another launcher has taken the place since, as it was seen lately, or is.

        Not known where this one could not write.
        """
        due = at_once or self.clock() - self._looked >= self.times.beat / 4
        if self._launcher and due and not self._is_replaced:
            self._looked = self.clock()
            # "" when the plan was made anew.
            found = self.record.place_of(self.me.role, self.me.index)
            self._is_replaced = found not in ("", self._launcher)
        return self._is_replaced

    def job_step(self) -> int | None:
        """The finished steps of the job as far as this replica knows: its own, or the chief's; None before any."""
        beat = self.heartbeat() if self.drives else self.record.heartbeat(RoleKind.CHIEF, 0)
        return beat.step if beat else None

    def tolerating(self, what: str, write: Callable[[], object]) -> None:
        """Write something to the record that the job can do without: a full disk is a warning."""
        try:
            write()
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            if self.clock() - self._warned > _WARN_EVERY:
                self._warned = self.clock()
                self.say(f"could not write {what}: {e}; going on")

    def beat(self, phase: str, attempt: int, generation: int, **figures: Any) -> None:
        """Give a sign of life in the place of a trainer that gives none; the last figures stay but for those given."""
        self.last_beat = self.clock()
        self.tolerating("the heartbeat", lambda: self._beat(phase, attempt, generation, figures))

    def _beat(self, phase: str, attempt: int, generation: int, figures: Mapping[str, Any]) -> None:
        before = self.heartbeat()
        known = {name: getattr(before, name, None) for name in ("step", "target", "loss")}
        self.record.beat(
            Heartbeat(
                role=self.me.role.value,
                index=self.me.index,
                phase=phase,
                generation=generation,
                attempt=attempt,
                pid=os.getpid(),
                **{**known, **figures},
            )
        )

    def owes_evaluation(self, outcome: Outcome) -> bool:
        """Whether this is the evaluator of a job that has succeeded, and its last checkpoint is not evaluated."""
        if not self.is_evaluator or outcome.state is not JobState.SUCCEEDED:
            return False
        return all(done.step != outcome.step for done in evaluations(self.record.folder))

    def may_evaluate(self) -> bool:
        """Whether it may look at the last checkpoint of a job that is over, within the budget for that."""
        outcome = self.record.outcome()
        if outcome is None or not self.owes_evaluation(outcome):
            return False
        return self.now() - outcome.at <= self.job.budgets.evaluate

    def missing_peers(self) -> list[str]:
        """Other replicas without a fresh sign of life, of those that must be there for the start.

        Nobody waits for an evaluator, nor for a worker that was given up; an evaluator waits for the chief alone.
        """
        there = {
            beat.replica
            for beat in self.record.heartbeats()
            if beat.phase != "left" and self.now() - beat.at < self.times.fresh
        }
        missing = []
        gone = {f"worker-{index}" for index in given_up(self.record.folder)}
        for role in self.job.roles:
            if role.kind is RoleKind.EVALUATOR or (self.is_evaluator and role.kind is not RoleKind.CHIEF):
                continue
            expected = [r.replica for r in self.plan.role(role.kind) if r.replica not in gone - {self.name}]
            absent = [name for name in expected if name not in there | {self.name}]
            if len(expected) - len(absent) < min(role.min_replicas or role.replicas, len(expected)):
                missing += absent
        return missing
