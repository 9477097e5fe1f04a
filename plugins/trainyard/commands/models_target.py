"""Which model servers `trainyard models` speaks to: those of the settings, or the embedded platform's.

    TRAINYARD_STORAGE, TRAINYARD_MODEL_SERVER, TRAINYARD_MODEL_CONFIG    a target of one's own: all three, or none
    TRAINYARD_MODEL_SERVER_REST                                          its REST address, for `predict --rest`
    TRAINYARD_MODEL_BASE_PATH, TRAINYARD_MODEL_STORE                     where its servers see models, and the object
                                                                         store they are copied from (docs/serving.md)
    MLFLOW_TRACKING_URI                                                  its registry, for aliases

`eval "$(trainyard env)"` sets them for the embedded platform.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError

__all__ = ["NoServers", "NoSuchModel", "Target", "Which", "find_target", "names_in"]

_WANTED = ("TRAINYARD_STORAGE", "TRAINYARD_MODEL_SERVER", "TRAINYARD_MODEL_CONFIG")


class NoSuchModel(ConfigError):
    """No model of this name was ever released, or it has no such version."""

    code = "model.unknown"


class NoServers(ConfigError):
    """There is no model server to speak to."""

    code = "model.no_servers"


@dataclass(frozen=True)
class Target:
    """Where models are: the storage root, the servers' gRPC addresses, their config file, REST and MLflow."""

    storage: Path
    servers: tuple[str, ...] = ()
    config: Path | None = None
    rest: str = ""
    mlflow: str = ""
    base_path: str = ""
    model_store: str = ""

    def share_version(self, name: str, version: int) -> None:
        """Copy a published version to the object store, where the servers take it from, if there is one."""
        if self.model_store:
            from serving.release.mirror import mirror_version

            mirror_version(self.storage, name, version, self.model_store)

    def share_config(self) -> None:
        """Copy the servers' config to the object store, where new replicas find it, if there is one."""
        if self.model_store and self.config is not None:
            from serving.release.mirror import mirror_file

            mirror_file(self.config, f"{self.model_store}/models.config")

    def names(self) -> list[str]:
        """The models that were ever released."""
        return names_in(self.storage)

    def store(self, name: str) -> Any:
        """The release store of a model; NoSuchModel where there is none."""
        from serving.release.store import ReleaseStore

        if name not in self.names():
            raise NoSuchModel(
                f"there is no model {name!r}", hint=f"there are: {', '.join(self.names()) or 'none yet'}"
            )
        return ReleaseStore(self.storage, name)

    def alias(self) -> Any:
        """The callable by which a release moves the registry's aliases, None without a registry."""
        from trainyard.tracking import set_alias

        uri = self.mlflow
        return (lambda name, alias, version: set_alias(uri, name, alias, version)) if uri else None

    def require_servers(self) -> tuple[list[str], Path]:
        """The servers and their config file; PlatformFailed when the embedded platform is down."""
        if not self.servers or self.config is None:
            from trainyard.platform.embedded import PlatformFailed

            raise PlatformFailed("the model server is not up", hint="make up starts it")
        return list(self.servers), self.config


def find_target(environ: Mapping[str, str] | None = None) -> Target:
    """The target of the settings, else of the embedded platform, whether it is up or not."""
    environ = os.environ if environ is None else environ
    given = [name for name in _WANTED if environ.get(name)]
    if "TRAINYARD_MODEL_SERVER" in given:
        missing = [name for name in _WANTED if name not in given]
        if missing:
            raise NoServers(
                f"{', '.join(missing)} must be set when TRAINYARD_MODEL_SERVER is", hint="see docs/serving.md"
            )
        return Target(
            Path(environ["TRAINYARD_STORAGE"]).expanduser().absolute(),
            tuple(filter(None, map(str.strip, environ["TRAINYARD_MODEL_SERVER"].split(",")))),
            Path(environ["TRAINYARD_MODEL_CONFIG"]).expanduser().absolute(),
            environ.get("TRAINYARD_MODEL_SERVER_REST", ""),
            environ.get("MLFLOW_TRACKING_URI", "").rstrip("/"),
            environ.get("TRAINYARD_MODEL_BASE_PATH", ""),
            environ.get("TRAINYARD_MODEL_STORE", "").rstrip("/"),
        )
    from trainyard.commands.platform import open_platform

    platform = open_platform()
    if not platform.is_up:
        return Target(platform.storage, config=platform.settings.model_config)
    urls = platform.urls
    return Target(
        platform.storage,
        (urls["model-grpc"],),
        platform.settings.model_config,
        urls.get("model-rest", ""),
        urls.get("mlflow", ""),
    )


def names_in(storage: Path) -> list[str]:
    """Models under a storage root."""
    return sorted(path.name for path in (storage / "releases").glob("*") if path.is_dir())


@dataclass(frozen=True)
class Which:
    """NAME, NAME@alias or NAME/VERSION, as people write it."""

    name: str
    version: int | None = None
    alias: str = ""

    @classmethod
    def parse(cls, text: str) -> Which:
        """Read it; ValueError says how it must be written."""
        found = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9._-]*)(?:@([A-Za-z0-9_-]+)|/([1-9][0-9]*))?", text)
        if found is None:
            raise ValueError(f"a model must be NAME, NAME@alias or NAME/VERSION, got {text!r}")
        name, alias, version = found.groups()
        return cls(name, int(version) if version else None, alias or "")

    def resolved(self, target: Target) -> int | None:
        """The version meant, None for all; NoSuchModel when there is no such one."""
        store = target.store(self.name)
        if self.alias:
            return self._of_alias(target, store)
        if self.version is not None and self.version not in {*store.versions(), *store.published()}:
            raise NoSuchModel(
                f"{self.name} has no version {self.version}", hint=f"it has {store.versions() or 'none'}"
            )
        return self.version

    def _of_alias(self, target: Target, store: Any) -> int:
        from serving.tfserving.config import ConfigFile

        stack = store.log.champions()
        known: dict[str, int] = {}
        entry = ConfigFile(target.config).entry(self.name) if target.config else None
        if entry is not None:
            known |= entry.labels
        if stack:
            known["champion"] = stack[-1]
        if len(stack) > 1:
            known["previous"] = stack[-2]
        if "canary" in known and known["canary"] != known.get("champion"):
            known["challenger"] = known["canary"]
        if self.alias not in known:
            from trainyard.registered import aliases_of

            registered = (
                (aliases_of(target.mlflow, self.name) or {}).get(self.alias) if target.mlflow else None
            )
            for version in store.versions() if registered else ():
                if str(store.record(version).get("mlflow_version")) == registered:
                    return int(version)
            raise NoSuchModel(
                f"{self.name} has no alias or label {self.alias!r}",
                hint=f"it has {', '.join(sorted(known)) or 'none'}",
            )
        return known[self.alias]
