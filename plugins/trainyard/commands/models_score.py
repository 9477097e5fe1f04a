"""models score: rows of a file or dataset scored with a released version, on this machine, without a server."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from trainyard.commands.models_target import NoSuchModel, Which, find_target

__all__ = ["score"]


def score(arguments: argparse.Namespace, console: Console) -> int:
    """Score; the same version, source and options again do nothing."""
    from trainers import score as step

    target = find_target()
    which = Which.parse(arguments.model)
    version = which.resolved(target)
    if version is None:
        version = (target.store(which.name).champion() or {}).get("version")
    if version is None:
        raise NoSuchModel(f"{which.name} has no champion yet", hint="name a version: NAME/VERSION")
    result = step.main(
        {
            "name": which.name,
            "model": str(target.storage / "models" / which.name / str(version)),
            "source": arguments.source,
            "records": str(target.storage / "records"),
            "output": arguments.output or str(target.storage / "scores" / which.name),
            "columns": arguments.columns,
            "split": arguments.split,
            "quarantine_threshold": arguments.threshold,
        }
    )
    if arguments.json:
        console.print_json(json.dumps({"version": version, **result}))
        return 0
    rate = f", {result['rows_per_second']:,.0f} rows/s" if result["rows_per_second"] else ""
    there = " (there already)" if result["reused"] else ""
    console.print(f"{result['rows']:,} rows scored by {which.name} version {version}{rate}{there}")
    if result["quarantined"]:
        console.print(f"{result['quarantined']:,} rows could not be scored: quarantine.parquet says why")
    console.print(result["manifest"], markup=False, soft_wrap=True)
    return 0
