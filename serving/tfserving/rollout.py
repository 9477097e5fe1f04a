"""Rolling a version out to every replica of a model server, through TF Serving's own API.

    rollout = Rollout(["10.0.0.5:8500", "10.0.0.6:8500"], config_path)
    rollout.deploy("digits", base_path, 8, keep=[7], deadline_s=120)     # loaded everywhere, label canary
    rollout.verify("digits", 8, golden)                                  # answers as its exporter did
    rollout.set_label("digits", "stable", 8)

Two phases, since servers refuse labels on versions that are not loaded: first both versions with labels
unmoved, then, once every replica says AVAILABLE, the label. Whatever fails puts the config before back and
raises; callers of the `stable` label never notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from serving.client import PredictClient
from serving.errors import (
    BadRequest,
    ConfigInvalid,
    DeadlineExceeded,
    ModelNotFound,
    ReleaseConflict,
    ReleaseNotFound,
    ServerFailed,
    ServingError,
    VersionFailed,
)
from serving.release.exported import Golden
from serving.tfserving.config import ConfigFile, ModelEntry
from serving.tfserving.probe import compare, golden_inputs

__all__ = ["CANARY", "STABLE", "Rollout"]

log = logging.getLogger(__name__)

STABLE, CANARY = "stable", "canary"

Connect = Callable[..., PredictClient]


class Rollout:
    """Changes what a set of replicas serves; `servers` are gRPC addresses, `config_path` their config file."""

    def __init__(
        self,
        servers: Sequence[str],
        config_path: Path | str,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = PredictClient,
    ) -> None:
        if isinstance(servers, str) or not servers or not all(servers):
            raise ConfigInvalid(f"servers must be a list of one or more host:port addresses, got {servers!r}")
        self.servers = tuple(dict.fromkeys(servers))
        self.config = ConfigFile(config_path)
        self._clock = clock
        self._connect = connect

    def deploy(
        self,
        name: str,
        base_path: Path | str,
        version: int,
        *,
        keep: Iterable[int] = (),
        deadline_s: float = 120.0,
    ) -> dict[str, Any]:
        """Load a version on every replica and point `canary` at it; labels of others stay where they are.

        `keep` names versions to hold loaded besides (the champion's predecessor, for a quick rollback).
        Raises VersionFailed with the server's words, or DeadlineExceeded, with the config before in force.
        """
        start = self._clock()
        deadline = start + deadline_s
        before = self.config.entry(name)
        if before is not None and before.base_path != str(base_path):
            raise ReleaseConflict(
                f"model {name} is served from {before.base_path}, not {base_path}",
                hint="give the new model another name, or remove the old one from the config",
            )
        labels = dict(before.labels) if before else {}
        held = {*labels.values(), *keep, version}
        try:
            self._apply(name, ModelEntry(name, str(base_path), tuple(held), labels), deadline)
            for server in self.servers:
                with self._client(server, name) as client:
                    client.wait_available(version, deadline)
            entry = ModelEntry(
                name,
                str(base_path),
                (*labels_without_canary(labels), *keep, version),
                {**labels, CANARY: version},
            )
            self._apply(name, entry, deadline)
        except (BadRequest, ServerFailed) as e:
            # A server that has never had this model waits for it, and says in its refusal why it won't load.
            self._restore(name, before, deadline_s)
            raise VersionFailed(name, version, ", ".join(self.servers), e.message) from e
        except ServingError:
            self._restore(name, before, deadline_s)
            raise
        return {
            "name": name,
            "version": version,
            "servers": list(self.servers),
            "versions": list(entry.versions),
            "labels": dict(entry.labels),
            "seconds": round(self._clock() - start, 3),
        }

    def verify(
        self,
        name: str,
        version: int,
        golden: Golden,
        *,
        tolerance: float | None = None,
        timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        """Ask every replica the golden examples of a version; the answers must be the exporter's own.

        `tolerance` (absolute and relative, for floats) replaces the export's. Raises VerificationFailed or
        what the server answered, after taking the version out of the config again.
        """
        inputs = golden_inputs(golden)
        limit = golden.tolerance if tolerance is None else tolerance
        worst = 0.0
        try:
            for server in self.servers:
                with self._client(server, name, version=version) as client:
                    answers = client.predict(inputs, signature=golden.signature, timeout=timeout_s)
                worst = max(worst, compare(golden, answers, limit, f"{server}, version {version} of {name}"))
        except ServingError:
            self.abandon(name, version)
            raise
        return {
            "name": name,
            "version": version,
            "servers": list(self.servers),
            "examples": golden.examples,
            "max_abs_diff": worst,
            "tolerance": limit,
        }

    def set_label(self, name: str, label: str, version: int, *, deadline_s: float = 60.0) -> dict[str, int]:
        """Point a label at a version that every replica has AVAILABLE; returns all labels."""
        return self.set_labels(name, {label: version}, deadline_s=deadline_s)

    def set_labels(self, name: str, moves: dict[str, int], *, deadline_s: float = 60.0) -> dict[str, int]:
        """Move several labels in one reload; returns all labels."""
        deadline = self._clock() + deadline_s
        entry = self.config.entry(name)
        absent = sorted(set(moves.values()) - set(entry.versions if entry else ()))
        if entry is None or absent:
            raise ReleaseNotFound(
                f"versions {absent} of {name} are not deployed on {', '.join(self.servers)}",
                hint="deploy them first",
            )
        for server in self.servers:
            with self._client(server, name) as client:
                for version in sorted(set(moves.values())):
                    client.wait_available(version, deadline)
        labels = {**entry.labels, **moves}
        self._apply(name, ModelEntry(name, entry.base_path, entry.versions, labels), deadline)
        return labels

    def rollback(
        self, name: str, base_path: Path | str, version: int, *, deadline_s: float = 60.0
    ) -> dict[str, int]:
        """Point `stable` and `canary` back at a version: at once where it is still loaded, else load it first."""
        entry = self.config.entry(name)
        if entry is None or version not in entry.versions:
            self.deploy(name, base_path, version, deadline_s=deadline_s)
        return self.set_labels(name, {STABLE: version, CANARY: version}, deadline_s=deadline_s)

    def abandon(self, name: str, version: int, *, deadline_s: float = 60.0) -> None:
        """Take a version that is not stable out of the config and off the replicas."""
        entry = self.config.entry(name)
        if entry is None or version not in entry.versions:
            return
        if entry.labels.get(STABLE) == version:
            log.warning("version %d of %s is stable, left in place", version, name)
            return
        labels = {label: held for label, held in entry.labels.items() if held != version}
        if STABLE in labels:
            labels[CANARY] = labels[STABLE]
        left = tuple(held for held in entry.versions if held != version)
        smaller = ModelEntry(name, entry.base_path, left, labels) if labels else None
        self._restore(name, smaller, deadline_s)

    def _restore(self, name: str, entry: ModelEntry | None, deadline_s: float) -> None:
        """Put an earlier entry back, for what happened to a version that failed; servers that are down get
        it from the file when they come back."""
        deadline = self._clock() + deadline_s
        with self.config.change(name, entry) as change:
            for server in self.servers:
                try:
                    self._reload(server, change.config, deadline)
                except ServingError as e:
                    log.warning("%s does not take the config before back: %s", server, e)

    def _apply(self, name: str, entry: ModelEntry, deadline: float) -> None:
        """Give one model's new entry to the file and every replica; all or none."""
        with self.config.change(name, entry) as change:
            for done, server in enumerate(self.servers):
                try:
                    self._reload(server, change.config, deadline)
                except ServingError:
                    for earlier in self.servers[:done]:
                        try:
                            self._reload(earlier, change.before, self._clock() + 10)
                        except ServingError as e:
                            log.warning("%s does not take the config before back: %s", earlier, e)
                    raise

    def _reload(self, server: str, config: Any, deadline: float) -> None:
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded(f"no time left to reload the config of {server}")
        with self._client(server, "") as client:
            client.reload(config, timeout=left)

    def _client(self, server: str, name: str, version: int | None = None) -> PredictClient:
        return self._connect(server, name, version=version, label=None, clock=self._clock)

    def loaded(self, name: str) -> dict[str, dict[int, str]]:
        """State names by version and replica, as the replicas say."""
        found: dict[str, dict[int, str]] = {}
        for server in self.servers:
            with self._client(server, name) as client:
                try:
                    found[server] = {version: status.state for version, status in client.status().items()}
                except ModelNotFound:
                    found[server] = {}
        return found


def labels_without_canary(labels: dict[str, int]) -> list[int]:
    """Versions that labels other than canary hold."""
    return [version for label, version in labels.items() if label != CANARY]
