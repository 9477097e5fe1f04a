"""Rules of one model's entry in the servers' config, free of files and servers."""

from __future__ import annotations

from collections.abc import Sequence

from serving.errors import ReleaseNotFound
from serving.tfserving.config import ModelEntry

__all__ = ["CANARY", "STABLE", "deployed", "without_version"]

STABLE, CANARY = "stable", "canary"


def deployed(entry: ModelEntry | None, name: str, versions: Sequence[int]) -> ModelEntry:
    """The entry itself; raises ReleaseNotFound where it lacks one of the versions."""
    absent = sorted(set(versions) - set(entry.versions if entry else ()))
    if entry is None or absent:
        raise ReleaseNotFound(f"versions {absent} of {name} are not deployed", hint="deploy them first")
    return entry


def without_version(entry: ModelEntry | None, was: ModelEntry | None, version: int) -> ModelEntry | None:
    """The entry as if a version had never been added to what `was` before; one that is stable stays.

    Versions that were given up for it come back, and `canary` points where it did before, or at `stable`.
    """
    if entry is None or entry.labels.get(STABLE) == version:
        return entry
    labels = {label: held for label, held in entry.labels.items() if held != version}
    canary = was.labels.get(CANARY) if was else None
    if canary is not None and CANARY not in labels:
        back = canary if canary != version else labels.get(STABLE)
        labels |= {} if back is None else {CANARY: back}
    before = set(was.versions if was else ()) - {version}
    if not labels and not before:
        return None
    versions = (set(entry.versions) - {version}) | before | set(labels.values())
    return ModelEntry(entry.name, entry.base_path, tuple(versions), labels)
