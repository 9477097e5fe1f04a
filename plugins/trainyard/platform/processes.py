"""Processes by more than their number: identities that outlive a reused pid, trees, memory, ends in words."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = [
    "adopt_orphans",
    "describe_exit",
    "identity",
    "is_running",
    "kill_all",
    "memory_bytes",
    "signal_group",
    "tree",
]

_PR_SET_CHILD_SUBREAPER = 36


def identity(pid: int) -> str | None:
    """What tells this process from a later one with the same pid, or None when there is no such process.

    On Linux the boot and the start in clock ticks since it, which a changed wall clock doesn't move.
    """
    try:
        if sys.platform == "linux":
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            # The name in parentheses may hold spaces: fields are counted from the last parenthesis.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if fields[0] == "Z" else f"{boot}:{fields[19]}"
        return f"{psutil.Process(pid).create_time():.2f}"
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None


def is_running(pid: int, known: str | None) -> bool:
    """Whether this very process still runs: a zombie or another process with its pid does not count."""
    return known is not None and identity(pid) == known


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it, the process first; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads; nothing happens when the group is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        os.killpg(pid, number)


def kill_all(processes: Iterable[psutil.Process], *, grace: float) -> None:
    """End processes: SIGTERM, then SIGKILL for those that still run after `grace` seconds."""
    processes = [p for p in processes if p.is_running()]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def memory_bytes(pid: int) -> int:
    """Memory of a process and its descendants: proportional set size where the system tells it, else resident."""
    total = 0
    for process in tree(pid):
        try:
            full = process.memory_full_info()
            total += getattr(full, "pss", 0) or full.rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended while we looked
    return total


def adopt_orphans() -> bool:
    """Become the parent of descendants whose parent dies, so that none gets away; False where Linux isn't."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def describe_exit(returncode: int) -> str:
    """A return code of subprocess in words: "exit code 1", "killed by SIGKILL"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
