"""A process that runs release steps in children, each killed before its n-th change of the world.

Run as a program: reads one JSON object a line ({"step", "arguments", "at"}), answers with one ({"operations"} or
{"killed": true} or {"error"}). The children are forked from a process that has imported everything, so that a
hundred of them cost seconds. What counts as an operation: every call that opens a file for writing, writes,
syncs, renames, links, truncates or removes, and every call to a server, seen by Python's audit hooks and by
wrapping what has none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_EVENTS = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Killer:
    """The program, seen from a test."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    def send(self, step: str, at: int = -1, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"step": step, "at": at, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the killer itself has ended"
        return json.loads(line)

    def run(self, step: str, at: int = -1, **arguments: Any) -> dict[str, Any]:
        """Run a step in a process that is killed before its operation `at`; -1 lets it live."""
        self.send(step, at, **arguments)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _arm(at: int) -> list[int]:
    from serving.client import PredictClient

    count = [0]

    def operation(*_: Any) -> None:
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
        ):
            operation()

    def counted(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            if "GetModelStatus" not in str(getattr(given[1], "_method", "") if len(given) > 1 else ""):
                operation()  # asking for a state, often and as long as it takes, changes nothing
            return real(*given, **named)

        return call

    sys.addaudithook(hook)
    for name in ("write", "pwrite", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    PredictClient._call = counted(PredictClient._call)
    return count


def _child(order: dict[str, Any], answer: int) -> None:
    from serving.errors import ServingError
    from serving.release import steps
    from serving.release.canary import Canary
    from serving.sync import Sync

    if "canary" in order["arguments"]:
        order["arguments"]["canary"] = Canary(**order["arguments"]["canary"])
    write = os.write
    count = _arm(order["at"])
    try:
        if order["step"] == "sync":
            passed = Sync(**order["arguments"]).once()
            assert not passed.problems, passed.problems
        else:
            getattr(steps, order["step"])(**order["arguments"])
        said: dict[str, Any] = {"operations": count[0]}
    except ServingError as e:
        said = {"error": e.code, "message": str(e)}
    write(answer, json.dumps(said).encode())


def main() -> None:
    import fsspec.implementations.local  # noqa: F401

    import serving.release.steps
    import serving.sync
    import serving.tfserving.rollout  # noqa: F401  # imported once, before the forks

    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                _child(json.loads(line), write)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"killed": True}) if killed else said.decode(), flush=True)


if __name__ == "__main__":
    main()
