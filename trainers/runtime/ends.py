"""What the end of a trainer process means: the failure for the record, the pod and the card."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

from trainers.job.failures import Failure, FailureClass, classify, signal_name
from trainers.runtime.replica import Replica
from trainers.runtime.watch import End

__all__ = ["MemoryKills", "failure_of_end"]

_TAIL = 20  # lines of the log on a failure card
_KILLED = int(signal.SIGKILL)


class MemoryKills:
    """How many processes of this container the kernel has killed for want of memory; on Linux."""

    # Version 2 as a container sees it, then version 1.
    _FILES = ("memory.events", "memory/memory.oom_control")

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._root = root
        self._before = self._count()

    def _count(self) -> int:
        for name in self._FILES:
            try:
                lines = (self._root / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.strip().isdigit():
                    return int(value)
        return 0

    def since(self) -> int:
        """Those since this was made."""
        return max(0, self._count() - self._before)


def _worth_showing(tail: tuple[str, ...]) -> tuple[str, ...]:
    """The last lines of a log; after a crash of native code those that say where Python was, innermost first."""
    crashes = [i for i, line in enumerate(tail) if line.startswith("Fatal Python error")]
    if not crashes:
        return tail[-_TAIL:]
    threads = [i for i, line in enumerate(tail) if line.startswith("Current thread") and i > crashes[-1]]
    begin = threads[0] if threads else crashes[-1] + 1
    return (tail[crashes[-1]], *tail[begin : begin + _TAIL - 1])


def failure_of_end(
    replica: Replica,
    end: End,
    said: Failure | None,
    tail: tuple[str, ...],
    *,
    asked: bool,
    memory_kills: int = 0,
) -> Failure:
    """The failure that the end of a trainer means; where the job is over, nobody asks for it.

    `said` is the trainer's own termination message, `tail` the end of its log; `asked` says that the replica was
    asked to leave; `memory_kills` processes were killed by the kernel for want of memory meanwhile.
    """
    place: dict[str, Any] = {
        "role": replica.me.role.value,
        "index": replica.me.index,
        "last_step": replica.job_step(),
        "log_tail": _worth_showing(tail),
    }
    if end.why == "stalled":
        stacks = replica.record.folder / "stacks"
        hint = f"stacks are in {stacks}; raise budgets.stall if steps are just slow"
        return Failure(
            FailureClass.STALLED, end.reason, code="runtime.stalled", hint=hint, signal=_KILLED, **place
        )
    if end.why == "alone":
        return Failure(FailureClass.PEER_LOST, end.reason, code="runtime.alone", signal=_KILLED, **place)
    if end.why == "replaced":
        hint = "nothing: the pod that has its place goes on"
        return Failure(
            FailureClass.PREEMPTED, end.reason, code="runtime.replaced", hint=hint, signal=_KILLED, **place
        )
    if end.why == "overdue":
        hint = (
            "raise budgets.total, or ask for fewer steps; started again, it goes on from its last checkpoint"
        )
        return Failure(
            FailureClass.STALLED,
            end.reason,
            code="runtime.overdue",
            hint=hint,
            signal=-end.code if end.code is not None and end.code < 0 else None,
            exit_code=end.code if end.code is not None and end.code >= 0 else None,
            **place,
        )
    if end.why == "blamed":
        return Failure(FailureClass.OOM, end.reason, code="runtime.out_of_memory", signal=_KILLED, **place)
    if said is not None:
        if said.replica and said.index is not None and said.replica != replica.name:
            place |= {
                "role": said.role,
                "index": said.index,
            }  # another replica's failure, which this one was told
        return dataclasses.replace(said, **place)
    if end.why == "terminated" or asked:
        reason = end.reason or "was asked to leave"
        return Failure(FailureClass.PREEMPTED, reason, code="runtime.preempted", **place)
    return _unsaid(end.code or 0, memory_kills, place)


def _unsaid(code: int, memory_kills: int, place: dict[str, Any]) -> Failure:
    """Of a trainer that ended without a word."""
    if code == -_KILLED and memory_kills:
        reason = "the kernel ended the trainer process by SIGKILL: the container is out of memory"
        return Failure(FailureClass.OOM, reason, code="runtime.out_of_memory", signal=_KILLED, **place)
    if code < 0:
        reason = f"the trainer process was ended by {signal_name(-code)}"
        return Failure(classify(signal=-code), reason, code="runtime.killed", signal=-code, **place)
    reason = f"the trainer process exited with {code}"
    hint = ""
    cls = classify(exit_code=code)
    if code == 0:
        # Ours says how it ended before it does: only user code can end it like this.
        cls = FailureClass.USER
        reason += ", but the record does not say that the job is over"
        hint = "look for os._exit in the trainer module and what it imports"
    return Failure(cls, reason, code="runtime.exited", exit_code=code, hint=hint, **place)
