"""Writing small files so that a reader never sees half of one; making files durable, and digests of them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.shared import shared

__all__ = [
    "append_json_line",
    "create_json",
    "read_json",
    "read_json_lines",
    "sha256_of_file",
    "share_with_group",
    "sync_path",
    "write_bytes",
    "write_json",
]


def share_with_group(environ: Mapping[str, str] | None = None) -> None:
    """Let the group write what this process makes, where TRAINYARD_FS_GROUP says that storage is shared by a group.

    Pods and Airflow's tasks are different users there, and go on with each other's folders.
    """
    if (os.environ if environ is None else environ).get("TRAINYARD_FS_GROUP"):
        os.umask(0o002)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` so that `path` is either as before or whole, also after a power cut."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temp.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value atomically."""
    write_bytes(path, _encoded(value))


def _encoded(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def create_json(path: Path, value: Any) -> bool:
    """Write a JSON value only if `path` is not there yet; False when somebody else was first.

    A hard link is the test-and-set: of many writers one wins, and no reader sees half of its file. Where pods share
    no folder, their object store's conditional write is (`trainers.job.shared`).
    """
    decider = shared()
    if decider is not None:
        return decider.create(path, _encoded(value))
    temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    write_json(temp, value)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    finally:
        temp.unlink(missing_ok=True)
    return True


def read_json(path: Path) -> Any | None:
    """The JSON value of `path`, or None when there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def append_json_line(path: Path, value: Any) -> None:
    """Append a JSON value as a line, whole and synced; a line that a killed writer left half is ended first."""
    line = json.dumps(value, sort_keys=True).encode() + b"\n"
    with path.open("ab+") as f:
        if f.tell() > 0:
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                line = b"\n" + line
        f.write(line)  # one write at the end of the file: lines of two writers don't mix
        f.flush()
        os.fsync(f.fileno())


def sync_path(path: Path) -> None:
    """Make a file's content, or the names in a folder, outlive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, [] without the file; what is no whole object is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
