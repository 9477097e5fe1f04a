"""Why a replica ended, as a class that decides the retry.

One table maps what the world says (an exit code, a signal, a Kubernetes reason) to a class; one more says
what each class means for a retry. Processes of ours say their class themselves by a reserved exit code.
"""

from __future__ import annotations

import dataclasses
import enum
import signal as signals
from collections.abc import Mapping
from typing import Any

__all__ = [
    "EXIT_CODES",
    "KUBERNETES_REASONS",
    "RETRY_POLICIES",
    "Failure",
    "FailureClass",
    "RetryPolicy",
    "classify",
    "exit_code_of",
    "signal_name",
]


class FailureClass(str, enum.Enum):
    """Why something failed; the value is what records and messages show."""

    USER = "USER"
    DATA = "DATA"
    CONFIG = "CONFIG"
    OOM = "OOM"
    STALLED = "STALLED"
    PEER_LOST = "PEER_LOST"
    INFRA = "INFRA"
    PREEMPTED = "PREEMPTED"
    QUOTA = "QUOTA"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """What a failure class means: may it run again, does that count against the cap, what to tell people."""

    retry: bool
    charged: bool
    more_memory: bool
    advice: str


RETRY_POLICIES: Mapping[FailureClass, RetryPolicy] = {
    FailureClass.USER: RetryPolicy(
        False, True, False, "fix the trainer module or its hyperparameters, then run it again"
    ),
    FailureClass.DATA: RetryPolicy(False, True, False, "fix the input data, then run it again"),
    FailureClass.CONFIG: RetryPolicy(False, True, False, "fix the job's settings, then run it again"),
    FailureClass.OOM: RetryPolicy(True, True, True, "raise the role's memory or lower the batch size"),
    FailureClass.STALLED: RetryPolicy(
        True,
        True,
        False,
        "look at the stack dumps in the job's folder; raise the stall budget if steps are just slow",
    ),
    FailureClass.PEER_LOST: RetryPolicy(True, True, False, "look at the replica that went away first"),
    FailureClass.INFRA: RetryPolicy(
        True, True, False, "look at the node, the network and the storage of the replica"
    ),
    FailureClass.PREEMPTED: RetryPolicy(True, False, False, "nothing: it resumes from its last checkpoint"),
    FailureClass.QUOTA: RetryPolicy(True, False, False, "wait, ask for less, or have the quota raised"),
}

# A process of ours says its class by these; 80-89 are used by nothing in Python, TensorFlow, bash or Kubernetes.
EXIT_CODES: Mapping[FailureClass, int] = {
    FailureClass.USER: 81,
    FailureClass.DATA: 82,
    FailureClass.CONFIG: 83,
    FailureClass.OOM: 84,
    FailureClass.STALLED: 85,
    FailureClass.PEER_LOST: 86,
    FailureClass.INFRA: 87,
    FailureClass.PREEMPTED: 88,
    FailureClass.QUOTA: 89,
}
_CLASS_OF_EXIT_CODE = {code: cls for cls, code in EXIT_CODES.items()}

# Exit codes of others, where one says enough.
_FOREIGN_EXIT_CODES: Mapping[int, FailureClass] = {
    1: FailureClass.USER,  # an uncaught Python exception
    2: FailureClass.CONFIG,  # argparse: bad arguments; bash: misuse of a builtin
    126: FailureClass.CONFIG,  # the command can't be executed
    127: FailureClass.CONFIG,  # the command isn't there
    128: FailureClass.CONFIG,  # the container runtime could not start the command
}

_SIGNALS: Mapping[int, FailureClass] = {
    int(
        signals.SIGKILL
    ): FailureClass.INFRA,  # somebody killed it: the node, an operator, the kernel without a word
    int(signals.SIGTERM): FailureClass.PREEMPTED,  # asked to leave: eviction, drain, spot reclaim
    int(signals.SIGINT): FailureClass.PREEMPTED,  # asked to leave from a terminal
    int(signals.SIGHUP): FailureClass.PREEMPTED,  # its terminal or supervisor went away
    int(signals.SIGSEGV): FailureClass.INFRA,  # native crash: driver or library
    int(signals.SIGBUS): FailureClass.INFRA,  # native crash: often a full or lost disk under mmap
    int(signals.SIGFPE): FailureClass.USER,  # arithmetic in native code, e.g. an integer division by zero
    int(signals.SIGILL): FailureClass.CONFIG,  # built for another CPU
    int(signals.SIGABRT): FailureClass.INFRA,  # a failed check in native code
}

KUBERNETES_REASONS: Mapping[str, FailureClass] = {
    "OOMKilled": FailureClass.OOM,  # over its memory limit
    "Evicted": FailureClass.PREEMPTED,  # the node was short of something
    "Preempting": FailureClass.PREEMPTED,  # a pod of higher priority took its place
    "Preempted": FailureClass.PREEMPTED,  # the same, as Kueue and older schedulers say it
    "PreemptionByScheduler": FailureClass.PREEMPTED,  # DisruptionTarget: by the scheduler
    "DeletionByTaintManager": FailureClass.PREEMPTED,  # DisruptionTarget: the node got a NoExecute taint
    "EvictionByEvictionAPI": FailureClass.PREEMPTED,  # DisruptionTarget: drained
    "TerminationByKubelet": FailureClass.PREEMPTED,  # DisruptionTarget: node pressure or graceful shutdown
    "DeletionByPodGC": FailureClass.PREEMPTED,  # the pod's node is gone, which is no fault of the job's
    "NodeLost": FailureClass.PREEMPTED,  # the node stopped answering
    "Unknown": FailureClass.PREEMPTED,  # the node came back and knows no more of the container, as containerd says it
    "ContainerStatusUnknown": FailureClass.PREEMPTED,  # the same, as newer kubelets say it
    "NodeShutdown": FailureClass.PREEMPTED,  # the node is going down in good order
    "Terminated": FailureClass.PREEMPTED,  # graceful node shutdown, as Kubernetes 1.20-1.24 says it
    "Shutdown": FailureClass.PREEMPTED,  # the same, 1.20
    "KubeletRestarted": FailureClass.INFRA,  # the process kubelet was started again and its processes are gone
    "DeadlineExceeded": FailureClass.STALLED,  # activeDeadlineSeconds ran out
    "UnexpectedAdmissionError": FailureClass.INFRA,  # the node refused it after scheduling
    "OutOfcpu": FailureClass.QUOTA,  # the node filled up between scheduling and start
    "OutOfmemory": FailureClass.QUOTA,  # the same for memory
    "Unschedulable": FailureClass.QUOTA,  # no node has room
    "FailedScheduling": FailureClass.QUOTA,  # the same, as the event says it
    "ErrImagePull": FailureClass.CONFIG,  # the image can't be had
    "ImagePullBackOff": FailureClass.CONFIG,  # the same, after some tries
    "InvalidImageName": FailureClass.CONFIG,  # the image's name is wrong
    "ErrImageNeverPull": FailureClass.CONFIG,  # policy Never and the image isn't there
    "CreateContainerConfigError": FailureClass.CONFIG,  # a secret or config map is missing
    "CreateContainerError": FailureClass.CONFIG,  # the runtime refused the container
    "ContainerCannotRun": FailureClass.CONFIG,  # the command can't be run
    "RunContainerError": FailureClass.CONFIG,  # the same
    "StartError": FailureClass.CONFIG,  # the same, as containerd says it
}


def signal_name(number: int) -> str:
    """The name of a signal, "SIGKILL", or "signal 42" for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def classify(
    *, exit_code: int | None = None, signal: int | None = None, reason: str | None = None
) -> FailureClass:
    """The class of an end that is not a success.

    A Kubernetes reason that says enough wins, then a reserved exit code, then the signal (given, or as 128+n
    or -n in the exit code), then the exit codes of others. What nobody explains is INFRA: it may run again.
    """
    if reason is not None and reason in KUBERNETES_REASONS:
        return KUBERNETES_REASONS[reason]
    if exit_code in _CLASS_OF_EXIT_CODE:
        return _CLASS_OF_EXIT_CODE[exit_code]
    if signal is None and exit_code is not None:
        if exit_code < 0:
            signal = -exit_code
        elif exit_code > 128:
            signal = exit_code - 128
    if signal is not None:
        return _SIGNALS.get(signal, FailureClass.INFRA)
    if exit_code is not None and exit_code in _FOREIGN_EXIT_CODES:
        return _FOREIGN_EXIT_CODES[exit_code]
    return FailureClass.INFRA


def exit_code_of(failure_class: FailureClass) -> int:
    """The reserved exit code by which a process says this class."""
    return EXIT_CODES[failure_class]


_LISTS = ("log_tail", "events")


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failure, as the record keeps it and the card shows it.

    `reason` is one sentence; `detail` holds the user's own traceback where there is one; `log_tail` the last
    lines of the replica's log; `events` what the cluster said of the pod; `last_step` counts finished steps.
    """

    failure_class: FailureClass
    reason: str
    code: str = ""
    role: str = ""
    index: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    last_step: int | None = None
    detail: str = ""
    log_tail: tuple[str, ...] = ()
    hint: str = ""
    events: tuple[str, ...] = ()

    @property
    def replica(self) -> str:
        """The replica's name, "worker-1", or "" where the failure has none."""
        return f"{self.role}-{self.index}" if self.role and self.index is not None else self.role

    @property
    def policy(self) -> RetryPolicy:
        """What this failure's class means for a retry."""
        return RETRY_POLICIES[self.failure_class]

    def to_dict(self) -> dict[str, Any]:
        """A JSON value with every field that says something; the class under "class"."""
        data = dataclasses.asdict(self)
        data["class"] = str(data.pop("failure_class"))
        for name in _LISTS:
            data[name] = list(getattr(self, name))
        return {key: value for key, value in data.items() if value not in (None, "", [])} | {
            "reason": self.reason
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Failure:
        """The failure of `to_dict`; fields this version does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)} - {"failure_class", *_LISTS}
        return cls(
            failure_class=FailureClass(data["class"]),
            log_tail=tuple(data.get("log_tail", ())),
            events=tuple(data.get("events", ())),
            **{key: value for key, value in data.items() if key in known},
        )

    def card(self, title: str = "") -> str:
        """The failure card: what a person reads instead of a stack of somebody else's frames."""
        rows = [("what", self.reason)]
        if self.replica:
            rows.append(("replica", self.replica))
        if self.signal is not None:
            rows.append(("ended by", signal_name(self.signal)))
        elif self.exit_code is not None:
            rows.append(("exit code", str(self.exit_code)))
        if self.last_step is not None or self.index is not None:
            rows.append(("last step", "none" if self.last_step is None else str(self.last_step)))
        rows.append(("what to do", self.hint or self.policy.advice))
        head = (
            f"FAILED {self.failure_class}"
            + (f" ({self.code})" if self.code else "")
            + (f": {title}" if title else "")
        )
        lines = [head, *(f"  {name + ':':<12}{value}" for name, value in rows)]
        for name, text in (
            ("traceback", self.detail.rstrip().splitlines()),
            ("events", list(self.events)),
            ("log tail", list(self.log_tail)),
        ):
            if text:
                lines += [f"  {name}:", *(f"    {line}" for line in text)]
        return "\n".join(lines)
