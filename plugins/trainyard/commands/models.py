"""models list, log: which models there are, and how their champions changed."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table

from trainyard.commands.models_target import NoSuchModel, find_target

__all__ = ["NoSuchModel", "list_models", "show_log"]


def list_models(arguments: argparse.Namespace, console: Console) -> int:
    """All models with their versions and champions."""
    target = find_target()
    rows = []
    for name in target.names():
        store = target.store(name)
        champion = store.champion() or {}
        rows.append(
            {
                "name": name,
                "champion": champion.get("version"),
                "since": champion.get("promoted"),
                "versions": store.published(),
            }
        )
    if getattr(arguments, "json", False):
        console.print_json(json.dumps(rows))
        return 0
    if not rows:
        console.print("no models yet")
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("model", "champion", "since", "versions"):
        table.add_column(column)
    for row in rows:
        versions = ", ".join(map(str, row["versions"])) or "none: deleted"
        table.add_row(row["name"], str(row["champion"] or "-"), row["since"] or "", versions)
    console.print(table)
    return 0


def show_log(arguments: argparse.Namespace, console: Console) -> int:
    """The promotions of a model, oldest first."""
    entries = find_target().store(arguments.name).log.entries()
    if getattr(arguments, "json", False):
        console.print_json(json.dumps([dataclasses.asdict(entry) for entry in entries]))
        return 0
    for entry in entries:
        previous = f" instead of {entry.previous}" if entry.previous else ""
        did = "" if entry.what == "promote" else f", {entry.what}"
        console.print(f"{entry.when}  version {entry.version}{previous}{did}", style="bold")
        console.print(f"    by {entry.by}: {entry.why}", markup=False, soft_wrap=True)
    return 0
