"""The launcher of a replica that runs a command of the user's own (strategy `custom`), of whatever framework.

In each generation of the gang all launchers meet before any command is started, so that no framework waits in vain for
a peer without a machine. A command that ends badly, or is lost with its pod, brings the next generation: all commands
are ended and, once all have met again, started again, to go on from their own checkpoints. One that exits with 0 is
done and waits for the others; the chief's ends the job by the success rule: its own end (`chief`), or that of every
worker as well (`all_workers`). Standard library only.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.failures import EXIT_CODES, Failure, FailureClass
from trainers.job.record import Attempt, JobState
from trainers.job.reporting import read_result
from trainers.job.spec import RoleKind
from trainers.job.times import Marks, time_split
from trainers.runtime.command import command_env, module_path, start_command
from trainers.runtime.command_watch import CommandWatch, look_every, silent_peers
from trainers.runtime.ends import failure_of_end
from trainers.runtime.launcher import Launcher
from trainers.runtime.logs import LogPump
from trainers.runtime.process import Child
from trainers.runtime.replica import ENV_ATTEMPT
from trainers.runtime.tracking import Spool
from trainers.runtime.watch import REPLACED, End, Watch

__all__ = ["CommandLauncher"]

_EARLIER = "another replica's command failed first"


class CommandLauncher(Launcher):
    """Keeps the command of one replica going; `run` returns the exit code of the pod."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start = self._start_command
        self._spool: Spool | None = None
        self._files = (Path(), Path())
        role = self.replica.job.role(self.replica.me.role)
        self._command = role.command if role else ()

    # ---- starting

    def _begin(self) -> float | None:
        """Say that the job starts, or that this replica is there again: then the others begin again, too."""
        r = self.replica
        (self.record.folder / "checkpoints").mkdir(exist_ok=True)
        generation = self.record.generation().number
        if any(attempt.generation == generation for attempt in self._attempts.all()):
            reason = f"{r.name} came back"
            r.tolerating(
                "the generation", lambda: self.record.next_generation(generation, by=r.name, reason=reason)
            )
        if r.is_chief:
            first = self.record.state in (JobState.PLANNED, JobState.STARTING)
            self._set_state(JobState.STARTING if first else JobState.RESTARTING)
            r.tolerating("what is tracked", self._describe)
        return None

    def _describe(self) -> None:
        """What MLflow shall know of the job from its start."""
        job = self.replica.job
        self._spool = Spool(self.record.folder, clock=self.replica.now)
        counts = {f"{role.kind}_replicas": role.replicas for role in job.roles}
        self._spool.params({**job.args, "strategy": job.strategy.kind.value, **counts})
        self._spool.tags(
            {
                "trainyard.job": job.name,
                "trainyard.folder": self.record.folder,
                "trainyard.command": " ".join(self._command),
            }
        )

    def _trainer_env(self, number: int, generation: int, message: Path) -> dict[str, str]:
        stem = message.with_suffix("")
        self._files = Path(f"{stem}.progress.json"), Path(f"{stem}.result.json")
        more = command_env(self.replica.job, self.record.folder, *self._files)
        env = {**super()._trainer_env(number, generation, message), **more}
        # A launcher that was forked from a warm interpreter has that one's path, and no variable that says so.
        found = module_path(sys.path, [sys.prefix, sys.base_prefix], str(Path.cwd()))
        if found:
            env.setdefault("PYTHONPATH", found)
        return env

    def _start_command(self, env: Mapping[str, str]) -> Child:
        child = start_command(self._command, env)
        if self.replica.is_chief:
            self._set_state(JobState.RUNNING)
            marks = Marks(self.record.folder, int(env[ENV_ATTEMPT]), now=self.replica.now)
            marks.stepped()  # what a command does until its first step is not known
        return child

    def _watch(self, child: Child, pump: LogPump, attempt: Attempt, barrier: float | None) -> Watch:
        watch = CommandWatch(self.replica, child, pump, attempt, self._bell, self._delivery, barrier)
        watch.progress_file = self._files[0]
        watch.spool = self._spool
        return watch

    # ---- a life of the gang

    def _one_life(
        self, generation: int, barrier: float | None
    ) -> tuple[End, Attempt | None, float | None, Failure]:
        """Meet the others, run the command to its end, and find out what that means."""
        early = self._meet(generation)
        if early is not None:
            return early, None, None, self._failure(early)
        end, attempt, barrier, failure = self._one_trainer(generation, None)
        step, metrics = read_result(self._files[1])
        for path in self._files:
            path.unlink(missing_ok=True)
        if end.why != "exited" or self._bell.rung or self.record.outcome() is not None:
            return end, attempt, barrier, self._explained(failure)
        self._attempts.note_end(attempt, end, None)
        if end.code == 0:
            self.replica.say("the command is done")
            end = self._rest(generation, step, metrics)
            return end, attempt, barrier, self._failure(end)
        return end, attempt, barrier, self._whose(self._explained(failure), generation)

    def _failure(self, end: End) -> Failure:
        return failure_of_end(self.replica, end, None, (), asked=self._bell.rung)

    def _explained(self, failure: Failure) -> Failure:
        """In the words of a command."""
        hint = failure.hint
        if failure.failure_class is FailureClass.STALLED and failure.code == "runtime.stalled":
            hint = "raise budgets.stall, or write the progress file more often"
        elif failure.failure_class is FailureClass.USER and failure.code == "runtime.exited":
            hint = "look at the end of its log; exit codes 81 to 89 say a failure's class"
        reason = failure.reason.replace("the trainer process", "the command")
        return dataclasses.replace(failure, reason=reason, hint=hint)

    def _meet(self, generation: int) -> End | None:
        """Wait for the launchers of all replicas; None once they are there, in this generation."""
        r = self.replica
        budget = r.job.budgets.start
        number = 1 + self._attempts.newest()
        r.beat("waiting", number, generation)
        begun = r.clock()
        while True:
            end = self._cut_short(generation)
            if end is not None:
                return end
            absent = self._absent(generation)
            if not absent:
                return None
            waited = r.clock() - begun
            if waited > budget:
                return End("alone", reason=f"{', '.join(absent)} did not come within {budget:g} s")
            if r.clock() - r.last_beat > r.times.beat:
                r.beat("waiting", number, generation)
            # Of a large gang every look reads many files.
            self._bell.wait(r.times.poll if waited < 10 else r.times.beat / 2)

    def _absent(self, generation: int) -> list[str]:
        r = self.replica
        there = {
            beat.replica
            for beat in self.record.heartbeats()
            if beat.phase != "left" and beat.generation >= generation and r.now() - beat.at < r.times.fresh
        }
        return [peer.replica for peer in r.plan.replicas if peer.replica not in there | {r.name}]

    def _cut_short(self, generation: int) -> End | None:
        """What ends a wait without a command."""
        r = self.replica
        if self.record.outcome() is not None:
            return End("over")
        if self._bell.rung:
            return End("terminated", reason="was asked to leave")
        if r.is_replaced():
            return REPLACED
        began, total = self.record.began, r.job.budgets.total
        if began is not None and r.now() > began + total:
            return End("overdue", reason=f"the job is not done within its total budget of {total:g} s")
        newer = self.record.generation()
        if newer.number > generation:
            why = f"generation {newer.number}, asked for by {newer.by}: {newer.reason}"
            r.say(why)
            return End("regenerated", reason=why)
        return None

    def _rest(self, generation: int, step: int | None, metrics: Mapping[str, float]) -> End:
        """Wait, with the command done, for the end of the job; the chief brings it about."""
        r = self.replica
        looked = asked = -1e9
        number = self._attempts.newest()
        while True:
            if r.is_chief and self._all_done(generation):
                self._succeed(step, metrics)
                return End("exited", 0)
            end = self._cut_short(generation)
            if end is not None:
                return End("exited", 0) if end.why == "over" else end
            if r.clock() - looked > r.times.beat:
                looked = r.clock()
                r.beat("ended", number, generation, **({} if step is None else {"step": step}))
            if r.clock() - asked > look_every(r):
                asked = r.clock()
                silent = silent_peers(r)
                if silent:
                    budget = r.job.budgets.start
                    text = f"{', '.join(silent)} gave no sign of life for {budget:g} s"
                    return End("alone", reason=text)
            self._bell.wait(r.times.poll)

    def _all_done(self, generation: int) -> bool:
        """Whether the success rule is met, now that the chief's command is done."""
        if self.replica.job.success.rule == "chief":
            return True
        done = {
            attempt.index
            for attempt in self.record.attempts(RoleKind.WORKER)
            if attempt.generation == generation and attempt.ended is not None and attempt.exit_code == 0
        }
        return len(done) == self.replica.job.replicas(RoleKind.WORKER)

    def _succeed(self, step: int | None, metrics: Mapping[str, float]) -> None:
        if step is None:
            step = self.replica.job_step()
        spool = self._spool
        if spool is not None and metrics:
            self.replica.tolerating("the metrics", lambda: spool.metrics(metrics, step=step or 0))
        self.record.finish(
            JobState.SUCCEEDED, step=step, metrics=dict(metrics), seconds=time_split(self.record)
        )

    # ---- whose fault it was

    def _whose(self, failure: Failure, generation: int) -> Failure:
        """The failure, or PEER_LOST where a peer's end was first: frameworks fail together with the one that did.

        A command that has said its class, or was killed, speaks for itself. Else the others have time to say that
        they have failed: who is alive gives two signs of life, and who gives none is gone.
        """
        r = self.replica
        said = failure.exit_code in EXIT_CODES.values() or not failure.code.startswith("runtime.")
        if said or failure.signal in (int(signal.SIGKILL), int(signal.SIGSEGV), int(signal.SIGBUS)):
            return failure
        peers = [peer.replica for peer in r.plan.replicas if peer.replica != r.name]
        seen = {beat.replica: beat.at for beat in self.record.heartbeats()}
        signs = dict.fromkeys(peers, 0)
        deadline = r.clock() + r.times.fresh
        number = self._attempts.newest()
        while min(signs.values(), default=2) < 2:
            if self._cut_short(generation) is not None:
                return self._lost(failure, "the gang begins again")
            if r.clock() > deadline:
                gone = ", ".join(peer for peer in peers if signs[peer] < 2)
                return self._lost(failure, f"{gone} gave no sign of life since")
            for beat in self.record.heartbeats():
                if beat.phase in ("left", "leaving") and beat.replica in signs:
                    return self._lost(failure, f"{beat.replica} has left")
                if beat.replica in signs and beat.at != seen.get(beat.replica):
                    seen[beat.replica] = beat.at
                    signs[beat.replica] += 1
            if r.clock() - r.last_beat > r.times.beat / 2:
                r.beat("failed", number, generation)
            self._bell.wait(r.times.poll)
        first = self._first_to_fail(generation)
        if first is not None and first != r.name:
            # It says so in a moment: its card has the cause, ours what followed from it.
            while r.clock() < deadline and self._cut_short(generation) is None:
                self._bell.wait(r.times.poll)
            return self._lost(failure, f"{_EARLIER}: {first}")
        return failure

    def _first_to_fail(self, generation: int) -> str | None:
        failed = [
            attempt
            for attempt in self.record.attempts()
            if attempt.generation == generation and attempt.ended is not None and attempt.exit_code != 0
        ]
        first = min(failed, key=lambda a: (a.ended or 0.0, a.role, a.index), default=None)
        return f"{first.role}-{first.index}" if first else None

    def _lost(self, failure: Failure, why: str) -> Failure:
        return dataclasses.replace(
            failure,
            failure_class=FailureClass.PEER_LOST,
            code="runtime.peer_lost",
            reason=f"{failure.reason}, and {why}",
            hint="",
        )

    # ---- leaving

    def _leave(self, failure: Failure) -> int:
        """Leave, and have the others begin again with whoever comes in this one's place."""
        if self.record.outcome() is None and failure.failure_class in (
            FailureClass.PREEMPTED,
            FailureClass.OOM,
        ):
            r = self.replica
            generation = self.record.generation().number
            if any(attempt.generation == generation for attempt in self._attempts.all()):
                reason = f"{failure.failure_class}: {failure.reason}"
                r.tolerating(
                    "the generation",
                    lambda: self.record.next_generation(generation, by=r.name, reason=reason),
                )
        return super()._leave(failure)
