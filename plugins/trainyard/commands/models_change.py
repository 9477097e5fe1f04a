"""models promote, rollback, delete: what changes which version serves, and what is there to be served."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from trainers.job.errors import ConfigError
from trainers.job.files import read_json_lines
from trainers.runtime.tracking import spool_path
from trainyard.commands.models_target import NoSuchModel, Target, Which, find_target

__all__ = ["Held", "NotConfirmed", "OverrideWanted", "delete", "known_verdict", "promote", "roll_back"]

_UNLOAD_S = 60.0


class OverrideWanted(ConfigError):
    """A version's gate did not say pass."""

    code = "model.override_wanted"


class Held(ConfigError):
    """A version is held by a label, an alias or a replica."""

    code = "model.held"


class NotConfirmed(ConfigError):
    """Nobody said yes."""

    code = "model.not_confirmed"


def known_verdict(store: Any, version: int) -> dict[str, Any] | None:
    """What the gate said of a version: with its promotion, its record, or its job; None where no gate saw it."""
    entries = store.log.entries()
    for entry in reversed(entries):
        if entry.version == version and entry.gate:
            return dict(entry.gate)
    record = store.record(version)
    if record.get("gate"):
        return dict(record["gate"])
    job = (record.get("export") or {}).get("job")
    return _noted(Path(job)) if job and Path(job).is_absolute() else None


def _noted(job: Path) -> dict[str, Any] | None:
    """The verdict that the gate of a job's run noted for MLflow, in the job's folder."""
    tags = {
        line["tag"]: line.get("value") for line in read_json_lines(spool_path(job, "gate")) if "tag" in line
    }
    if not tags.get("trainyard.gate"):
        return None
    reasons = [text for text in str(tags.get("trainyard.gate.reasons", "")).split("; ") if text]
    return {"outcome": tags["trainyard.gate"], "reasons": reasons}


def promote(arguments: argparse.Namespace, console: Console) -> int:
    """Make a version the champion; deploys and verifies it first where it is not loaded."""
    from serving.release.gate import PASS
    from serving.release.steps import deploy_step, promote_step, verify_step
    from serving.release.verdict import overridden
    from serving.tfserving.config import ConfigFile

    target = find_target()
    store = target.store(arguments.name)
    _require_version(store, arguments.version)
    by = getpass.getuser()
    verdict = known_verdict(store, arguments.version)
    if verdict is not None and verdict.get("outcome") != PASS:
        if not arguments.override:
            raise OverrideWanted(
                f"the gate of version {arguments.version} of {arguments.name} says {verdict['outcome']}: "
                f"{'; '.join(map(str, verdict.get('reasons', ())))}",
                hint="promote it all the same with --override; your name and --why are recorded",
            )
        verdict = overridden(verdict, arguments.why, by)
    servers, config = target.require_servers()
    entry = ConfigFile(config).entry(arguments.name)
    if entry is None or arguments.version not in entry.versions:
        target.share_version(arguments.name, arguments.version)
        deploy_step(
            target.storage, arguments.name, arguments.version, servers, config, base_path=target.base_path
        )
        verify_step(target.storage, arguments.name, arguments.version, servers, config)
    result = promote_step(
        target.storage,
        arguments.name,
        arguments.version,
        servers,
        config,
        by=by,
        why=arguments.why,
        gate=verdict,
        alias=target.alias(),
    )
    target.share_config()
    before = f" instead of version {result['previous']}" if result["previous"] else ""
    _tell(arguments, console, result, f"{result['name']} version {result['version']} is the champion{before}")
    return 0


def roll_back(arguments: argparse.Namespace, console: Console) -> int:
    """Serve the champion before (or a given version) again."""
    from serving.release.steps import rollback

    target = find_target()
    target.store(arguments.name)
    servers, config = target.require_servers()
    result = rollback(
        target.storage,
        arguments.name,
        servers,
        config,
        by=getpass.getuser(),
        why=arguments.why,
        to=arguments.to,
        alias=target.alias(),
        base_path=target.base_path,
    )
    target.share_config()
    said = f"{result['name']} version {result['version']} is served instead of version {result['previous']}"
    _tell(arguments, console, result, said)
    return 0


def delete(arguments: argparse.Namespace, console: Console) -> int:
    """Remove a version that nothing holds, or a whole model."""
    target = find_target()
    which = Which.parse(arguments.model)
    if which.alias:
        raise Held(f"{arguments.model} is held by {which.alias}", hint="delete a version by its number")
    store = target.store(which.name)
    return (
        _delete_version(arguments, console, target, store, which.version)
        if which.version
        else _delete_all(arguments, console, target, store)
    )


def _delete_version(
    arguments: argparse.Namespace, console: Console, target: Target, store: Any, version: int
) -> int:
    _require_version(store, version)
    loaded = _refuse_held(target, store, version, unload=arguments.unload)
    _confirm(arguments, console, f"remove version {version} of {store.name}, {store.path(version)}?")
    if loaded:
        _unload(target, store.name, version)
        target.share_config()
    store.remove(version)
    result = {"name": store.name, "removed": [version]}
    _tell(
        arguments, console, result, f"{store.name} version {version} is removed; its record and the log stay"
    )
    return 0


def _unload(target: Target, name: str, version: int) -> None:
    """Take a version without a label out of the config, and wait until no replica has it."""
    from serving.tfserving.rollout import Rollout

    servers, config = target.require_servers()
    Rollout(servers, config).abandon(name, version)
    deadline = time.monotonic() + _UNLOAD_S
    while any(
        states.get(version, "END") != "END" for states in Rollout(servers, config).loaded(name).values()
    ):
        if time.monotonic() > deadline:
            raise Held(f"a replica still has version {version} of {name} loaded after {_UNLOAD_S:g} s")
        time.sleep(0.1)


def _refuse_held(target: Target, store: Any, version: int, *, unload: bool) -> bool:
    """Held, naming by what, where anything still leads to a version; whether it must be unloaded first."""
    from serving.tfserving.config import ConfigFile
    from trainyard.registered import aliases_of

    holders = []
    stack = store.log.champions()
    if version in stack[-2:]:
        holders.append(
            "being the champion" if version == stack[-1] else "being the champion before, for a rollback"
        )
    entry = ConfigFile(target.config).entry(store.name) if target.config else None
    if entry is not None:
        holders += [f"label {label}" for label, held in entry.labels.items() if held == version]
    registered = str(store.record(version).get("mlflow_version") or "")
    if registered and target.mlflow:
        aliases = aliases_of(target.mlflow, store.name)
        if aliases is None:
            raise Held(
                f"MLflow does not answer, so nobody knows whether an alias holds version {version} of {store.name}",
                hint="try again when it does",
            )
        holders += [f"alias {alias}" for alias, held in aliases.items() if held == registered]
    loaded = (
        [f"the servers' config {target.config}"] if entry is not None and version in entry.versions else []
    )
    for server, states in _loaded(target, store.name).items():
        if isinstance(states, str):
            raise Held(
                f"{server} does not answer, so nobody knows what it holds: {states}",
                hint="try again when it does",
            )
        if states.get(version, "END") != "END":
            loaded.append(f"replica {server} ({states[version]})")
    if holders or (loaded and not unload):
        raise Held(
            f"version {version} of {store.name} is held by {', '.join([*holders, *loaded])}",
            hint="promote or roll back to another version first, or delete the whole model"
            if holders
            else "no label leads there: --unload takes it off the replicas first",
        )
    return bool(loaded)


def _loaded(target: Target, name: str) -> dict[str, Any]:
    """Of each server the states by version, or the error that it gives."""
    from serving.errors import ServingError
    from serving.tfserving.rollout import Rollout

    found: dict[str, Any] = {}
    for server in target.servers:
        try:
            found |= Rollout([server], target.config or "").loaded(name)
        except ServingError as e:
            found[server] = e.message
    return found


def _delete_all(arguments: argparse.Namespace, console: Console, target: Target, store: Any) -> int:
    from serving.tfserving.rollout import Rollout

    published = store.published()
    servers, config = target.require_servers()
    versions = ", ".join(map(str, published)) or "none"
    _confirm(arguments, console, f"stop serving {store.name} and remove all of its versions ({versions})?")
    Rollout(servers, config).unload(store.name)
    removed = store.remove_all(by=getpass.getuser(), why=arguments.why)
    warnings = _drop_aliases(target, store.name)
    result = {"name": store.name, "removed": removed, "warnings": warnings}
    said = f"{store.name} is no longer served, {len(removed)} versions are removed; records and the log stay"
    _tell(arguments, console, result, said)
    return 0


def _drop_aliases(target: Target, name: str) -> list[str]:
    import httpx

    from trainyard.registered import aliases_of, delete_alias

    if not target.mlflow:
        return []
    aliases = aliases_of(target.mlflow, name)
    if aliases is None:
        return ["MLflow does not answer, its aliases stay"]
    warnings = []
    for alias in sorted({"champion", "challenger", "previous"} & set(aliases)):
        try:
            delete_alias(target.mlflow, name, alias)
        except httpx.HTTPError as e:
            warnings.append(f"alias {alias} stays: {e}")
    return warnings


def _confirm(arguments: argparse.Namespace, console: Console, question: str) -> None:
    if arguments.yes:
        return
    if not sys.stdin.isatty():
        raise NotConfirmed(f"{question} nobody is there to say so", hint="say --yes")
    console.print(f"{question} [y/N] ", end="", markup=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing was removed")


def _require_version(store: Any, version: int) -> None:
    if version not in store.published():
        raise NoSuchModel(
            f"version {version} of {store.name} is not published",
            hint=f"published are: {', '.join(map(str, store.published())) or 'none'}",
        )


def _tell(arguments: argparse.Namespace, console: Console, result: Mapping[str, Any], said: str) -> None:
    if getattr(arguments, "json", False):
        console.print_json(json.dumps(result))
        return
    console.print(said, markup=False, soft_wrap=True)
    for warning in result.get("warnings", ()):
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
