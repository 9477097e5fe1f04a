"""The steps of a release, one function each: plain arguments in, a small JSON value out, safe to run again.

    publish_step -> deploy_step -> verify_step -> promote_step          rollback

Importing this is cheap (standard library only), so that DAG files may. `alias` is a callable
(name, alias, version) that moves an alias of a model registry; whatever it raises becomes a warning in the
result, since a release must not depend on the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import ReleaseConflict
from serving.release.exported import Export
from serving.release.gate import PASS
from serving.release.store import ReleaseStore

if TYPE_CHECKING:
    from serving.tfserving.rollout import Rollout

__all__ = ["champion", "deploy_step", "promote_step", "prune_step", "publish_step", "rollback", "verify_step"]

log = logging.getLogger(__name__)

Alias = Callable[[str, str, str], None]


def _rollout(servers: Sequence[str], config_path: Path | str) -> Rollout:
    from serving.tfserving.rollout import (
        Rollout,
    )  # gRPC and NumPy: half a second that a DAG file should not pay

    return Rollout(servers, config_path)


def _held(store: ReleaseStore) -> list[int]:
    """The champion and the one before it, as far as they are still there."""
    return [version for version in store.log.champions()[-2:] if store.path(version).is_dir()]


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
) -> dict[str, Any]:
    """Load a published version on every server beside the champion; label `canary`, alias `challenger`."""
    store = ReleaseStore(storage, name)
    result = _rollout(servers, config_path).deploy(
        name, store.models, version, keep=_held(store), deadline_s=deadline_s
    )
    registered = store.record(version).get("mlflow_version")
    return {**result, "warnings": _aliases(alias, name, {"challenger": registered})}


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
    return _rollout(servers, config_path).verify(name, version, golden, tolerance=tolerance)


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
) -> dict[str, Any]:
    """Make a deployed version the champion: label `stable`, promotion log, aliases `champion` and `previous`.

    `gate` is the verdict's JSON; anything but a pass raises ReleaseConflict and changes nothing. None means a
    person promotes by hand, and `why` says so.
    """
    if gate is not None and gate.get("outcome") != PASS:
        raise ReleaseConflict(
            f"version {version} of {name} may not be promoted, its gate says {gate.get('outcome')!r}: "
            f"{'; '.join(map(str, gate.get('reasons', ())))}",
            hint="override the verdict with a reason, or train a better model",
        )
    store = ReleaseStore(storage, name)
    rollout = _rollout(servers, config_path)
    labels = rollout.set_labels(name, {"stable": version, "canary": version}, deadline_s=deadline_s)
    registered = None if mlflow_version is None else str(mlflow_version)
    entry = store.promote(version, by=by, why=why, gate=gate, mlflow_version=registered)
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
) -> dict[str, Any]:
    """Serve the champion before (or version `to`) again, and write it into the log."""
    store = ReleaseStore(storage, name)
    version = store.rollback_target(to)
    labels = _rollout(servers, config_path).rollback(name, store.models, version, deadline_s=deadline_s)
    entry = store.rollback(by=by, why=why, to=version)
    warnings = _aliases(alias, name, {"champion": entry.mlflow_version})
    return {
        "name": name,
        "version": version,
        "previous": entry.previous,
        "labels": labels,
        "promoted": entry.when,
        "warnings": warnings,
    }


def prune_step(
    storage: Path | str, name: str, keep: int, config_path: Path | str | None = None
) -> dict[str, Any]:
    """Remove old versions but the newest `keep`, the champions and what the servers' config names."""
    protected: set[int] = set()
    if config_path is not None:
        from serving.tfserving.config import ConfigFile

        entry = ConfigFile(config_path).entry(name)
        protected = set(entry.versions) if entry else set()
    return {"name": name, "removed": ReleaseStore(storage, name).prune(keep, protected)}
