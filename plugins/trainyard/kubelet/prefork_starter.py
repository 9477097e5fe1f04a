"""Start containers by forking a warm interpreter where that gives the same as a fresh one."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard.kubelet.prefork import receive, send
from trainyard.kubelet.processes import MARK, ProcessHandle, ProcessStarter

__all__ = ["PreforkStarter"]

log = logging.getLogger(__name__)

# These change an interpreter or its libraries while they load; a container that sets one gets a fresh process.
_LOAD_TIME = (
    "PYTHON",
    "LD_",
    "TF_ENABLE_",
    "TF_USE_",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "KERAS_",
    "OMP_",
    "OPENBLAS_",
)
_HARMLESS = frozenset({"PYTHONUNBUFFERED", "PYTHONIOENCODING"})


class PreforkStarter:
    """A `ProcessStarter` that forks `python -m PACKAGE...` from a process that has `preload` imported.

    Everything else goes to `fallback`: other commands, containers whose environment matters at import, and all
    containers when the warm process could not start or died. The first fork waits for the imports, at most
    `patience` seconds: starting afresh beside them would only import the same again.
    """

    def __init__(
        self,
        fallback: ProcessStarter,
        *,
        packages: Sequence[str],
        preload: Sequence[str],
        mark: str = "",
        cwd: str | None = None,
        patience: float = 120.0,
    ) -> None:
        self._fallback = fallback
        self._packages = frozenset(packages)
        self._patience = patience
        self._ready = threading.Event()
        self._usable = True
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, _Forked] = {}
        ours, theirs = socket.socketpair()
        arguments = [word for name in preload for word in ("--preload", name)]
        environment = {
            key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "PYTHONPATH")
        }
        # CPU only and quiet at import; what a child sees afterwards is its own environment.
        environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", MARK: mark}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainyard.kubelet.prefork", "--fd", str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._sock = ours
        self._reader = threading.Thread(target=self._read, name="kubelet-prefork", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The warm process."""
        return self._process.pid

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdout_path: Path
    ) -> ProcessHandle:
        """Fork if that gives the same as starting afresh, else start afresh."""
        if self._fits(argv, env) and self._ready.wait(self._patience) and self._usable:
            forked = self._fork(argv, env, cwd, stdout_path)
            if forked is not None:
                return forked
        return self._fallback.start(argv, env, cwd, stdout_path)

    def _fits(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        if len(argv) < 3 or argv[0] != sys.executable or argv[1] != "-m":
            return False
        if argv[2].partition(".")[0] not in self._packages:
            return False
        return not any(
            name.startswith(_LOAD_TIME) and name not in _HARMLESS and os.environ.get(name) != value
            for name, value in env.items()
        )

    def _fork(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdout_path: Path
    ) -> _Forked | None:
        with stdout_path.open("wb", buffering=0) as out, self._lock:
            self._next += 1
            forked = self._waiting[self._next] = _Forked()
            message = {"id": self._next, "argv": list(argv[1:]), "env": dict(env), "cwd": cwd}
            try:
                send(self._sock, message, [out.fileno()])
            except OSError as e:
                log.warning("the warm process is gone, starting containers afresh: %s", e)
                self._usable = False
                del self._waiting[self._next]
                return None
        forked.started.wait()
        return forked if forked.pid else None

    def _read(self) -> None:
        while True:
            try:
                got = receive(self._sock)
            except OSError:
                got = None
            if got is None:
                break
            message: dict[str, Any] = got[0]
            if "ready" in message:
                self._ready.set()
            elif "failed" in message:
                log.warning("no warm process, starting containers afresh: %s", message["failed"])
                break
            else:
                self._answer(message)
        self._usable = False
        self._ready.set()
        with self._lock:
            lost, self._waiting = list(self._waiting.values()), {}
        for forked in lost:
            forked.end(-9)  # children die with their parent

    def _answer(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        with self._lock:
            forked = self._waiting.get(number)
            if forked is not None and "exit" in message:
                del self._waiting[number]
        if forked is None:
            return
        if "pid" in message:
            forked.pid = message["pid"]
            forked.started.set()
        else:
            forked.end(message["exit"])

    def stop(self) -> None:
        """End the warm process and with it all its children."""
        self._usable = False
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the warm process was gone already")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._sock.close()


class _Forked:
    """A forked process, as its parent tells of it."""

    def __init__(self) -> None:
        self.pid = 0
        self.started = threading.Event()
        self._ended = threading.Event()
        self._code: int | None = None

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()
        self.started.set()

    def poll(self) -> int | None:
        return self._code

    def wait(self) -> int:
        self._ended.wait()
        assert self._code is not None
        return self._code
