"""Starting and ending the trainer process, so that it never outlives its launcher.

A launcher that runs in a warm interpreter (the process kubelet forks containers from one that has TensorFlow
imported) forks the trainer from itself in 0.02 s; any other starts a new interpreter, which leaves a standby behind
for the next ones (standby.py).
A fork is safe as long as TensorFlow has run no operation in the parent, and the launcher runs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

__all__ = [
    "ENV_LAUNCHER_PID",
    "Child",
    "become_trainer",
    "die_with_launcher",
    "end_group",
    "quiet_fork",
    "start_trainer",
]

ENV_LAUNCHER_PID = "TRAINYARD_LAUNCHER_PID"
MODULE = "trainers.runtime.trainer"

_PR_SET_PDEATHSIG = 1


def die_with_launcher(launcher: int) -> None:
    """Have the kernel kill this process when `launcher`, its parent, dies; on Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # it died before the kernel knew of the wish


class Child:
    """A trainer process: it leads a process group of its own; `output` is the reading end of its log."""

    def __init__(self, pid: int, output: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.output = output
        self._process = process
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code (minus the signal's number, if one ended it), or None while it runs."""
        if self._process is not None:
            return self._process.poll()
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def stopped(self) -> bool:
        """Whether it is stopped by a signal, or a debugger; on Linux."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as f:  # noqa: PTH123 - ten times a second
                return f.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def end_group(child: Child, *, patience: float = 10.0) -> int:
    """SIGKILL the trainer with all that it has started; its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + patience
    while (code := child.poll()) is None:
        if time.monotonic() > deadline:
            return -signal.SIGKILL  # in the kernel (a lost disk); it will die, waiting for it helps nobody
        time.sleep(0.005)
    return code


def start_trainer(env: Mapping[str, str], *, pass_fds: Sequence[int] = ()) -> Child:
    """Start the trainer process with exactly the environment `env`; a new interpreter inherits `pass_fds`."""
    read, write = os.pipe()
    try:
        if "tensorflow" in sys.modules and hasattr(os, "fork"):
            return Child(_fork(env, read, write), read)
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", MODULE],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        return Child(process.pid, read, process)
    finally:
        os.close(write)


def quiet_fork() -> int:
    """`os.fork` of a process that has no threads of its own, with nothing left in the buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any other thread. Ours has none; those of TensorFlow's import are idle
        # pools (OpenBLAS), which handle a fork themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork(env: Mapping[str, str], read: int, out: int) -> int:
    launcher = os.getpid()
    pid = quiet_fork()
    if not pid:
        os.close(read)
        become_trainer(env, out, launcher)
    return pid


def become_trainer(env: Mapping[str, str], out: int, launcher: int) -> NoReturn:
    """In the child: what a new interpreter would begin with, then the trainer; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_launcher(launcher)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        os.close(null)
        sys.stdout = _text(1)
        sys.stderr = _text(2)
        os.environ.clear()
        os.environ.update(env)
        random.seed()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # else every fork draws the same numbers
        from trainers.runtime import trainer

        code = trainer.main()
    except BaseException:  # noqa: BLE001 - the interpreter would do the same; nothing may return to the launcher
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _text(fd: int) -> Any:
    # Line by line: logs are followed live.
    return os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
