"""models create: a SavedModel from anywhere, published, deployed, verified, promoted."""

from __future__ import annotations

import argparse
import getpass
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from trainyard.commands.models_target import find_target

__all__ = ["create"]


def create(arguments: argparse.Namespace, console: Console) -> int:
    """Release a SavedModel; the same one again releases nothing new."""
    from serving.errors import ConfigInvalid
    from serving.names import check_name
    from serving.release.adopt import Bounds, adopt
    from serving.release.sources import Limits, fetch
    from serving.release.steps import deploy_step, promote_step, publish_step, verify_step

    name = check_name(arguments.name)
    examples = Path(arguments.examples) if arguments.examples else None
    if examples is not None and not examples.is_file():
        raise ConfigInvalid(f"there are no examples at {examples}", hint="give a JSON file, as for predict")
    digest = _records_digest(arguments.records)
    target = find_target()
    servers, config = target.require_servers()
    steps: dict[str, Any] = {}

    def say(text: str) -> None:
        if not arguments.json:
            console.print(text, markup=False, soft_wrap=True)

    staging = target.storage / "releases"
    staging.mkdir(parents=True, exist_ok=True)
    # Beside the store, not in /tmp: a model may be larger than what is there.
    with tempfile.TemporaryDirectory(prefix=".create-", dir=staging) as scratch:
        folder = fetch(arguments.source, Path(scratch), Limits(bytes=arguments.max_bytes))
        export = adopt(
            folder,
            name,
            source=arguments.source,
            examples=examples,
            signature=arguments.signature,
            records_digest=digest,
            bounds=Bounds(arguments.max_seconds, arguments.max_memory),
        )
        seen = export.info.get("golden_from")
        golden = f"golden examples from {seen}" if seen else "its own golden examples"
        say(f"{arguments.source}: {export.bytes / 1e6:.1f} MB, {golden}")
        steps["published"] = published = publish_step(target.storage, name, folder)
    version = published["version"]
    say(f"{name} version {version} is published")
    target.share_version(name, version)
    alias, base_path = target.alias(), target.base_path
    steps["deployed"] = deploy_step(
        target.storage, name, version, servers, config, arguments.deadline, alias=alias, base_path=base_path
    )
    say(f"loaded on {', '.join(servers)} in {steps['deployed']['seconds']:.1f} s")
    steps["verified"] = verified = verify_step(target.storage, name, version, servers, config)
    say(f"verified: {verified['examples']} examples, largest difference {verified['max_abs_diff']:.2g}")
    if arguments.no_promote:
        say(
            f"{name} version {version} has the label canary; promote it with: trainyard models promote {name} {version}"
        )
    else:
        steps["promoted"] = promote_step(
            target.storage,
            name,
            version,
            servers,
            config,
            by=getpass.getuser(),
            why=arguments.why or f"created from {arguments.source}",
            alias=alias,
        )
        say(f"{name} version {version} is the champion")
    target.share_config()
    if arguments.json:
        console.print_json(json.dumps(steps))
    return 0


def _records_digest(manifest: str | None) -> str | None:
    if not manifest:
        return None
    from trainers.records.manifest import Manifest

    return Manifest.load(manifest).digest
