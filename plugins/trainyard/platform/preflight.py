"""Whether this machine has room for the platform, told before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import psutil

from trainers.job.errors import ConfigError

__all__ = ["GIB", "NoRoom", "check_room", "free_disk", "free_memory"]

GIB = 1024**3
WANTED = 4 * GIB
"""Below this much free memory or disk a run of the digits pipeline may not get through."""
HOPELESS = 1 * GIB


class NoRoom(ConfigError):
    """There is so little memory or disk that nothing would start."""

    code = "platform.no_room"


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that programs can still have, under the container's limit where there is one."""
    available = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (FileNotFoundError, PermissionError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def free_disk(path: Path) -> int:
    """Free bytes on the file system that holds `path`, or its nearest folder that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_room(
    folders: list[Path],
    *,
    memory: Callable[[], int] = free_memory,
    disk: Callable[[Path], int] = free_disk,
) -> list[str]:
    """What there is too little of, a sentence each; empty when all is well.

    Raises:
        NoRoom: less than 1 GB of memory or disk is free.
    """
    found = [("memory", "", memory(), "close some programs")]
    by_disk = {disk(folder): folder for folder in reversed(folders)}
    found += [("disk", f" at {folder}", free, "free some disk space") for free, folder in by_disk.items()]
    told = []
    for what, where, free, advice in found:
        text = f"{free / GIB:.1f} GB of {what} free{where}, the platform and a training want {WANTED / GIB:.0f} GB"
        if free < HOPELESS:
            raise NoRoom(f"only {text}", hint=advice)
        if free < WANTED:
            told.append(f"only {text}: it may get slow or fail; {advice}")
    return told
