"""models list, log, rollback: what serves, what served before, and back to it."""

from __future__ import annotations

import argparse
import getpass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainers.job.errors import ConfigError
from trainyard.commands.platform import open_platform
from trainyard.platform.embedded import PlatformFailed
from trainyard.tracking import set_alias

__all__ = ["NoSuchModel", "list_models", "roll_back", "show_log"]


class NoSuchModel(ConfigError):
    """No model of this name was ever released."""

    code = "model.unknown"


def list_models(arguments: argparse.Namespace, console: Console) -> int:
    """All models with their versions and champions."""
    from serving.release.store import ReleaseStore

    storage = open_platform().storage
    names = _names(storage)
    if not names:
        console.print("no models yet")
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("model", "champion", "since", "versions"):
        table.add_column(column)
    for name in names:
        store = ReleaseStore(storage, name)
        champion = store.champion() or {}
        versions = ", ".join(map(str, store.published()))
        table.add_row(name, str(champion.get("version", "-")), str(champion.get("when", "")), versions)
    console.print(table)
    return 0


def show_log(arguments: argparse.Namespace, console: Console) -> int:
    """The promotions of a model, oldest first."""
    from serving.release.store import ReleaseStore

    storage = open_platform().storage
    _check(storage, arguments.name)
    for entry in ReleaseStore(storage, arguments.name).log.entries():
        previous = f" instead of {entry.previous}" if entry.previous else ""
        console.print(f"{entry.when}  version {entry.version}{previous}", style="bold")
        console.print(f"    by {entry.by}: {entry.why}", markup=False, soft_wrap=True)
    return 0


def roll_back(arguments: argparse.Namespace, console: Console) -> int:
    """Serve the champion before (or a given version) again."""
    from serving.release.steps import rollback

    platform = open_platform()
    _check(platform.storage, arguments.name)
    if not platform.is_up:
        raise PlatformFailed("the model server is not up", hint="make up starts it")
    result = rollback(
        platform.storage,
        arguments.name,
        [platform.urls["model-grpc"]],
        platform.settings.model_config,
        by=getpass.getuser(),
        why=arguments.why,
        to=arguments.to,
        alias=lambda name, alias, version: set_alias(platform.urls["mlflow"], name, alias, version),
    )
    console.print(
        f"{result['name']} version {result['version']} is served instead of version {result['previous']}"
    )
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    return 0


def _names(storage: Path) -> list[str]:
    return sorted(path.name for path in (storage / "releases").glob("*") if path.is_dir())


def _check(storage: Path, name: str) -> None:
    names = _names(storage)
    if name not in names:
        raise NoSuchModel(f"there is no model {name!r}", hint=f"there are: {', '.join(names) or 'none yet'}")
