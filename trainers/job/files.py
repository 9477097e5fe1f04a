"""Writing small files so that a reader never sees half of one."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

__all__ = ["create_json", "read_json", "write_bytes", "write_json"]


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
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def create_json(path: Path, value: Any) -> bool:
    """Write a JSON value only if `path` is not there yet; False when somebody else was first.

    A hard link is the test-and-set: of many writers one wins, and no reader sees half of its file.
    """
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
