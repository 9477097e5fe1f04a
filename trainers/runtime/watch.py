"""The launcher's watch over one trainer process: until it exits, or has to go."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import time
from pathlib import Path

from trainers.job.failures import FailureClass
from trainers.job.record import Attempt, Heartbeat, JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.delivery import Delivery
from trainers.runtime.logs import LogPump
from trainers.runtime.process import Child
from trainers.runtime.replica import Replica
from trainers.runtime.usage import Usage

__all__ = ["REPLACED", "Bell", "End", "Watch", "stack_file"]

# Phases of a trainer that has made its first step.
_STEPPING = ("training", "saving", "ended")
# Phases of an evaluator that has come up; while it starts it has the start budget, as a trainer has.
_EVALUATING = ("waiting", "restoring", "evaluating", "ended")


def stack_file(record: JobRecord, replica: str, attempt: int) -> Path:
    """Where a trainer's stacks are dumped when it stands still."""
    folder = record.folder / "stacks"
    folder.mkdir(exist_ok=True)
    return folder / f"{replica}-{attempt:04d}.txt"


class Bell:
    """SIGTERM, as something that a `select` wakes up for."""

    def __init__(self) -> None:
        self.rung = False
        self.fd, self._write = os.pipe()
        for end in (self.fd, self._write):
            os.set_blocking(end, False)

    def ring(self) -> None:
        """Ring; safe in a signal handler."""
        self.rung = True
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            return  # whoever waits has been woken already

    def wait(self, seconds: float, *others: int) -> None:
        """Until it rings, one of `others` can be read, or the time is over."""
        ready, _, _ = select.select([self.fd, *others], [], [], max(0.0, seconds))
        if self.fd in ready:
            os.read(self.fd, 64)

    def close(self) -> None:
        """Give its descriptors back."""
        os.close(self.fd)
        os.close(self._write)


@dataclasses.dataclass(frozen=True)
class End:
    """Why a watch ended.

    exited: the trainer did; over: the job is; stalled: no step within the budget; terminated: SIGTERM; alone:
    peers did not come; replaced: another pod has this replica's place; regenerated: the gang begins a new life;
    blamed: it does because of this replica, whose pod has to be replaced; overdue: the job has taken longer than
    its total budget.
    """

    why: str
    code: int | None = None
    reason: str = ""


REPLACED = End("replaced", reason="another pod has taken this one's place, as if it were lost with its node")


class Watch:
    """The watch over one trainer process; all peers must have come by the time `barrier`, None if they have."""

    def __init__(
        self,
        replica: Replica,
        child: Child,
        pump: LogPump,
        attempt: Attempt,
        bell: Bell,
        delivery: Delivery,
        barrier: float | None,
    ) -> None:
        self._r = replica
        self._record = replica.record
        self._child = child
        self._pump = pump
        self._attempt = attempt
        self._bell = bell
        self._delivery = delivery
        self._usage = Usage(
            self._record.folder,
            replica.name,
            replica.environ,
            began=self._record.began,
            clock=replica.clock,
            now=replica.now,
        )
        self.barrier = barrier
        self._seen: tuple[str, int | None, float] | None = None
        self._changed = replica.clock()
        self._over_since: float | None = None
        self._asked_at: float | None = None
        self._running_at = self._changed
        self._touched: float | None = None
        self._touched_of = 0.0  # the time in the heartbeat that the file had then
        self._overdue: str = ""
        began = self._record.began
        self._due = began + replica.job.budgets.total if began is not None else None

    def run(self) -> End:
        """Watch; the trainer may still run when this returns."""
        while True:
            self._bell.wait(self._r.times.poll, *([] if self._pump.at_end else [self._pump.source]))
            self._pump.pump()
            if self._pump.at_end:
                time.sleep(0.005)  # it has closed its output: most likely it is about to end
            code = self._child.poll()
            if code is not None:
                return End("overdue", code, self._overdue) if self._overdue else End("exited", code)
            end = self._look(self._r.clock())
            if end is not None:
                return end

    def _look(self, now: float) -> End | None:
        if self._record.outcome() is not None:
            return self._over(now)
        if self._bell.rung:
            return self._leaving(now)
        if self._r.is_replaced():
            return REPLACED
        self._note_progress(now)
        self._usage.poll(self._child.pid)
        return self._late(now) or self._alone(now) or self._regenerated() or self._stalled(now)

    # ---- one look each

    def _over(self, now: float) -> End | None:
        """Who drives steps ends by itself in a moment; passive servers have nothing to finish."""
        if self._r.is_evaluator:
            if self._bell.rung:
                return End("terminated", reason="was asked to leave")
            return None if self._r.may_evaluate() else End("over")
        self._over_since = now if self._over_since is None else self._over_since
        if self._r.drives and now - self._over_since <= self._r.times.leave:
            return None
        return End("over")

    def _leaving(self, now: float) -> End | None:
        """After SIGTERM: a trainer saves and exits; a server stays until the chief has saved."""
        if self._asked_at is None:
            self._asked_at = now
            self._r.say("asked to leave" + (": saving a checkpoint" if self._r.drives else ""))
            self._r.beat("leaving", self._attempt.number, self._attempt.generation)
            if self._r.drives:
                self._child.signal(signal.SIGTERM)
        grace = self._r.times.grace
        if now - self._asked_at > grace:
            return End("terminated", reason=f"no checkpoint within {grace:g} s of SIGTERM")
        if not self._r.drives and self._may_go(self._asked_at, now):
            return End("terminated", reason="was asked to leave")
        return None

    def _may_go(self, asked_at: float, now: float) -> bool:
        """Whether a server that was asked to leave may: the chief has saved since, or is gone."""
        if self._r.me.role is not RoleKind.PS:
            return True  # a worker holds nothing
        chief = self._record.heartbeat(RoleKind.CHIEF, 0)
        if chief is None or chief.phase in ("left", "ended"):
            return True
        state = self._record.folder / "checkpoints" / "checkpoint"
        return state.exists() and state.stat().st_mtime > self._r.now() - (now - asked_at)

    def _late(self, now: float) -> End | None:
        """After the total budget the chief saves and ends the job; the others do where there is no chief to do it."""
        if self._due is None or self._r.is_evaluator or self._r.now() < self._due:
            return None
        times = self._r.times
        if not self._overdue:
            self._asked_at = now
            step, total = self._r.job_step(), self._r.job.budgets.total
            self._overdue = f"the job is not done within its total budget of {total:g} s" + (
                f" (step {step})" if step is not None else ""
            )
            self._r.say(self._overdue)
            if self._r.is_chief:
                self._child.signal(signal.SIGTERM)
        assert self._asked_at is not None
        patience = times.grace + (0 if self._r.is_chief else times.leave + times.beat)
        return End("overdue", reason=self._overdue) if now - self._asked_at > patience else None

    def _note_progress(self, now: float) -> None:
        if not (self._r.drives or self._r.is_evaluator):
            # A server gives no sign of life itself.
            if now - self._r.last_beat > self._r.times.beat:
                self._r.beat("serving", self._attempt.number, self._attempt.generation)
            return
        beat = self._r.heartbeat()
        ours = (self._attempt.number, self._child.pid)
        if beat is None or (beat.attempt, beat.pid) != ours:
            mark = self._seen
        else:
            # A trainer must make steps; an evaluator may wait for one, its loop only has to go round.
            mark = (beat.phase, beat.step, beat.at if self._r.is_evaluator else 0.0)
        if mark is not None and mark != self._seen:
            self._seen, self._changed = mark, now
            self._delivery.progressed(mark[0])
        elif beat is not None and mark is not None:
            self._note_touch(beat, now)
        self._delivery.poll()

    def _note_touch(self, beat: Heartbeat, now: float) -> None:
        """Progress that could not be written, for want of space, changes the time of the file alone."""
        touched = self._record.heartbeat_touched(beat.role, beat.index)
        if touched != self._touched:
            if self._touched_of == beat.at:
                self._changed = now
            self._touched, self._touched_of = touched, beat.at

    def _alone(self, now: float) -> End | None:
        """Nobody waits for a peer that will not come: at the start for any, later for the chief."""
        budget = self._r.job.budgets.start
        if self.barrier is None:
            chief = None if self._r.is_chief else self._record.heartbeat(RoleKind.CHIEF, 0)
            if chief is not None and self._r.now() - chief.at > budget:
                return End("alone", reason=f"chief-0 has given no sign of life for {budget:g} s")
            return None
        missing = self._r.missing_peers()
        if not missing:
            self.barrier = None
            return None
        if now <= self.barrier:
            return None
        return End("alone", reason=f"{', '.join(missing)} did not come within {budget:g} s")

    def _regenerated(self) -> End | None:
        generation = self._record.generation()
        if self._r.is_evaluator or generation.number <= self._attempt.generation:
            return None
        why = f"generation {generation.number}, asked for by {generation.by}: {generation.reason}"
        self._r.say(why)
        if generation.reason.startswith(FailureClass.STALLED.value):
            self._dump_stacks()
        if generation.blamed == self._r.name:
            return End("blamed", reason=generation.reason)
        return End("regenerated", reason=why)

    def _stalled(self, now: float) -> End | None:
        still = now - self._changed
        if not (self._r.drives or self._r.is_evaluator):
            return self._suspended(now)
        if still <= self._patience():
            return None
        phase, step, _ = self._seen or ("starting", None, 0.0)
        reason = f"no step for {still:.0f} s while {phase}" + (f" (step {step})" if step else "")
        self._r.say(f"{reason}: dumping stacks, then ending it")
        self._dump_stacks()
        if self._r.drives and (self._r.all_reduce or self._r.plan.role(RoleKind.PS)):
            # Whoever stands still in a gang holds up all: everybody dumps stacks and begins again.
            why = f"{FailureClass.STALLED}: {reason}"
            self._record.next_generation(self._attempt.generation, by=self._r.name, reason=why)
        return End("stalled", reason=reason)

    def _suspended(self, now: float) -> End | None:
        """A server gives no sign of life that could fail to come; but a process that is stopped can be seen.

        It has twice the stall budget, so that the chief, which waits for it, has everybody's stacks dumped first.
        """
        if not self._child.stopped():
            self._running_at = now
            return None
        still = now - self._running_at
        if still <= 2 * self._r.job.budgets.stall:
            return None
        reason = f"its process has been stopped (SIGSTOP) for {still:.0f} s"
        self._r.say(f"{reason}: ending it")
        return End("stalled", reason=reason)

    def _patience(self) -> float:
        """How long it may stand still: until the first step is made, as long as the start may take."""
        budgets = self._r.job.budgets
        stepping = self._seen is not None and self._seen[0] in (
            _EVALUATING if self._r.is_evaluator else _STEPPING
        )
        return budgets.stall if stepping else max(budgets.start, budgets.stall)

    def _dump_stacks(self) -> None:
        """Have the trainer write the stacks of all its threads to the record's folder."""
        path = stack_file(self._record, self._r.name, self._attempt.number)
        if not path.exists():
            return  # it did not come as far as setting that up: SIGUSR1 would end it without a word
        self._child.signal(signal.SIGUSR1)
        self._child.signal(signal.SIGCONT)  # who is stopped must run to tell where
        deadline = self._r.clock() + self._r.times.dump
        size = 0
        while self._r.clock() < deadline:
            before, size = size, path.stat().st_size
            if size and size == before:
                return
            time.sleep(0.02)
