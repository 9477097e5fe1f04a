"""platform.json: what runs, where and since when; written by the supervisor, read by everybody else."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, write_json
from trainyard.platform.processes import is_running

__all__ = ["Held", "hold", "is_held", "read_state", "write_state"]

VERSION = 1


class Held(Exception):
    """The lock is held by another process."""


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold a lock file for as long as this process lives or the block runs; it goes with the process.

    Raises:
        Held: another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Held(str(path)) from error
        yield


def is_held(path: Path) -> bool:
    """Whether some process holds the lock now."""
    try:
        with hold(path):
            return False
    except Held:
        return True


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the state file; readers see the old or the new one."""
    write_json(path, {"version": VERSION, **state})


def read_state(path: Path) -> dict[str, Any]:
    """The state, with "state" corrected to "stopped" when its supervisor is gone; {} when there is none."""
    state = read_json(path)
    if not isinstance(state, dict) or state.get("version") != VERSION:
        return {}
    supervisor = state.get("supervisor") or {}
    if state["state"] in ("starting", "running", "stopping") and not is_running(
        supervisor.get("pid", 0), supervisor.get("identity")
    ):
        state["state"] = "lost" if state.get("services") else "stopped"
    return state


def self_description() -> dict[str, Any]:
    """This process as the state's supervisor."""
    from trainyard.platform.processes import identity

    return {"pid": os.getpid(), "identity": identity(os.getpid())}
