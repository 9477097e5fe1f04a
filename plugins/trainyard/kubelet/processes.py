"""Starting processes and, above all, ending them: no process of a container outlives it.

Every process of a container carries `TRAINYARD_CONTAINER_ID` in its environment, which children inherit
whatever session or parent they flee to. So they are found again by that mark, by their session and by descent,
and a process id that was given to somebody else meanwhile is never hit. Out of reach is only a process that
dropped its environment, left its session and lost its parent before anybody asked the container to end.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

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
    "with_descendants",
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


class _Seen(NamedTuple):
    process: psutil.Process
    parent: int
    session: int
    mark: str


class _Census:
    """All processes of the machine, looked at once for all who ask at the same time.

    When a thousand containers end together, each reading every process's environment would take minutes.
    """

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._begun = -1.0
        self._seen: list[_Seen] = []

    def take(self) -> list[_Seen]:
        """What was seen by a look that began after this call."""
        asked = time.monotonic()
        with self._one:
            if self._begun < asked:
                self._begun = time.monotonic()
                self._seen = [seen for process in psutil.process_iter() if (seen := _look(process))]
            return self._seen


def _look(process: psutil.Process) -> _Seen | None:
    try:
        parent, session = process.ppid(), os.getsid(process.pid)
    except _GONE:
        return None
    try:
        mark = process.environ().get(MARK, "")
    except _GONE:  # another user's, say: its session and descent still tell
        mark = ""
    return _Seen(process, parent, session, mark)


_census = _Census()


def find(mark: str, leader: int | None = None) -> list[psutil.Process]:
    """All living processes that carry `mark` (or one that starts with it and "/"), are in the session of
    `leader`, or descend from one of those."""
    children: collections.defaultdict[int, list[psutil.Process]] = collections.defaultdict(list)
    chosen: dict[int, psutil.Process] = {}
    for seen in _census.take():
        children[seen.parent].append(seen.process)
        if seen.session == leader or seen.mark == mark or seen.mark.startswith(f"{mark}/"):
            chosen[seen.process.pid] = seen.process
    chosen.pop(os.getpid(), None)
    found = with_descendants(chosen.values(), children)
    return [process for process in found if process.pid != os.getpid() and _lives(process)]


def with_descendants(
    roots: Iterable[psutil.Process], children: Mapping[int, Sequence[psutil.Process]]
) -> list[psutil.Process]:
    """These processes and all that descend from them, each once; `children` are those of a process id.

    Ids are read one by one while others are given away, so what was seen need not be a tree.
    """
    line = list(roots)
    chosen = {process.pid for process in line}
    for process in line:  # grows meanwhile
        more = [child for child in children.get(process.pid, ()) if child.pid not in chosen]
        chosen.update(child.pid for child in more)
        line += more
    return line


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
