"""Ends the platform's process groups when its supervisor is gone without having done so (kill -9, a crash).

The supervisor starts this as a process with a pipe to its stdin and writes "+PID" when it started a process
group and "-PID" when that is gone. The pipe's end is the only sign of the supervisor's death that comes on
every system, at once, whatever killed it. Groups still noted then get SIGTERM, and SIGKILL after the grace.
Their descendants in other groups (Airflow's tasks, pods of the process kubelet) go the same way.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from typing import IO

__all__ = ["Leash", "main"]

GRACE_SECONDS = 8.0

log = logging.getLogger(__name__)


class Leash:
    """The supervisor's end of the pipe; a leash that was killed itself is replaced at the next note."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        """The leash's own process."""
        return self._process.pid

    def note(self, pid: int) -> None:
        """A process group was started."""
        self._noted.add(pid)
        self._write(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """A process group is gone."""
        self._noted.discard(pid)
        self._write(f"-{pid}\n")

    def close(self) -> None:
        """The supervisor leaves: everything still noted is ended, then the leash ends."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",  # -m puts the working folder on the path
            start_new_session=True,
        )

    def _write(self, line: str) -> None:
        try:
            self._pipe.write(line.encode())
            self._pipe.flush()
        except BrokenPipeError:
            log.warning("the leash (pid %d) was killed, starting another", self.pid)
            with contextlib.suppress(BrokenPipeError):
                self._pipe.close()
            self._process.wait()
            self._process = self._spawn()
            self._pipe.write("".join(f"+{pid}\n" for pid in self._noted).encode())
            self._pipe.flush()


def main(lines: IO[str] = sys.stdin) -> int:
    """Read the supervisor's notes until its end, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes when the supervisor has gone, not before
    noted: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line[0] == "+":
            noted.add(pid)
        else:
            noted.discard(pid)
    if noted:
        _end(noted)
    return 0


def _end(leaders: set[int]) -> None:
    from trainyard.platform.processes import kill_all, signal_group, tree

    processes = {process.pid: process for leader in leaders for process in tree(leader)}
    # Leaders first: they know how to end what is theirs in good order.
    kill_all([processes[leader] for leader in leaders if leader in processes], grace=GRACE_SECONDS)
    for leader in leaders:
        signal_group(leader, signal.SIGKILL)
    kill_all(processes.values(), grace=1.0)


if __name__ == "__main__":
    sys.exit(main())
