"""A launcher of one replica in this process, with small scripts in the place of the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from trainers.job import termination
from trainers.job.plan import Plan
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.launcher import Launcher
from trainers.runtime.process import Child
from trainers.runtime.replica import Replica, Times

__all__ = ["PRELUDE", "QUICK", "Run", "Scripts", "message"]

QUICK = Times(poll=0.02, beat=0.1, grace=1.0, leave=0.5, dump=2.0, back_off=0.01, most_back_off=0.05)

# What every script begins with: the record, its own heartbeat, and how to say a failure.
PRELUDE = """
import dataclasses, faulthandler, os, signal, sys, time
from trainers.job import termination
from trainers.job.failures import Failure, FailureClass, exit_code_of
from trainers.job.record import Heartbeat, JobRecord, JobState
from trainers.runtime.watch import stack_file
record = JobRecord.open(os.environ["TRAINYARD_JOB"])
attempt = int(os.environ["TRAINYARD_ATTEMPT"])
role, index = os.environ["TRAINYARD_ROLE"], int(os.environ["TRAINYARD_INDEX"])
def beat(step, phase="training"):
    record.beat(Heartbeat(role, index, phase=phase, attempt=attempt, pid=os.getpid(), step=step, target=10))
def fail(cls, reason, detail=""):
    cls = FailureClass(cls)
    termination.write_failure(Failure(cls, reason, code="test", role=role, index=index, detail=detail))
    sys.exit(exit_code_of(cls))
def done():
    record.finish(JobState.SUCCEEDED, step=10)
"""


class Scripts:
    """A `start` for the launcher that runs a script; keeps the processes."""

    def __init__(self, text: str) -> None:
        self.text = PRELUDE + textwrap.dedent(text)
        self.children: list[Child] = []

    def __call__(self, env: Mapping[str, str]) -> Child:
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", self.text],
            env=dict(env),
            stdout=write,
            stderr=write,
            start_new_session=True,
        )
        os.close(write)
        self.children.append(Child(process.pid, read, process))
        return self.children[-1]

    def all_gone(self) -> bool:
        """Whether no process of theirs is left."""
        return all(child.poll() is not None for child in self.children)


class Run:
    """A launcher of one replica with a script, its log and its termination message."""

    def __init__(
        self,
        plan: Plan,
        script: str,
        *,
        role: str = "chief",
        index: int = 0,
        times: Times = QUICK,
        log: Path,
    ) -> None:
        self.scripts = Scripts(script)
        self.record = JobRecord.open(plan.job.output)
        self.log = log
        self._sink = log.open("wb")
        replica = Replica(
            self.record,
            RoleKind(role),
            index,
            environ={**os.environ, **plan.replica(RoleKind(role), index).env},
            times=times,
            sink=self._sink.fileno(),
        )
        self.launcher = Launcher(replica, start=self.scripts)

    def __call__(self) -> int:
        try:
            return self.launcher.run()
        finally:
            self._sink.close()
            assert self.scripts.all_gone()


def message(path: Path) -> termination.Termination:
    said = termination.parse(path.read_text())
    assert said is not None
    return said
