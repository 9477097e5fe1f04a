"""Starting processes and, above all, ending them: no process of a container outlives it.

Every process of a container carries `TRAINYARD_CONTAINER_ID` in its environment, which children inherit
whatever session or parent they flee to. So they are found again by that mark, by their session and by descent,
and a process id that was given to somebody else meanwhile is never hit. Out of reach is only a process that
dropped its environment, left its session and lost its parent before anybody asked the container to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

__all__ = [
    "MARK",
    "Guardian",
    "PopenStarter",
    "ProcessHandle",
    "ProcessStarter",
    "end_all",
    "find",
    "signal_group",
]

MARK = "TRAINYARD_CONTAINER_ID"

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, ProcessLookupError, PermissionError)


class ProcessHandle(Protocol):
    """A started process."""

    pid: int

    def poll(self) -> int | None:
        """The exit code (minus the signal's number, if one ended it), or None while it runs."""

    def wait(self) -> int:
        """Block until it has ended; the exit code as of `poll`."""


class ProcessStarter(Protocol):
    """What starts the processes of containers: the seam for starters that fork from a warm interpreter.

    The process must be the leader of a new session, read nothing, and have both outputs opened on `stdout_path`
    (a named pipe that has a reader) by the time `start` returns. OSError when it can't be started.
    """

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdout_path: Path
    ) -> ProcessHandle:
        """Start `argv` with exactly that environment."""


class PopenStarter:
    """Starts with `subprocess`, which uses vfork.

    There is no `preexec_fn` for PR_SET_PDEATHSIG on purpose: Python code between fork and exec can deadlock in
    a process with threads, and that signal reaches only the first process of a tree. `Guardian` reaches all.
    """

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdout_path: Path
    ) -> subprocess.Popen[bytes]:
        """Start `argv`."""
        with stdout_path.open("wb", buffering=0) as out:
            return subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def signal_group(pid: int, number: int) -> bool:
    """Signal the process group that a container's first process leads; False when it is gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
        return False
    return True


def find(mark: str, leader: int | None = None) -> list[psutil.Process]:
    """All living processes that carry `mark` (or one that starts with it and "/"), are in the session of
    `leader`, or descend from one of those."""
    chosen: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        # Session and mark cost little; state and descent are asked only of the few that are ours.
        if process.pid != os.getpid() and _belongs(process, mark, leader):
            chosen[process.pid] = process
    for process in list(chosen.values()):
        with contextlib.suppress(*_GONE):
            chosen.update({child.pid: child for child in process.children(recursive=True)})
    return [process for process in chosen.values() if process.pid != os.getpid() and _lives(process)]


def _belongs(process: psutil.Process, mark: str, leader: int | None) -> bool:
    try:
        if leader is not None and os.getsid(process.pid) == leader:
            return True
        value = process.environ().get(MARK, "")
    except _GONE:
        return False
    return value == mark or value.startswith(f"{mark}/")


def end_all(
    mark: str, leader: int | None = None, *, also: Sequence[psutil.Process] = (), patience: float = 5.0
) -> int:
    """SIGKILL all processes of `find` and those of `also`, until there is none; how many there were.

    Only a process in an uninterruptible wait can be left after `patience` seconds.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + patience
    while found := [*find(mark, leader), *(process for process in also if _lives(process))]:
        for process in found:
            ended.add(process.pid)
            with contextlib.suppress(*_GONE):
                process.send_signal(signal.SIGKILL)  # psutil checks the start time first
        if time.monotonic() > deadline:
            break
        psutil.wait_procs(found, timeout=0.1)
    return len(ended)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except _GONE:
        return False


class Guardian:
    """A small process that ends all containers when the kubelet is gone, even by SIGKILL.

    It waits for the end of a pipe that only the kubelet holds, at no cost.
    """

    def __init__(self, mark: str) -> None:
        packages = str(Path(psutil.__file__).parent.parent)
        self._process = subprocess.Popen(
            # -I and -S: nothing of the environment, no site packages; it starts in 10 ms and takes 8 MB.
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), mark, packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        self.pid = self._process.pid

    def stop(self) -> None:
        """Let it look once more for processes, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
