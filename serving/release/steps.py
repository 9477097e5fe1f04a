"""The steps of a release, one function each: plain arguments in, a small JSON value out, safe to run again.

    publish_step -> deploy_step -> verify_step -> [canary_step ...] -> promote_step -> prune_step      rollback

Each may be killed at any point: the next one for the same model finishes or undoes what was begun. Importing
this is cheap (standard library only), so that DAG files may. `alias` is a callable (name, alias, version) that
moves an alias of a model registry; whatever it raises becomes a warning in the result, since a release must not
depend on the registry. `base_path` is where servers see the models of the storage, when that is elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.errors import ReleaseConflict, ServingError
from serving.release.exported import Export
from serving.release.gate import PASS
from serving.release.intent import Intent
from serving.release.promotions import PROMOTE, ROLLBACK
from serving.release.pruning import prune_step
from serving.release.rolling import held, rollout_of, seen_by_servers, settle_change
from serving.release.store import ReleaseStore
from serving.release.watch import canary_step, forget_canary

__all__ = [
    "canary_group_step",
    "canary_step",
    "champion",
    "deploy_step",
    "promote_step",
    "prune_step",
    "publish_step",
    "rollback",
    "verify_step",
]

log = logging.getLogger(__name__)

Alias = Callable[[str, str, str], None]


def _aliases(alias: Alias | None, name: str, wanted: Mapping[str, str | int | None]) -> list[str]:
    warnings = []
    for key, version in wanted.items():
        if alias is None or version is None:
            continue
        try:
            alias(name, key, str(version))
        except Exception as e:  # noqa: BLE001  # the registry's troubles are warnings here, whatever they are
            log.warning("alias %s of %s is not moved to version %s: %s", key, name, version, e)
            warnings.append(f"alias {key} is not moved to version {version}: {e}")
    return warnings


def _registered_before(store: ReleaseStore) -> str | None:
    """The registry's version of the champion before the present one, "" where there is none: the alias goes."""
    stack = store.log.champions()
    return store.record(stack[-2]).get("mlflow_version") if len(stack) > 1 else ""


def publish_step(
    storage: Path | str, name: str, export_dir: Path | str, mlflow_version: str | int | None = None
) -> dict[str, Any]:
    """Publish an export as the next version; the same export again gives the same version."""
    store = ReleaseStore(storage, name)
    export = Export.load(export_dir)
    registered = None if mlflow_version is None else str(mlflow_version)
    hint = int(registered) if registered is not None and registered.isdigit() else None
    version = store.reserve(export.digest, hint)
    path = store.publish(export_dir, version, mlflow_version=registered)
    return {
        "name": name,
        "version": version,
        "path": str(path),
        "digest": export.digest,
        "bytes": export.bytes,
        "mlflow_version": registered,
    }


def deploy_step(
    storage: Path | str,
    name: str,
    version: int,
    servers: Sequence[str],
    config_path: Path | str,
    deadline_s: float = 120.0,
    *,
    alias: Alias | None = None,
    base_path: Path | str = "",
) -> dict[str, Any]:
    """Load a published version on every server beside the champion; label `canary`, alias `challenger`."""
    store = ReleaseStore(storage, name)
    rollout = rollout_of(servers, config_path)
    with store.changing():
        settle_change(store, rollout)
    forget_canary(storage, name, config_path)
    result = rollout.deploy(
        name, seen_by_servers(store, base_path), version, keep=held(store), deadline_s=deadline_s
    )
    registered = store.record(version).get("mlflow_version")
    return {**result, "warnings": _aliases(alias, name, {"challenger": registered})}


def canary_group_step(
    storage: Path | str,
    name: str,
    version: int,
    servers: Sequence[str],
    config_path: Path | str,
    deadline_s: float = 120.0,
    *,
    base_path: Path | str = "",
) -> dict[str, Any]:
    """Load a version on servers that are the canary, with a config of their own: `stable` there is the candidate.

    Their routes give them their share (serving.tfserving.weights). The log knows nothing of it: `promote_step` on
    the servers that are not the canary decides.
    """
    store = ReleaseStore(storage, name)
    rollout = rollout_of(servers, config_path)
    result = rollout.deploy(name, seen_by_servers(store, base_path), version, deadline_s=deadline_s)
    labels = rollout.set_labels(name, {"stable": version, "canary": version}, deadline_s=deadline_s)
    rollout.trim(name, [])
    return {**result, "labels": labels, "versions": [version]}


def verify_step(
    storage: Path | str,
    name: str,
    version: int,
    servers: Sequence[str],
    config_path: Path | str,
    *,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Compare every server's answers to the golden examples with the exporter's; a failure undoes the deploy."""
    golden = Export.load(ReleaseStore(storage, name).path(version)).golden()
    return rollout_of(servers, config_path).verify(name, version, golden, tolerance=tolerance)


def promote_step(
    storage: Path | str,
    name: str,
    version: int,
    servers: Sequence[str],
    config_path: Path | str,
    *,
    by: str,
    why: str,
    gate: Mapping[str, Any] | None = None,
    mlflow_version: str | int | None = None,
    deadline_s: float = 60.0,
    alias: Alias | None = None,
    canary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a deployed version the champion: label `stable`, promotion log, aliases `champion` and `previous`.

    `canary` is the verdict of a canary watch, for the log. `gate` is the verdict's JSON; anything but a pass raises
    ReleaseConflict and changes nothing. None means a person promotes by hand, and `why` says so.
    """
    if gate is not None and gate.get("outcome") != PASS:
        raise ReleaseConflict(
            f"version {version} of {name} may not be promoted, its gate says {gate.get('outcome')!r}: "
            f"{'; '.join(map(str, gate.get('reasons', ())))}",
            hint="override the verdict with a reason, or train a better model",
        )
    store = ReleaseStore(storage, name)
    rollout = rollout_of(servers, config_path)
    registered = None if mlflow_version is None else str(mlflow_version)
    intent = Intent(PROMOTE, version, by, why, gate, registered, canary)
    with store.changing():
        settle_change(store, rollout)
        intent.begin(store)
        try:
            labels = rollout.set_labels(name, {"stable": version, "canary": version}, deadline_s=deadline_s)
        except ServingError:
            intent.forget(store)
            raise
        entry = intent.finish(store)
    before = None if entry.previous is None else store.record(entry.previous).get("mlflow_version")
    warnings = _aliases(alias, name, {"champion": entry.mlflow_version, "previous": before})
    return {
        "name": name,
        "version": version,
        "previous": entry.previous,
        "labels": labels,
        "promoted": entry.when,
        "warnings": warnings,
    }


def champion(storage: Path | str, name: str) -> dict[str, Any] | None:
    """The version that serves, None before the first promotion."""
    return ReleaseStore(storage, name).champion()


def rollback(
    storage: Path | str,
    name: str,
    servers: Sequence[str],
    config_path: Path | str,
    *,
    by: str,
    why: str,
    to: int | None = None,
    deadline_s: float = 60.0,
    alias: Alias | None = None,
    base_path: Path | str = "",
) -> dict[str, Any]:
    """Serve the champion before (or version `to`) again, and write it into the log."""
    store = ReleaseStore(storage, name)
    rollout = rollout_of(servers, config_path)
    with store.changing():
        finished = settle_change(store, rollout)
        if to is None and finished is not None and finished.what == ROLLBACK:
            to = finished.version  # this is what was asked for before, and not one release further back
        version = store.rollback_target(to)
        intent = Intent(ROLLBACK, version, by, why)
        intent.begin(store)
        try:
            labels = rollout.rollback(name, seen_by_servers(store, base_path), version, deadline_s=deadline_s)
        except ServingError:
            intent.forget(store)
            raise
        entry = intent.finish(store)
    warnings = _aliases(
        alias, name, {"champion": entry.mlflow_version, "previous": _registered_before(store)}
    )
    return {
        "name": name,
        "version": version,
        "previous": entry.previous,
        "labels": labels,
        "promoted": entry.when,
        "warnings": warnings,
    }
