"""models lineage: where a version comes from, and what came of records or of raw data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from trainers.job.errors import InvalidSpec
from trainyard.commands.models_target import Which, find_target

if TYPE_CHECKING:
    from serving.release.lineage import Lineage

__all__ = ["add_lineage", "show_lineage"]

_SHOWN = 12  # digits of a digest


class _Tree:
    """A line with others below it. Rich's own cuts lines at the width of a terminal; paths want to be copied."""

    def __init__(self, label: Text) -> None:
        self.label = label
        self.below: list[_Tree] = []

    def add(self, label: Text) -> _Tree:
        self.below.append(_Tree(label))
        return self.below[-1]

    def lines(self, first: str = "", rest: str = "") -> Iterator[Text]:
        yield Text.assemble(first, self.label)
        for i, node in enumerate(self.below):
            last = i == len(self.below) - 1
            yield from node.lines(rest + ("└── " if last else "├── "), rest + ("    " if last else "│   "))


def add_lineage(add: Any) -> None:
    """Add the action `lineage`; `add` is that of `trainyard models`."""
    lineage = add(
        "lineage",
        "where a version comes from, or what came of records or raw data",
        "lineage:show_lineage",
        "lineage digits",
        "lineage digits@previous --json",
        "lineage --records storage/records/digits/0123456789abcdef",
        "lineage --raw s3://bucket/flights/2013-02.parquet",
    )
    lineage.add_argument("model", nargs="?", default="", help="NAME, NAME@alias or NAME/VERSION")
    lineage.add_argument(
        "--records", default="", metavar="DIGEST_OR_PATH", help="versions that were trained on these records"
    )
    lineage.add_argument(
        "--raw", default="", metavar="URI", help="versions that came from this file, folder or content digest"
    )


def show_lineage(arguments: argparse.Namespace, console: Console) -> int:
    """Forward: a tree from the release back to the raw data. Back: all versions, and which of them serve."""
    from serving.release.lineage import came_from, lineage_of

    backwards = bool(arguments.records or arguments.raw)
    if bool(arguments.model) == backwards:
        raise InvalidSpec(
            "lineage", "be asked of a model, or by --records or --raw", arguments.model or "nothing"
        )
    target = find_target()
    if backwards:
        found = came_from(target.storage, records=arguments.records, raw=arguments.raw)
        if arguments.json:
            console.print_json(json.dumps([lineage.to_json() for lineage in found]))
        else:
            _print_all(found, arguments.records or arguments.raw, console)
        return 0
    which = Which.parse(arguments.model)
    version = which.resolved(target) if which.alias or which.version else None
    lineage = lineage_of(target.storage, which.name if version is None else f"{which.name}/{version}")
    if arguments.json:
        console.print_json(json.dumps(lineage.to_json()))
    else:
        for line in _tree(lineage).lines():
            console.print(line, soft_wrap=True)
    return 0


def _print_all(found: list[Lineage], asked: str, console: Console) -> None:
    if not found:
        console.print(f"no version of any model came from {asked}", markup=False, soft_wrap=True)
    for lineage in found:
        line = Text(f"{lineage.name}/{lineage.version}", style="bold")
        line.append(f"  {_standing(lineage)}", style="green" if lineage.serves else "")
        line.append(
            f"  records {_short(lineage.records)}  job {lineage.job.get('name', 'unknown')}", style="dim"
        )
        console.print(line, soft_wrap=True)


def _tree(lineage: Lineage) -> _Tree:
    tree = _Tree(Text.assemble((f"{lineage.name}/{lineage.version}", "bold"), f"  {_standing(lineage)}"))
    size = f", {lineage.bytes / 1e6:,.2f} MB" if lineage.bytes else ""
    tree.add(Text(f"export {_cut(lineage.digest)}{size}, {lineage.state} {lineage.when}"))
    registered = lineage.registered
    if registered:
        number = f"version {registered['version']}" if "version" in registered else "no version"
        run = f", run {registered['run_id']}" if "run_id" in registered else ""
        tree.add(Text(f"mlflow: {number}{run}  {registered.get('url', '')}".rstrip()))
    else:
        tree.add(Text("mlflow: not registered", style="dim"))
    if lineage.code:
        tree.add(Text(f"code {_code(lineage.code)}"))
    job = tree.add(Text(_job(lineage.job)))
    if lineage.records:
        _add_records(job, lineage.records)
    else:
        job.add(Text("records: unknown", style="yellow"))
    if lineage.releases:
        releases = tree.add(Text("releases"))
        for entry in lineage.releases:
            releases.add(Text(_release(entry, lineage.version)))
    for remark in lineage.remarks:
        tree.add(Text(f"note: {remark}", style="yellow"))
    return tree


def _standing(lineage: Lineage) -> str:
    if lineage.serves:
        return "champion, serves now"
    return ", ".join(lineage.roles) or {"removed": f"removed {lineage.when}"}.get(
        lineage.state, lineage.state
    )


def _job(job: Mapping[str, Any]) -> str:
    if not job:
        return "job: unknown"
    step = f" at step {job['step']}" if job.get("step") is not None else ""
    gone = "" if job["present"] else ", its folder is gone"
    return f"job {job['name']}: {job.get('trainer') or 'trainer unknown'}{step}{gone}"


def _add_records(tree: _Tree, records: Mapping[str, Any]) -> None:
    counts = " and ".join(f"{n:,} {split}" for split, n in (records.get("counts") or {}).items())
    place = f"  {records['found']}" if records["present"] else ", gone: known by its digest only"
    name = " ".join(filter(None, (records.get("name"), records.get("span"))))
    words = f"records {name} {_short(records)}".replace("  ", " ")
    node = tree.add(Text(f"{words}{': ' + counts if counts else ''}{place}"))
    for span in records.get("spans") or ():
        _add_records(node, span)
    for source in _sources(records):
        node.add(Text(source))


def _sources(records: Mapping[str, Any]) -> Iterator[str]:
    if records.get("spans"):
        return  # said at each
    for source in records.get("raw") or ():
        digest = f" {_cut(source['digest'])}" if source.get("digest") else ", content not known"
        files = source.get("files")
        size = f": {files} file{'' if files == 1 else 's'}, {source['bytes'] / 1e6:,.2f} MB" if files else ""
        gone = ", gone" if source.get("present") is False else ""
        yield f"raw {source.get('uri', '')}{digest}{size}{gone}"


def _release(entry: Mapping[str, Any], version: int) -> str:
    gate = f", gate {entry['gate']}" if entry.get("gate") else ""
    if entry["version"] != version:
        return f"{entry['when']}  replaced by {entry['version']} ({entry['what']}), by {entry['by']}"
    instead = f" instead of {entry['previous']}" if entry.get("previous") else ""
    return f"{entry['when']}  {entry['what']}{instead}, by {entry['by']}{gate}: {entry['why']}"


def _code(code: Mapping[str, Any]) -> str:
    if code.get("commit"):
        dirty = ", with changes that are in no commit" if code.get("dirty") else ""
        return f"commit {code['commit'][:_SHOWN]}{dirty}"
    return str(code.get("version", "unknown"))


def _short(records: Mapping[str, Any]) -> str:
    return _cut(str(records.get("digest") or "unknown"))


def _cut(digest: str) -> str:
    return digest[:_SHOWN]
