"""What is done to a gang, and how long it stands still after that."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence

from trainers.job.record import Heartbeat
from trainers.job.spec import RoleKind, StrategyKind
from trainers.runtime.local_gang import LocalGang

__all__ = ["KINDS", "Blow", "Kind", "Watcher", "kinds_for", "strike"]

_MOVING = ("training", "saving")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of blow: a replica's `process` (trainer or launcher) gets a signal; `count` replicas at once."""

    role: str
    process: str = "trainer"
    signal: str = "SIGKILL"
    count: int = 1

    def __str__(self) -> str:
        many = "all of " if self.count > 9 else "two of " if self.count == 2 else ""
        return f"{many}{self.role} {self.process} {self.signal}"


KINDS: Sequence[Kind] = (
    Kind("worker"),
    Kind("worker", count=99),
    Kind("ps"),
    Kind("ps", count=2),
    Kind("chief"),
    Kind("worker", "launcher"),
    Kind("ps", "launcher"),
    Kind("chief", "launcher"),
    Kind("ps", signal="SIGSTOP"),
    Kind("worker", signal="SIGSTOP"),
    Kind("chief", signal="SIGSTOP"),
    Kind("worker", "launcher", "SIGTERM"),
    Kind("ps", "launcher", "SIGTERM"),
    Kind("chief", "launcher", "SIGTERM"),
    Kind("chief", signal="SIGTERM"),
)


def kinds_for(gang: LocalGang) -> list[Kind]:
    """The kinds that can be done to this gang."""
    counts = {kind.value: gang.plan.job.replicas(kind) for kind in RoleKind}
    return [k for k in KINDS if counts[k.role] >= (1 if k.count == 1 else 2)]


@dataclasses.dataclass
class Blow:
    """One blow to a gang; `stall` seconds until the next step, None when the job ended before one was due."""

    strategy: str
    kind: Kind
    at: float
    step: int
    stall: float | None = None
    recovered: bool = False


class Watcher:
    """The chief's steps as heartbeats tell them; each is written twice a second at most."""

    def __init__(self, gang: LocalGang) -> None:
        self._gang = gang
        self.beats: list[Heartbeat] = []

    def look(self) -> Heartbeat | None:
        """The chief's latest heartbeat, noted when it says something new."""
        beat = self._gang.record.heartbeat("chief", 0)
        if beat is not None and (not self.beats or beat != self.beats[-1]):
            self.beats.append(beat)
        return beat

    def moving(self) -> bool:
        """Whether the chief makes steps."""
        beat = self.look()
        return beat is not None and beat.phase in _MOVING

    def advances(self, since: float) -> list[float]:
        """When steps were seen to be made since a time."""
        times = []
        last: tuple[int, int] | None = None
        for beat in self.beats:
            now = (beat.attempt, beat.step or 0)
            if last is not None and now != last and beat.phase in _MOVING and beat.at >= since:
                times.append(beat.at)
            last = now
        return times

    def usual_gap(self, before: float) -> float:
        """The median time between two advances before a time; half a second where there are too few."""
        times = [t for t in self.advances(before - 20) if t <= before]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.median(gaps) if len(gaps) >= 3 else 0.5


def strike(gang: LocalGang, kind: Kind, rng: random.Random) -> bool:
    """Do it; False when a process it is meant for is not there at the moment."""
    indexes = list(range(gang.plan.job.replicas(RoleKind(kind.role))))
    chosen = rng.sample(indexes, min(kind.count, len(indexes)))
    number = signal.Signals[kind.signal]
    done = False
    for index in chosen:
        if kind.process == "launcher":
            launcher = gang.launchers.get(f"{kind.role}-{index}")
            if launcher is None or launcher.poll() is not None:
                continue
            launcher.send_signal(number)
        else:
            attempts = gang.record.attempts(kind.role, index)
            if not attempts or attempts[-1].ended is not None:
                continue
            try:
                os.kill(attempts[-1].pid, number)
            except ProcessLookupError:
                continue
        done = True
    return done


def restarts_chief(gang: LocalGang, kind: Kind) -> bool:
    """Whether the chief begins anew after such a blow; else the others go on without a pause."""
    passive = gang.plan.job.strategy.kind is StrategyKind.PARAMETER_SERVER and kind.role == "worker"
    # Told by SIGTERM, a parameter server leaves after the chief has saved: that breaks the connection, too.
    return not passive


def stall_of(watcher: Watcher, blow: Blow, attempt: int, anew: bool) -> float | None:
    """Seconds from the blow to the next step; None while that is not known yet.

    Where the chief begins anew, up to its first step. Where others go on, the longest pause within 10 s of the
    blow, less the usual time between two heartbeats that tell of steps.
    """
    if anew:
        later = [b.at for b in watcher.beats if b.attempt > attempt and b.phase in _MOVING]
        return later[0] - blow.at if later else None
    times = [blow.at, *watcher.advances(blow.at)]
    if len(times) < 3 or time.time() < blow.at + 10:
        return None
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return max(0.0, max(gaps) - watcher.usual_gap(blow.at))
