"""Storage that is no file system: what a process of a pod asks of the agent beside it.

Where pods share no folder, `trainers.storage.pod` runs as process 1 of each, copies files between the pod's own
storage root and an object store, and listens on a Unix socket. Files that one process alone writes need nothing:
they are written as ever, and copied. Two things can't be had by copying, and are asked for here:

    create    a file that must be made by one of many (an outcome, a generation): the store decides who was first
    settle    what was written here is in the store, and what others wrote is here

A request is one line of JSON, and so is its answer.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

__all__ = ["ENV_AGENT_PID", "ENV_SOCKET", "ENV_STORE", "Agent", "Shared", "settle", "shared", "through"]

ENV_STORE = (
    "TRAINYARD_STORE"  # the object store's URL, "s3://bucket/prefix"; none where storage is a shared folder
)
ENV_SOCKET = "TRAINYARD_STORE_SOCKET"  # where the pod's agent listens
ENV_AGENT_PID = "TRAINYARD_STORE_AGENT_PID"  # its process: a launcher ends when that is killed


class Shared(Protocol):
    """What decides for all pods; both raise OSError when the store is away for longer than its patience."""

    def create(self, path: Path, data: bytes) -> bool:
        """Make a file that is nowhere yet; False when somebody else was first. It is here after either."""

    def settle(self, folder: Path) -> None:
        """Give the store what was written in the job's `folder`, and take what others have written."""


class Agent:
    """The agent of this pod."""

    def __init__(self, address: str) -> None:
        self._address = address

    def create(self, path: Path, data: bytes) -> bool:
        """See Shared."""
        return bool(self._ask({"create": str(path), "data": base64.b64encode(data).decode()})["created"])

    def settle(self, folder: Path) -> None:
        """See Shared."""
        self._ask({"settle": str(folder)})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._address)
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                line = stream.readline()
        if not line:
            raise ConnectionResetError(f"the agent at {self._address} is gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer


_through: list[Shared] = []


@contextlib.contextmanager
def through(decider: Shared) -> Iterator[None]:
    """Within it, this process asks `decider` instead of an agent: for tasks that have none."""
    _through.append(decider)
    try:
        yield
    finally:
        _through.remove(decider)


def shared() -> Shared | None:
    """Whom to ask; None where the storage root is a folder that all share, and the file system decides."""
    if _through:
        return _through[-1]
    address = os.environ.get(ENV_SOCKET)
    return Agent(address) if address else None


def settle(folder: Path | str) -> None:
    """See Shared; nothing to do where all share a folder."""
    decider = shared()
    if decider is not None:
        decider.settle(Path(folder))
