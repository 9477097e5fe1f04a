"""Process 1 of a replica: keeps its trainer process going, and leaves when the job is over.

    TRAINYARD_JOB=.../jobs/digits/1 TRAINYARD_ROLE=worker TRAINYARD_INDEX=0 python -m trainers.runtime.launcher

It reads the job from its record, starts the trainer, waits until all peers have come (else it leaves within the
start budget: a partial gang never holds its machines), and then watches: a trainer that dies is started again by
the class of its failure, one that makes no step within the stall budget is made to dump its stacks and killed,
SIGTERM becomes checkpoint-and-leave. What nobody can retry ends the job for all: the failure goes to the record,
and every launcher leaves by it. Standard library only: it starts in 0.1 s, and it is never what fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainers.job import labels, termination
from trainers.job.errors import ConfigError, TrainyardError
from trainers.job.failures import Failure, FailureClass, exit_code_of
from trainers.job.files import share_with_group
from trainers.job.observations import add_warning
from trainers.job.record import Attempt, JobRecord, JobState, Outcome
from trainers.job.shared import ENV_AGENT_PID
from trainers.job.spec import RoleKind
from trainers.runtime.attempts import Attempts
from trainers.runtime.command import expand
from trainers.runtime.delivery import Delivery
from trainers.runtime.ends import MemoryKills, failure_of_end
from trainers.runtime.logs import LogPump
from trainers.runtime.message_files import MessageFiles
from trainers.runtime.process import ENV_LAUNCHER_PID, Child, die_with_launcher, end_group, start_trainer
from trainers.runtime.replica import ENV_ATTEMPT, ENV_GENERATION, Replica
from trainers.runtime.restarts import back_off_of, counted, saved_step
from trainers.runtime.standby import ENV_STANDBY, Standby
from trainers.runtime.strategies import check_supported
from trainers.runtime.success import lose_worker, step_waits, take_back
from trainers.runtime.watch import REPLACED, Bell, End, Watch

__all__ = ["Launcher", "main"]


class Launcher:
    """Keeps one replica going; `run` returns the exit code of the pod."""

    def __init__(
        self,
        replica: Replica,
        *,
        start: Callable[[Mapping[str, str]], Child] = start_trainer,
        standby: Standby | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.replica = replica
        self.record = replica.record
        self._start = standby.start if standby else start
        self._standby = standby
        self._rng = rng or random.Random()
        self._messages = MessageFiles(self.record.folder, replica.plan.gang, replica.name)
        self._bell = Bell()
        self._delivery = Delivery(self.record.folder, replica.environ, clock=replica.clock)
        self._attempts = Attempts(replica)

    def terminate(self) -> None:
        """Ask it to save a checkpoint and leave; safe in a signal handler."""
        self._bell.ring()

    def run(self) -> int:
        """Until the job is over or this replica has to leave; the exit code, and the termination message."""
        try:
            return self._run()
        finally:
            self._delivery.stop()
            if self._standby is not None:
                self._standby.close()
                self._standby.end_strays()
            self._bell.close()

    def _run(self) -> int:
        outcome = self.record.outcome()
        if outcome is not None and not self.replica.may_evaluate():
            self.replica.say(f"the job is over: {outcome.state}")
            return self._leave_by(outcome)
        check_supported(self.replica.job)
        self.replica.take_place()
        if outcome is None and self.replica.is_passive_worker:
            take_back(self.record.folder, self.replica.me.index)
        barrier = self._begin() if outcome is None else None
        while True:
            generation = self.record.generation().number
            end, attempt, barrier, failure = self._one_life(generation, barrier)
            if end.why == "replaced" or self.replica.is_replaced(at_once=True):
                return self._say_why(self._replaced())  # record and heartbeat are another's now
            outcome = self.record.outcome()
            if outcome is not None and (end.code == 0 or not self.replica.may_evaluate()):
                self._attempts.note_end(attempt, end, None)
                return self._leave_by(outcome)
            if end.why == "regenerated":
                self._attempts.note_end(attempt, end, None)
                continue
            self._attempts.note_end(attempt, end, failure)
            if end.why == "overdue":
                self._finish(failure)
                outcome = self.record.outcome()
                return self._leave_by(outcome) if outcome else self._leave(failure)
            if end.why in ("terminated", "alone") or self._bell.rung:
                return self._leave(failure)
            final = self._ends_it(failure, generation)
            if final is not None:
                return self._leave(final)

    def _begin(self) -> float | None:
        """Say that the job starts; the time by which all peers must have come, None if they have met before."""
        state = self.record.state
        met_before = state in (JobState.RUNNING, JobState.RESTARTING)
        if self.replica.is_chief:
            self._set_state(JobState.RESTARTING if met_before else JobState.STARTING)
            if met_before:
                if self.replica.together:
                    # A chief before this one may have left work behind on the servers.
                    number = self.record.generation().number
                    self.record.next_generation(number, by=self.replica.name, reason="chief-0 came back")
                return None  # the trainer waits for the servers itself, and goes on without a lost worker
        return self.replica.clock() + self.replica.job.budgets.start

    def _sweep(self) -> None:
        """Remove what killed processes of this replica have left half-written.

        Other files of the record may be written by others just now.
        """
        for path in (self.record.folder / "heartbeats").glob(f".{self.replica.name}.json.*.tmp"):
            with contextlib.suppress(PermissionError):
                path.unlink(missing_ok=True)
        self._messages.sweep()

    def _set_state(self, state: JobState) -> None:
        if self.record.outcome() is None:
            self.replica.tolerating("the state", lambda: self.record.set_state(state))

    # ---- one trainer process

    def _one_life(
        self, generation: int, barrier: float | None
    ) -> tuple[End, Attempt | None, float | None, Failure]:
        """Of a replica in a generation of its gang; one that did not come to start a process has no attempt."""
        return self._one_trainer(generation, barrier)

    def _one_trainer(
        self, generation: int, barrier: float | None
    ) -> tuple[End, Attempt, float | None, Failure]:
        """Start a trainer, watch it and end it: why, its attempt, the barrier that is left, what it means."""
        r = self.replica
        self._sweep()
        number = 1 + self._attempts.newest()
        message = self._messages.new(number)
        r.beat("starting", number, generation)
        memory = MemoryKills()
        child = self._start(self._trainer_env(number, generation, message))
        attempt = Attempt(r.me.role.value, r.me.index, number, generation, child.pid, started=r.now())
        self._attempts.write(attempt)
        pump = LogPump(child.output, r.sink, copy=r.log.write)
        watch = self._watch(child, pump, attempt, barrier)
        try:
            end = watch.run()
        finally:
            code = end_group(child)
            self._end_strays()
            self._drain(pump)
            pump.close()
            said = termination.parse(self._messages.take(message))
        if end.why in ("exited", "overdue"):
            end = dataclasses.replace(end, code=code)
        failure = failure_of_end(
            r,
            end,
            said.failure if said else None,
            pump.tail,
            asked=self._bell.rung,
            memory_kills=memory.since(),
        )
        return end, attempt, watch.barrier, failure

    def _watch(self, child: Child, pump: LogPump, attempt: Attempt, barrier: float | None) -> Watch:
        return Watch(self.replica, child, pump, attempt, self._bell, self._delivery, barrier)

    def _end_strays(self) -> None:
        """What a trainer has left behind outside its process group would outlive the job."""
        if self._standby is None:
            return
        strays = self._standby.end_strays(keep=self._delivery.pids)
        if strays:
            self.replica.say(f"ended what the trainer has left behind: {len(strays)} processes")

    def _trainer_env(self, number: int, generation: int, message: Path) -> dict[str, str]:
        r = self.replica
        env = {
            # TensorFlow's own logging: errors; the launcher drops what comes before this is read.
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONUNBUFFERED": "1",
            **r.environ,
            **r.me.env,
            "TF_CONFIG": json.dumps(r.me.tf_config),
            ENV_ATTEMPT: str(number),
            ENV_GENERATION: str(generation),
            ENV_LAUNCHER_PID: str(os.getpid()),
            labels.ENV_TERMINATION_LOG: str(message),
        }
        if not r.me.resources.gpu:
            env["CUDA_VISIBLE_DEVICES"] = "-1"  # what it has not asked for it may not use
        return env

    def _drain(self, pump: LogPump) -> None:
        """The last output; a moment only, should somebody outside the group hold the pipe."""
        deadline = self.replica.clock() + 1.0
        while not pump.at_end and self.replica.clock() < deadline:
            pump.pump()
            if not pump.at_end:
                time.sleep(0.01)

    # ---- what an end means

    def _ends_it(self, failure: Failure, generation: int) -> Failure | None:
        """None after the wait before a restart, else the failure to leave with: of the pod, or of the job."""
        r = self.replica
        cls = failure.failure_class
        reason = f"{cls}: {failure.reason}"
        attempts = self._attempts.all()
        if r.together and cls is FailureClass.PEER_LOST and self._newer_generation(generation):
            # Not its own fault: a peer died, and has said so.
            self._attempts.excuse(attempts[-1], f"a peer was lost: {failure.reason}")
            return None
        if failure.replica != r.name and failure.policy.more_memory:
            # Another replica's memory: its launcher leaves for a new pod, the others begin again.
            self._attempts.excuse(attempts[-1], reason)
            self.record.next_generation(generation, by=r.name, reason=reason, blamed=failure.replica)
            return None
        saved = saved_step(self.record)
        count = counted(attempts, saved, cls)
        cap = r.job.restart.cap(cls)
        if count > cap:
            if cap:
                failure = dataclasses.replace(
                    failure, reason=f"{failure.reason} (failure {count} of its class)"
                )
            if r.is_evaluator:
                add_warning(self.record.folder, r.name, f"it was given up: {cls}: {failure.reason}")
                return failure
            if r.is_passive_worker and failure.policy.retry:
                return self._give_up(failure, generation)
            self._finish(failure)
            return failure
        if failure.policy.more_memory:
            return failure  # only a new pod can have more
        if r.together or step_waits(r, generation):
            r.tolerating(
                "the generation", lambda: self.record.next_generation(generation, by=r.name, reason=reason)
            )
        if r.is_chief:
            self._set_state(JobState.RESTARTING)
        pause = back_off_of(attempts, saved, first=r.times.back_off, most=r.times.most_back_off)
        pause *= self._rng.uniform(0.5, 1.5)
        charge = f"restart {count} of {cap:g}" if failure.policy.charged else "free restart"
        r.say(f"{cls}: {failure.reason}; {charge} in {pause:.1f} s")
        self._pause(pause)
        return None

    def _give_up(self, failure: Failure, generation: int) -> Failure:
        """Leave the job to the other workers, or end it where too few are left; the failure to leave with."""
        r = self.replica
        final = lose_worker(r, failure)
        if final is not None:
            self._finish(final)
            # Another worker's, given up at the same time, may have been first.
            outcome = self.record.outcome()
            return (outcome and outcome.failure) or final
        if step_waits(r, generation):
            reason = f"{r.name} was given up: {failure.reason}"
            r.tolerating(
                "the generation", lambda: self.record.next_generation(generation, by=r.name, reason=reason)
            )
        return failure

    def _finish(self, failure: Failure) -> None:
        """End the job for all; on a full disk the pod's message still has the failure."""
        self.replica.tolerating(
            "the outcome",
            lambda: self.record.finish(JobState.FAILED, step=failure.last_step, failure=failure),
        )

    def _pause(self, seconds: float) -> None:
        """Wait before a restart; cut short by SIGTERM and by the end of the job, which the next watch sees."""
        deadline = self.replica.clock() + seconds
        while (left := deadline - self.replica.clock()) > 0 and not self._bell.rung:
            if self.record.outcome() is not None:
                return
            self._bell.wait(min(left, self.replica.times.poll))

    def _newer_generation(self, generation: int, patience: float = 2.0) -> bool:
        deadline = self.replica.clock() + patience
        while self.replica.clock() < deadline and not self._bell.rung:
            if self.record.generation().number > generation or self.record.outcome() is not None:
                return True
            self._bell.wait(self.replica.times.poll)
        return False

    # ---- leaving

    def _leave_by(self, outcome: Outcome) -> int:
        """Leave because the job is over."""
        if outcome.state is JobState.SUCCEEDED:
            self._last_beat()
            if self.replica.owes_evaluation(outcome):
                text = f"the checkpoint of step {outcome.step} was not evaluated"
                add_warning(self.record.folder, self.replica.name, text)
            result = {"state": outcome.state.value, "step": outcome.step, "replica": self.replica.name}
            termination.write_result(result)
            return 0
        failure = outcome.failure
        if failure is None:
            failure = Failure(
                FailureClass.CONFIG,
                f"the job was {outcome.state.value.lower()}",
                code="runtime.over",
                last_step=outcome.step,
                hint="start the pipeline again to go on from the last checkpoint",
            )
        elif failure.replica != self.replica.name:
            failure = dataclasses.replace(failure, log_tail=())  # the log of another
        return self._leave(failure)

    def _leave(self, failure: Failure) -> int:
        """Leave because of a failure, this replica's or the job's."""
        self._last_beat()
        return self._say_why(failure)

    def _replaced(self) -> Failure:
        return failure_of_end(self.replica, REPLACED, None, (), asked=False)

    def _say_why(self, failure: Failure) -> int:
        termination.write_failure(failure)
        self.replica.say(failure.card(self.replica.job.name))
        return exit_code_of(failure.failure_class)

    def _last_beat(self) -> None:
        beat = self.replica.heartbeat()
        self.replica.beat("left", beat.attempt if beat else 1, beat.generation if beat else 1)
        self._delivery.finish()


def main() -> int:
    """Run the launcher of the replica that the environment names; the exit code."""
    share_with_group()
    launcher: Launcher | None = None
    early = []
    signal.signal(
        signal.SIGTERM, lambda _number, _frame: launcher.terminate() if launcher else early.append(1)
    )
    if ENV_AGENT_PID in os.environ:
        die_with_launcher(int(os.environ[ENV_AGENT_PID]))  # nobody would copy what it writes
    try:
        launcher = _launcher()
        if early:
            launcher.terminate()
        return launcher.run()
    except (TrainyardError, OSError) as e:
        failure = termination.failure_of(e, role=os.environ.get(labels.ENV_ROLE, ""))
        if launcher is not None:
            failure = dataclasses.replace(failure, index=launcher.replica.me.index)
            if not failure.policy.retry and not launcher.replica.is_evaluator:
                launcher.record.finish(JobState.FAILED, failure=failure)
        termination.write_failure(failure)
        print(failure.card(), file=sys.stderr, flush=True)
        return exit_code_of(failure.failure_class)


def _launcher() -> Launcher:
    missing = [n for n in (labels.ENV_JOB, labels.ENV_ROLE, labels.ENV_INDEX) if not os.environ.get(n)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} must be set", hint="a plan's replicas have these in their env"
        )
    role, index = os.environ[labels.ENV_ROLE], os.environ[labels.ENV_INDEX]
    if role not in [kind.value for kind in RoleKind] or not index.isdigit():
        raise ConfigError(f"{labels.ENV_ROLE} and {labels.ENV_INDEX} name no replica: {role!r}, {index!r}")
    replica = Replica(JobRecord.open(os.environ[labels.ENV_JOB]), RoleKind(role), int(index))
    # The pods of an Indexed Job share one template: what differs between them is in the plan only.
    for name, value in replica.me.env.items():
        if name not in os.environ:
            os.environ[name] = expand(value, os.environ)
    if replica.job.is_custom:
        from trainers.runtime.command_launcher import CommandLauncher  # which is a launcher itself

        return CommandLauncher(replica, standby=Standby(keep=False))
    # Nobody waits for an evaluator that starts again.
    keep = os.environ.get(ENV_STANDBY) != "0" and not replica.is_evaluator
    return Launcher(replica, standby=Standby(keep=keep))


if __name__ == "__main__":
    sys.exit(main())
