"""models describe: everything that is known of a model's versions, from files, servers and registry."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from trainers.job.files import read_json
from trainyard.commands.models_change import _loaded, known_verdict
from trainyard.commands.models_target import Target, Which, find_target

__all__ = ["describe", "description"]


def describe(arguments: argparse.Namespace, console: Console) -> int:
    """Show a model, or one of its versions."""
    target = find_target()
    which = Which.parse(arguments.model)
    found = description(target, which.name, which.resolved(target))
    if arguments.json:
        console.print_json(json.dumps(found))
    else:
        _show(found, console)
    return 0


def description(target: Target, name: str, only: int | None = None) -> dict[str, Any]:
    """What `describe --json` prints; versions with the newest first."""
    from serving.tfserving.config import ConfigFile
    from trainyard.registered import aliases_of

    store = target.store(name)
    entry = ConfigFile(target.config).entry(name) if target.config else None
    replicas = _loaded(target, name) if target.servers else {}
    aliases = aliases_of(target.mlflow, name) if target.mlflow else {}
    champion = store.champion() or {}
    numbers = sorted({*store.versions(), *store.published()}, reverse=True)
    return {
        "name": name,
        "champion": champion.get("version"),
        "previous": champion.get("previous"),
        "labels": dict(entry.labels) if entry else {},
        "aliases": aliases,
        "servers": {
            server: states if isinstance(states, str) else "answers" for server, states in replicas.items()
        },
        "versions": [
            _version(store, version, entry, replicas, aliases or {})
            for version in numbers
            if only in (None, version)
        ],
    }


def _version(
    store: Any, version: int, entry: Any, replicas: Mapping[str, Any], aliases: Mapping[str, str]
) -> dict[str, Any]:
    record = store.record(version) if version in store.versions() else {}
    info = read_json(store.path(version) / "export.json") or {}
    export = {
        **(record.get("export") or {}),
        **{k: info[k] for k in ("records_digest", "job", "source") if k in info},
    }
    registered = record.get("mlflow_version")
    promotions = [
        e for e in store.log.entries() if e.version == version and e.what in ("promote", "rollback")
    ]
    last = promotions[-1] if promotions else None
    created = info.get("created")
    return {
        "version": version,
        "published": record.get("published"),
        "removed": record.get("removed"),
        "digest": record.get("digest") or info.get("digest"),
        "bytes": record.get("bytes") or info.get("bytes"),
        "load_s": info.get("load_s"),
        "created": created,
        "labels": sorted(k for k, held in entry.labels.items() if held == version) if entry else [],
        "mlflow_version": registered,
        "aliases": sorted(
            k for k, held in aliases.items() if registered is not None and held == str(registered)
        ),
        "replicas": {
            server: states if isinstance(states, str) else states.get(version, "not loaded")
            for server, states in replicas.items()
        },
        "signatures": info.get("signatures") or {},
        "metrics": _metrics(export.get("job")),
        "gate": known_verdict(store, version) if record else None,
        "records_digest": export.get("records_digest"),
        "run_id": export.get("run_id"),
        "job": export.get("job"),
        "trainer": export.get("trainer"),
        "code_version": export.get("code_version"),
        "source": export.get("source"),
        "promoted": last and {"when": last.when, "by": last.by, "why": last.why, "what": last.what},
    }


def _metrics(job: str | None) -> dict[str, Any] | None:
    """Of a job's evaluation."""
    if not job or not Path(job).is_absolute():
        return None
    try:
        return (read_json(Path(job) / "evaluation.json") or {}).get("metrics")
    except ValueError:
        return None


def _show(found: Mapping[str, Any], console: Console) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True, style=style or None)

    labels = ", ".join(f"{k} -> {v}" for k, v in found["labels"].items()) or "none"
    line(found["name"], "bold")
    line(f"  champion  {found['champion'] or 'none'}, before it {found['previous'] or 'none'}")
    line(f"  labels    {labels}")
    if found["aliases"]:
        line(f"  aliases   {', '.join(f'{k} -> {v}' for k, v in sorted(found['aliases'].items()))} (MLflow)")
    elif found["aliases"] is None:
        line("  aliases   MLflow does not answer")
    for server, said in found["servers"].items():
        line(f"  server    {server} {said}")
    for version in found["versions"]:
        _show_version(version, line)


def _show_version(version: Mapping[str, Any], line: Any) -> None:
    marks = [*version["labels"], *(f"@{alias}" for alias in version["aliases"])]
    removed = f", removed {version['removed']}" if version["removed"] else ""
    line(f"\nversion {version['version']}{'  ' + ' '.join(marks) if marks else ''}{removed}", "bold")
    states = ", ".join(f"{server} {state}" for server, state in version["replicas"].items())
    size = f"{version['bytes'] / 1e6:.1f} MB" if version["bytes"] else ""
    load = f", loads in {version['load_s']:.1f} s" if isinstance(version["load_s"], (int, float)) else ""
    rows = [
        ("state", states or "no server asked"),
        ("published", version["published"]),
        ("size", f"{size}{load}"),
        ("metrics", _words(version["metrics"])),
        ("gate", _gate(version["gate"])),
        ("records", version["records_digest"]),
        ("run", version["run_id"]),
        ("code", version["code_version"]),
        ("source", version["source"]),
        ("registry", version["mlflow_version"] and f"MLflow version {version['mlflow_version']}"),
    ]
    if promoted := version["promoted"]:
        rows.append((promoted["what"] + "d", f"{promoted['when']} by {promoted['by']}: {promoted['why']}"))
    for name, value in rows:
        if value:
            line(f"  {name:10} {value}")
    for name, sides in version["signatures"].items():
        line(f"  signature  {name}")
        for side, mark in (("inputs", "takes"), ("outputs", "gives")):
            for key, spec in sides.get(side, {}).items():
                shape = spec["shape"]
                sizes = (
                    "any shape"
                    if shape is None
                    else f"[{', '.join('?' if n is None else str(n) for n in shape)}]"
                )
                line(f"    {mark} {key}: {spec['dtype']} {sizes}")


def _words(metrics: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{k} {v:.4g}" for k, v in (metrics or {}).items() if isinstance(v, (int, float)))


def _gate(gate: Mapping[str, Any] | None) -> str:
    return f"{gate['outcome']}: {'; '.join(map(str, gate.get('reasons', ())))}" if gate else ""
