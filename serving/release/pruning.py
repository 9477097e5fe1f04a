"""Removing old versions, and who must agree: labels, the servers' config, replicas, the registry's aliases."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import ServingError
from serving.release.rolling import held, rollout_of, settle_change
from serving.release.store import ReleaseStore

if TYPE_CHECKING:
    from serving.tfserving.rollout import Rollout

__all__ = ["prune_step"]

log = logging.getLogger(__name__)

Aliases = Callable[[str], Mapping[str, str]]
_UNLOAD_WAIT_S = 10.0
_GONE = ("END", "UNKNOWN")


def prune_step(
    storage: Path | str,
    name: str,
    keep: int,
    config_path: Path | str | None = None,
    *,
    servers: Sequence[str] = (),
    aliases: Aliases | None = None,
) -> dict[str, Any]:
    """Remove old versions but the newest `keep`; {"name", "removed", "held", "warnings"}.

    What the champion and the one before it, the servers' config, a label, a replica (`servers` are asked what
    they have loaded) or an alias of the registry hold stays: `held` says who holds what, by version. `aliases` is
    a callable (name) that gives the registry's aliases with their versions. Where one of them can't be asked,
    nothing is removed: not knowing is no leave to delete.
    """
    store = ReleaseStore(storage, name)
    holders: dict[int, set[str]] = {}
    warnings: list[str] = []
    rollout = rollout_of(servers, config_path) if servers and config_path is not None else None
    if rollout is not None:
        with store.changing():
            settle_change(store, rollout)
        try:
            rollout.trim(name, held(store))
        except ServingError as e:
            warnings.append(f"old versions are not unloaded: {e}")
    try:
        if config_path is not None:
            _config(holders, config_path, name)
        if rollout is not None:
            _replicas(holders, rollout, name)
        if aliases is not None:
            _aliases(holders, store, aliases(name))
    except Exception as e:  # noqa: BLE001  # whatever keeps a holder from answering, its versions stay
        log.warning("nothing of %s is pruned, since not all who may hold a version answer: %s", name, e)
        warnings.append(f"nothing is removed: {e}")
        removed = []
    else:
        removed = store.prune(keep, holders)
    names = {str(version): sorted(who) for version, who in sorted(holders.items())}
    return {"name": name, "removed": removed, "held": names, "warnings": warnings}


def _config(holders: dict[int, set[str]], config_path: Path | str, name: str) -> None:
    from serving.tfserving.config import ConfigFile

    entry = ConfigFile(config_path).entry(name)
    if entry is None:
        return
    for version in entry.versions:
        holders.setdefault(version, set()).add("config")
    for label, version in entry.labels.items():
        holders.setdefault(version, set()).add(f"label {label}")


def _replicas(holders: dict[int, set[str]], rollout: Rollout, name: str) -> None:
    """Ask every replica what it has loaded, for a while: unloading takes as long as requests in flight do."""
    wanted, deadline = set(holders), time.monotonic() + _UNLOAD_WAIT_S
    while True:
        loaded = {
            server: {version for version, state in states.items() if state not in _GONE}
            for server, states in rollout.loaded(name).items()
        }
        if all(versions <= wanted for versions in loaded.values()) or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    for server, versions in loaded.items():
        for version in versions:
            holders.setdefault(version, set()).add(f"replica {server}")


def _aliases(holders: dict[int, set[str]], store: ReleaseStore, aliases: Mapping[str, str]) -> None:
    numbers = {
        str(store.record(version).get("mlflow_version")): version
        for version in store.published()
        if version in store.versions()
    }
    for alias, registered in aliases.items():
        if str(registered) in numbers:
            holders.setdefault(numbers[str(registered)], set()).add(f"alias {alias}")
