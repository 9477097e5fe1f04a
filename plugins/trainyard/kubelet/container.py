"""One run of one container: its process, its pipe, its log, its termination message."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from trainyard.kubelet import logs
from trainyard.kubelet.clock import timestamp
from trainyard.kubelet.machine import Machine
from trainyard.kubelet.processes import MARK, ProcessHandle, end_all, find, signal_group
from trainyard.kubelet.quantity import format_bytes, parse_quantity

__all__ = ["ContainerRun", "StartError"]

MAX_MESSAGE = 4096  # bytes of a termination message, as on a cluster
_FALLBACK_LINES, _FALLBACK_BYTES = 80, 2048  # of the log, for FallbackToLogsOnError


class StartError(Exception):
    """The command can't be run."""


class ContainerRun:
    """A process tree with a log. Made for one attempt; `exited(run, code)` is called from a thread at its end."""

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        spec: Mapping[str, Any],
        mark: str,
        attempt: int,
        exited: Callable[[ContainerRun, int], None],
    ) -> None:
        self.mark = f"{machine.mark}/{mark}/{attempt}"
        self.attempt = attempt
        self.started = time.time()
        self.message_path = folder / f"termination-{attempt}"
        self._machine = machine
        self._folder = folder
        self._spec = spec
        self._exited = exited
        self._handle: ProcessHandle | None = None
        self._pipe = -1
        self._used = 0  # bytes held when the memory limit was passed
        self._known: list[psutil.Process] = []
        self._killing = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.message_path.touch()
        self.log = logs.LogFile(log_path(folder, attempt))

    @property
    def pid(self) -> int:
        """The first process's id; only once it was started."""
        assert self._handle is not None
        return self._handle.pid

    def start(self, argv: list[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the process; StartError with the reason when it can't be."""
        pipe = self._folder / f"output-{self.attempt}"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        # Opened for reading first, or opening it for writing would block.
        self._pipe = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            argv = [_program(argv, env, cwd), *argv[1:]]
            self._handle = self._machine.starter.start(argv, {**env, MARK: self.mark}, cwd, pipe)
        except (OSError, StartError) as e:
            os.close(self._pipe)
            self.log.close()
            raise StartError(_start_failure(e, argv)) from e
        finally:
            pipe.unlink()
        self._machine.pump.add(self._pipe, self.log)
        self._note_pid()
        limit = (self._spec["resources"].get("limits") or {}).get("memory")
        if limit:
            self._machine.memory.add(self.pid, int(parse_quantity(limit)), self._over_limit)
        threading.Thread(target=self._wait, name=f"kubelet-wait-{self.pid}", daemon=True).start()

    def _note_pid(self) -> None:
        """For the next kubelet, if this one is killed: see `recovery`."""
        try:
            created = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return  # already over, and nobody but the mark is needed to find its children
        path = self._folder / "pid.json"
        temp = path.with_suffix(".tmp")
        temp.write_text(json.dumps({"pid": self.pid, "created": created}))
        temp.replace(path)

    def _wait(self) -> None:
        assert self._handle is not None
        self._exited(self, self._handle.wait())

    def _over_limit(self, used: int) -> None:
        self._used = used
        self.kill()

    def terminate(self) -> None:
        """Ask it to leave: SIGTERM to the process group, so that a shell's children hear it too."""
        # While its first process lives, all others can be found by descent.
        self._known = find(self.mark, self.pid)
        signal_group(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL everything that belongs to it."""
        with self._killing:
            end_all(self.mark, self.pid, also=self._known)

    def collect(self, code: int) -> dict[str, Any]:
        """After its end: end what it left behind, finish its log, and give the `terminated` state."""
        self._machine.memory.remove(self.pid)
        self.kill()
        self._machine.pump.finish(self._pipe, self.log)
        with self.log.changed:
            self.log.changed.wait_for(lambda: self.log.closed, timeout=10)
        (self._folder / "pid.json").unlink(missing_ok=True)
        number = -code if code < 0 else 0
        exit_code = 128 + number if number else code
        reason = "Completed" if exit_code == 0 else "Error"
        if self._used:
            reason, exit_code, number = "OOMKilled", 137, int(signal.SIGKILL)
        state = {
            "exitCode": exit_code,
            "reason": reason,
            "startedAt": timestamp(self.started),
            "finishedAt": timestamp(),
            **({"signal": number} if number else {}),
        }
        if message := self._message(exit_code):
            state["message"] = message
        return state

    @property
    def memory_note(self) -> str:
        """What the container held when its memory limit was passed, or ""."""
        if not self._used:
            return ""
        limit = int(parse_quantity(self._spec["resources"]["limits"]["memory"]))
        return f"held {format_bytes(self._used)} with a memory limit of {format_bytes(limit)}"

    def _message(self, exit_code: int) -> str:
        text = ""
        with contextlib.suppress(FileNotFoundError), self.message_path.open("rb") as f:
            text = f.read(MAX_MESSAGE).decode(errors="replace")
        if not text and exit_code != 0 and self._spec["terminationMessagePolicy"] == "FallbackToLogsOnError":
            text = logs.tail(self.log.path, lines=_FALLBACK_LINES, size=_FALLBACK_BYTES)
        return text


def log_path(folder: Path, attempt: int) -> Path:
    """Where the log of one run of a container is kept."""
    return folder / f"{attempt}.log"


def _program(argv: list[str], env: Mapping[str, str], cwd: str) -> str:
    """The file to run; StartError as a container runtime words it."""
    if not argv:
        raise StartError(
            "no command specified: the process kubelet pulls no images, so a container needs a command of its own"
        )
    if not Path(cwd).is_dir():
        raise StartError(f'chdir to cwd ("{cwd}") set in the manifest failed: no such directory')
    name = argv[0]
    if name in ("python", "python3"):
        return sys.executable  # an image has one python; so has the process kubelet
    if "/" in name:
        return name
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise StartError(f'exec: "{name}": executable file not found in $PATH')
    return found


def _start_failure(error: Exception, argv: list[str]) -> str:
    why = str(error)
    if isinstance(error, OSError):
        why = f'exec: "{argv[0]}": {(error.strerror or str(error)).lower()}'
    return f"failed to start container process: {why}"
