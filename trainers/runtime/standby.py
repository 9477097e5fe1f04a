"""A trainer's stand-in: what its process was when TensorFlow had just been imported, kept for the next start.

Most of a restart is `import tensorflow`. So the first trainer of a launcher forks itself right after its imports,
before it has run an operation (a fork after one hangs), and goes on. The fork, the standby, waits; when the
launcher needs another trainer, the standby forks it in 0.03 s. Memory is shared until it is written to, so that a
standby costs what the trainer has changed of its imports, not a second import.

    launcher ──starts── trainer 1 ──forks── standby ──forks── trainer 2, trainer 3, ...

The launcher adopts orphans (PR_SET_CHILD_SUBREAPER), so that trainers are its children whoever forked them: it
sees how they end, and they die with it. A standby ends when its launcher closes the socket between them, also by
dying. Should the standby be gone, the next trainer is started anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

from trainers.runtime.process import Child, become_trainer, quiet_fork, start_trainer

__all__ = ["ENV_STANDBY", "Standby", "leave_standby"]

# 0: no standby is kept. It costs memory (docs/reliability.md has figures) and saves the import at a restart.
ENV_STANDBY = "TRAINYARD_STANDBY"
ENV_STANDBY_FD = "TRAINYARD_STANDBY_FD"

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_HEADER = 4  # bytes of a message's length


class Standby:
    """Starts trainers for a launcher: the first anew, the next ones from its standby.

    `close` ends the standby. Where processes can't be adopted (not Linux), or `keep` is False, every trainer is
    started anew.
    """

    def __init__(self, *, keep: bool = True, patience: float = 5.0) -> None:
        self._patience = patience
        self._sock: socket.socket | None = None
        self._pid: int | None = None
        self.adopts = sys.platform.startswith("linux") and _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
        self._keep = keep and self.adopts

    def start(self, env: Mapping[str, str]) -> Child:
        """A trainer with exactly the environment `env`."""
        child = self._fork(env)
        if child is not None:
            return child
        self.close()
        if not self._keep or "tensorflow" in sys.modules:  # this process is as good as a standby
            return start_trainer(env)
        ours, theirs = socket.socketpair()
        with theirs:
            child = start_trainer({**env, ENV_STANDBY_FD: str(theirs.fileno())}, pass_fds=[theirs.fileno()])
        ours.settimeout(self._patience)
        self._sock = ours
        return child

    def _fork(self, env: Mapping[str, str]) -> Child | None:
        """A trainer from the standby; None when there is none, or it does not answer."""
        if self._sock is None or self.pid is None:
            return None
        read, write = os.pipe()
        held, go = os.pipe()
        try:
            _send(self._sock, dict(env), [write, held])
            pid = int(_receive(self._sock)[0]["pid"])
            os.write(go, b"!")  # without it the new process ends: nobody would watch it
        except (OSError, EOFError):
            os.close(read)
            return None
        finally:
            for fd in (write, held, go):
                os.close(fd)
        return Child(pid, read)

    @property
    def pid(self) -> int | None:
        """The standby's process; None before the first trainer has left one."""
        if self._pid is None and self._sock is not None:
            self._sock.setblocking(False)
            try:
                self._pid = int(_receive(self._sock)[0]["standby"])
            except (OSError, EOFError):
                return None
            finally:
                self._sock.settimeout(self._patience)
        return self._pid

    def close(self) -> None:
        """End the standby."""
        if self._sock is None:
            return
        pid = self.pid
        self._sock.close()
        self._sock = self._pid = None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)

    def end_strays(self, keep: Collection[int] = ()) -> list[int]:
        """SIGKILL what trainers started and left behind in sessions of its own; their process ids.

        `keep` are children of the launcher that are none. Only where the launcher adopts orphans.
        """
        ended: list[int] = []
        if not self.adopts:
            return ended
        spared = {*keep, self.pid}
        for _ in range(10):  # who is ended may leave children in turn
            strays = [pid for pid in _children() if pid not in spared]
            if not strays:
                break
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _reap(pid)
            ended += strays
        return ended


def leave_standby(imports: Callable[[], object]) -> None:
    """In the first trainer: run `imports`, and leave a standby behind if the launcher has asked for one.

    Call it from the main thread while there is no other.
    """
    fd = os.environ.pop(ENV_STANDBY_FD, None)
    if fd is None:
        return
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    imports()
    launcher = os.getppid()
    if quiet_fork():
        sock.close()
        return
    _be_standby(sock, launcher)


def _be_standby(sock: socket.socket, launcher: int) -> NoReturn:
    """Fork trainers until the launcher closes the socket; never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        _prctl(_PR_SET_NAME, b"standby")
        with contextlib.suppress(OSError):
            # Where memory is short it is the first that may go.
            Path("/proc/self/oom_score_adj").write_text("1000")
        _send(sock, {"standby": os.getpid()}, [])
        while True:
            env, (out, held) = _receive(sock, 2)
            middle = quiet_fork()
            if not middle:
                if quiet_fork():
                    os._exit(0)  # which makes the trainer an orphan, and the launcher its parent
                _be_forked(sock, env, out, held, launcher)
            os.close(out)
            os.close(held)
            os.waitpid(middle, 0)
    except (OSError, EOFError):
        os._exit(0)  # the launcher is gone, or wants no more
    finally:
        os._exit(1)


def _be_forked(sock: socket.socket, env: Mapping[str, str], out: int, held: int, launcher: int) -> NoReturn:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    deadline = time.monotonic() + 5.0
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    _send(sock, {"pid": os.getpid()}, [])
    sock.close()
    if not os.read(held, 1):
        os._exit(1)
    os.close(held)
    become_trainer(env, out, launcher)


# ---- messages: JSON after its length, with descriptors


def _send(sock: socket.socket, value: Mapping[str, object], fds: list[int]) -> None:
    data = json.dumps(value).encode()
    data = len(data).to_bytes(_HEADER, "big") + data
    sent = socket.send_fds(sock, [data], fds)
    sock.sendall(data[sent:])


def _receive(sock: socket.socket, fds: int = 0) -> tuple[dict[str, str], list[int]]:
    header, got, _, _ = socket.recv_fds(sock, _HEADER, fds)
    if len(header) < _HEADER:
        raise EOFError
    data = b""
    length = int.from_bytes(header, "big")
    while len(data) < length:
        chunk = sock.recv(length - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return json.loads(data), list(got)


# ---- processes


def _prctl(option: int, value: int | bytes) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


def _children() -> list[int]:
    me, found = os.getpid(), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if parent == me:
            found.append(int(path.parent.name))
    return found


def _reap(pid: int, patience: float = 2.0) -> None:
    """Take the exit code of a killed process, which may not be our child yet: its parent may die just now."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            if not Path(f"/proc/{pid}").exists():
                return
        time.sleep(0.002)
