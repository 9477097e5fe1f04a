"""What the steps of a release share: their rollout, what stays loaded, and what a killed run left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from serving.release.intent import Intent, settle
from serving.release.store import ReleaseStore

if TYPE_CHECKING:
    from serving.tfserving.rollout import Rollout

__all__ = ["held", "rollout_of", "seen_by_servers", "settle_change"]


def rollout_of(servers: Sequence[str], config_path: Path | str) -> Rollout:
    """The rollout over these servers; imports gRPC and NumPy, half a second that a DAG file should not pay."""
    from serving.tfserving.rollout import Rollout

    return Rollout(servers, config_path)


def held(store: ReleaseStore) -> list[int]:
    """The champion and the one before it, as far as they are still there."""
    return [version for version in store.log.champions()[-2:] if store.path(version).is_dir()]


def seen_by_servers(store: ReleaseStore, base_path: Path | str) -> str:
    """The model's folder as servers see it."""
    return f"{str(base_path).rstrip('/')}/{store.name}" if base_path else str(store.models)


def settle_change(store: ReleaseStore, rollout: Rollout) -> Intent | None:
    """Finish or forget what a killed run began; its change, where that was finished now. Within `changing()`."""
    if Intent.read(store) is None:
        return None
    with rollout.config.locked():  # and what a killed writer left beside the config goes
        entry = rollout.config.entry(store.name)
    finished = settle(store, entry.labels.get("stable") if entry else None)
    if finished is not None:
        rollout.push()
    return finished
