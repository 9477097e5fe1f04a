"""Which versions of a model a server should hold: its config against what lies on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from serving.server.status import Code, Refused

__all__ = ["check_config", "find_versions", "identity", "wanted_versions"]

_MAX_VERSION = (1 << 63) - 1


def check_config(config: Any) -> dict[str, Any]:
    """ModelConfigs by name of a ModelServerConfig; raises Refused with TF Serving's codes."""
    kind = config.WhichOneof("config")
    if kind is None:
        return {}
    if kind != "model_config_list":
        raise Refused(
            Code.FAILED_PRECONDITION, "Only a model_config_list can be served, got custom_model_config"
        )
    models: dict[str, Any] = {}
    for model in config.model_config_list.config:
        if not model.name:
            raise Refused(Code.INVALID_ARGUMENT, "Every model in model_config_list must have a name")
        if not model.base_path:
            raise Refused(Code.INVALID_ARGUMENT, f"Model {model.name} must have a base_path")
        if model.name in models:
            raise Refused(
                Code.INVALID_ARGUMENT, f"Illegal to list model {model.name} multiple times in config list"
            )
        if model.model_platform not in ("", "tensorflow"):
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"Model {model.name} requests unsupported platform {model.model_platform}",
            )
        policy = model.model_version_policy
        if policy.WhichOneof("policy_choice") == "specific" and not policy.specific.versions:
            raise Refused(
                Code.INVALID_ARGUMENT, f"Model {model.name} has a specific version policy without any version"
            )
        models[model.name] = model
    return models


def find_versions(base_path: str) -> dict[int, Path]:
    """Version folders under a base path; only names that are whole numbers count. Raises OSError."""
    found: dict[int, Path] = {}
    with os.scandir(base_path) as entries:
        for entry in entries:
            if entry.name.isascii() and entry.name.isdigit() and entry.is_dir():
                version = int(entry.name)
                if version <= _MAX_VERSION:
                    found[version] = Path(entry.path)
    return found


def wanted_versions(model: Any, found: dict[int, Path]) -> dict[int, Path]:
    """What the model's version policy picks from the versions found, the newest first."""
    policy = model.model_version_policy
    choice = policy.WhichOneof("policy_choice")
    newest = sorted(found, reverse=True)
    if choice == "specific":
        asked = set(policy.specific.versions)
        picked = [version for version in newest if version in asked]
    elif choice == "all":
        picked = newest
    else:
        picked = newest[: max(1, policy.latest.num_versions if choice else 1)]
    return {version: found[version] for version in picked}


def identity(path: Path) -> tuple[int, ...]:
    """Tells a version folder that was replaced or repaired from the one that failed to load.

    By inode and change time, since copies carry the modification times of their source.
    """
    marks: list[int] = []
    for part in (path, path / "variables", path / "saved_model.pb"):
        try:
            stat = part.stat()
        except FileNotFoundError:
            if part is path:
                raise
            continue
        marks += (stat.st_ino, stat.st_ctime_ns)
    return tuple(marks)
