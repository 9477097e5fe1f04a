"""Where the storage root is, in a store's files and on a disk: "storage://jobs/..." there, a path of one's own here.

Pods may have their root at different paths, so a path never leaves a machine: on its way up it is put as
"storage://...", on its way down as a path below the root of whoever takes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SCHEME", "key_below", "moved", "on_the_way", "without_root"]

SCHEME = "storage://"


def moved(data: bytes, root: Path, *, up: bool) -> bytes:
    """JSON with the paths in it as they are in the store (`up`), or below `root`; all other bytes as they were."""
    here, there = json.dumps(str(root))[:-1].encode(), f'"{SCHEME}'.encode()
    if up:
        return data.replace(here + b'"', there + b'"').replace(here + b"/", there)
    return data.replace(there + b'"', here + b'"').replace(there, here + b"/")


def on_the_way(root: Path) -> Any:
    """What a Mirror of `root` does with a file that it copies."""

    def rewrite(key: str, data: bytes, up: bool) -> bytes:
        return moved(data, root, up=up) if key.endswith((".json", ".jsonl")) else data

    return rewrite


def without_root(value: Any, root: Path) -> Any:
    """A JSON value with each path below `root` as "storage://..."."""
    if isinstance(value, Mapping):
        return {name: without_root(item, root) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_root(item, root) for item in value]
    key = key_below(value, root) if isinstance(value, str) else None
    return value if key is None else f"{SCHEME}{key}"


def key_below(text: str, root: Path) -> str | None:
    """The key of a path below `root`, "" for the root itself; None for any other text."""
    if text == str(root):
        return ""
    return text[len(str(root)) + 1 :].rstrip("/") if text.startswith(f"{root}/") else None
