"""Rolling a version out to every replica of a model server, through TF Serving's own API.

    rollout = Rollout(["10.0.0.5:8500", "10.0.0.6:8500"], config_path)
    rollout.deploy("digits", base_path, 8, keep=[7], deadline_s=120)     # loaded everywhere, label canary
    rollout.verify("digits", 8, golden)                                  # answers as its exporter did
    rollout.set_label("digits", "stable", 8)

Two phases, since servers refuse labels on versions that are not loaded: first both versions with labels
unmoved, then, once every replica says AVAILABLE, the label. Whatever fails takes the version back and
raises; callers of the `stable` label never notice.

Replicas found by name (dns:///...) are looked up again all the time: one that appears is waited for like the
others, one that dies is waited for until its name is gone, and then left out with a warning.
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
    DeadlineExceeded,
    ModelNotFound,
    ReleaseConflict,
    ServerFailed,
    ServerUnavailable,
    ServingError,
    VersionFailed,
)
from serving.release.exported import Golden
from serving.tfserving.config import Change, ConfigFile, ModelEntry, Update
from serving.tfserving.entries import CANARY, STABLE, deployed, without_version
from serving.tfserving.probe import compare, golden_inputs
from serving.tfserving.replicas import Replicas, Resolve, addresses

__all__ = ["CANARY", "STABLE", "Rollout"]

log = logging.getLogger(__name__)

Connect = Callable[..., PredictClient]
_LOOK_AGAIN_S, _TURN_S = 0.5, 3.0


class Rollout:
    """Changes what a set of replicas serves; `servers` are gRPC addresses, `config_path` their config file."""

    def __init__(
        self,
        servers: Sequence[str],
        config_path: Path | str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        connect: Connect = PredictClient,
        resolve: Resolve = addresses,
    ) -> None:
        self._replicas = Replicas(servers, resolve=resolve)
        self.config = ConfigFile(config_path)
        self._clock = clock
        self._sleep = sleep
        self._connect = connect

    @property
    def servers(self) -> tuple[str, ...]:
        """The replicas at this moment."""
        return self._replicas.now()

    # ---- what a release does

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

        `base_path` is where servers see the model's versions. `keep` names versions to hold loaded besides
        (the champion's predecessor, for a quick rollback). Raises VersionFailed with the server's words, or
        DeadlineExceeded, with the version taken out again.
        """
        start = self._clock()
        deadline = start + deadline_s
        keep = tuple(keep)
        before: list[ModelEntry | None] = []

        def load(entry: ModelEntry | None) -> ModelEntry:
            if entry is not None and entry.base_path != str(base_path):
                raise ReleaseConflict(
                    f"model {name} is served from {entry.base_path}, not {base_path}",
                    hint="give the new model another name, or remove the old one from the config",
                )
            before.append(entry)
            labels = dict(entry.labels) if entry else {}
            return ModelEntry(name, str(base_path), (*labels.values(), *keep, version), labels)

        def label(entry: ModelEntry | None) -> ModelEntry:
            labels = {**deployed(entry, name, [version]).labels, CANARY: version}
            return ModelEntry(name, str(base_path), (*labels.values(), *keep, version), labels)

        try:
            first, _ = self._apply(name, load, deadline)

            def ready(server: str) -> None:
                self._await(server, name, [version], deadline, first.config)

            self._everywhere(ready, deadline)
            last, servers = self._apply(name, label, deadline, needs=[version], first=first.config)
        except (BadRequest, ServerFailed) as e:
            # A server that has never had this model waits for it, and says in its refusal why it won't load.
            self._take_back(name, version, before, deadline_s)
            raise VersionFailed(name, version, self._named(), e.message) from e
        except ServingError:
            self._take_back(name, version, before, deadline_s)
            raise
        return {
            "name": name,
            "version": version,
            "servers": list(servers),
            "versions": list(last.entry.versions) if last.entry else [],
            "labels": dict(last.entry.labels) if last.entry else {},
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
        differences = [0.0]

        def ask(server: str) -> None:
            with self._client(server, name, version=version) as client:
                answers = client.predict(inputs, signature=golden.signature, timeout=timeout_s)
            differences.append(compare(golden, answers, limit, f"{server}, version {version} of {name}"))

        try:
            servers = self._everywhere(ask, self._clock() + timeout_s)
        except ServingError:
            self.abandon(name, version)
            raise
        return {
            "name": name,
            "version": version,
            "servers": list(servers),
            "examples": golden.examples,
            "max_abs_diff": max(differences),
            "tolerance": limit,
        }

    def set_label(self, name: str, label: str, version: int, *, deadline_s: float = 60.0) -> dict[str, int]:
        """Point a label at a version that every replica has AVAILABLE; returns all labels."""
        return self.set_labels(name, {label: version}, deadline_s=deadline_s)

    def set_labels(
        self, name: str, moves: dict[str, int], *, deadline_s: float = 60.0, some: bool = False
    ) -> dict[str, int]:
        """Move several labels in one reload; returns all labels.

        With `some`, replicas that can't be reached don't stop it while one can: they get the labels from the
        file when they come back.
        """
        deadline = self._clock() + deadline_s
        wanted = sorted(set(moves.values()))

        def move(entry: ModelEntry | None) -> ModelEntry:
            found = deployed(entry, name, wanted)
            return ModelEntry(name, found.base_path, found.versions, {**found.labels, **moves})

        deployed(self.config.entry(name), name, wanted)
        if not some:  # so that nobody else waits for the file while these load
            self._everywhere(lambda server: self._await(server, name, wanted, deadline), deadline)
        change, _ = self._apply(name, move, deadline, needs=wanted, some=some)
        return dict(change.entry.labels) if change.entry else {}

    def rollback(
        self, name: str, base_path: Path | str, version: int, *, deadline_s: float = 60.0
    ) -> dict[str, int]:
        """Point `stable` and `canary` back at a version: at once where it is still loaded, else load it first.

        A replica that is down doesn't stop it.
        """
        moves = {STABLE: version, CANARY: version}
        entry = self.config.entry(name)
        if entry is not None and version in entry.versions:
            return self.set_labels(name, moves, deadline_s=deadline_s, some=True)
        self.deploy(name, entry.base_path if entry else base_path, version, deadline_s=deadline_s)
        return self.set_labels(name, moves, deadline_s=deadline_s)

    def abandon(self, name: str, version: int, *, deadline_s: float = 60.0) -> None:
        """Take a version that is not stable out of the config and off the replicas."""
        entry = self.config.entry(name)
        if entry is not None and version in entry.versions:
            self._take_back(name, version, [entry], deadline_s)

    def trim(self, name: str, keep: Iterable[int], *, deadline_s: float = 60.0) -> tuple[int, ...]:
        """Unload what neither a label nor `keep` holds; returns what stays in the config."""
        held = set(keep)

        def smaller(entry: ModelEntry | None) -> ModelEntry | None:
            if entry is None:
                return None
            stay = (held & set(entry.versions)) | set(entry.labels.values())
            return ModelEntry(name, entry.base_path, tuple(stay), entry.labels) if stay else entry

        entry = self.config.entry(name)
        if smaller(entry) != entry:
            change, _ = self._apply(name, smaller, self._clock() + deadline_s)
            entry = change.entry
        return entry.versions if entry else ()

    def unload(self, name: str, *, deadline_s: float = 60.0) -> None:
        """Take a whole model out of the config and off every replica, and wait until none has it loaded."""
        deadline = self._clock() + deadline_s
        if self.config.entry(name) is not None:
            self._apply(name, lambda _: None, deadline)

        def gone(server: str) -> None:
            with self._client(server, name) as client:
                client.wait_unloaded(deadline)

        self._everywhere(gone, deadline)

    def push(self, *, deadline_s: float = 60.0) -> None:
        """Give every replica the file as it is; those that are down read it when they come back."""
        deadline = self._clock() + deadline_s
        with self.config.locked():
            config = self.config.read()
            for server in self.servers:
                try:
                    self._reload(server, config, deadline)
                except ServingError as e:
                    log.warning("%s does not take the config: %s", server, e)

    def loaded(self, name: str) -> dict[str, dict[int, str]]:
        """State names by version and replica, as the replicas say; raises where one does not answer."""
        found: dict[str, dict[int, str]] = {}
        for server in self.servers:
            with self._client(server, name) as client:
                try:
                    found[server] = {version: status.state for version, status in client.status().items()}
                except ModelNotFound:
                    found[server] = {}
        return found

    # ---- how

    def _take_back(
        self, name: str, version: int, before: Sequence[ModelEntry | None], deadline_s: float
    ) -> None:
        """Take out a version that failed, as if it had never been there; one that is stable stays."""
        if not before:  # it never came as far as the file
            return

        def without(entry: ModelEntry | None) -> ModelEntry | None:
            return without_version(entry, before[0], version)

        entry = self.config.entry(name)
        if entry is not None and entry.labels.get(STABLE) == version:
            log.warning("version %d of %s is stable, left in place", version, name)
            return
        deadline = self._clock() + deadline_s
        with self.config.change(name, without) as change:
            for server in self._here():
                try:
                    self._reload(server, change.config, deadline)
                except ServingError as e:
                    log.warning("%s does not take the config before back: %s", server, e)

    def _apply(
        self,
        name: str,
        update: Update,
        deadline: float,
        *,
        needs: Sequence[int] = (),
        some: bool = False,
        first: Any = None,
    ) -> tuple[Change, tuple[str, ...]]:
        """Give one model's new entry to the file and every replica; all or none. The change and the replicas.

        `needs` are versions that a replica must have AVAILABLE before, since new labels name them; `first` is a
        config that loads them, for replicas that come late.
        """
        done: list[str] = []
        with self.config.change(name, update) as change:

            def act(server: str) -> None:
                if needs:
                    self._await(server, name, needs, self._clock() + 2.0 if some else deadline, first)
                self._reload(server, change.config, deadline)
                done.append(server)

            try:
                if some:
                    self._where_possible(act)
                else:
                    self._everywhere(act, deadline)
            except ServingError:
                for earlier in done:
                    try:
                        self._reload(earlier, change.before, self._clock() + 10)
                    except ServingError as e:
                        log.warning("%s does not take the config before back: %s", earlier, e)
                raise
        return change, tuple(done)

    def _everywhere(self, act: Callable[[str], None], deadline: float) -> tuple[str, ...]:
        """Do something on every replica, on those too that appear meanwhile; returns where it was done."""
        done: dict[str, bool] = {}
        while todo := [server for server in self.servers if server not in done]:
            for server in todo:
                try:
                    act(server)
                    done[server] = True
                except (ServerUnavailable, DeadlineExceeded) as e:
                    if not self._replicas.change or self._clock() >= deadline:
                        raise
                    if server not in self._here():
                        log.warning("replica %s is gone, left out: %s", server, e)
                        done[server] = False
                    else:  # its name is there still: it comes back, or the name goes
                        self._sleep(_LOOK_AGAIN_S)
        reached = tuple(server for server, ok in done.items() if ok)
        if not reached:
            raise ServerUnavailable(f"no replica is left of {', '.join(done) or 'none'}")
        return reached

    def _where_possible(self, act: Callable[[str], None]) -> None:
        failed: ServingError | None = None
        reached = 0
        for server in self.servers:
            try:
                act(server)
                reached += 1
            except (ServerUnavailable, DeadlineExceeded) as e:
                log.warning("%s is not reached, it takes the config from the file: %s", server, e)
                failed = e
        if failed is not None and not reached:
            raise failed

    def _await(
        self, server: str, name: str, versions: Sequence[int], deadline: float, first: Any = None
    ) -> None:
        """Wait until a replica serves the versions.

        One found by name may go, so its name is asked again in turns; or it came since the config `first` was
        given to all, and began with an older file: then it is told.
        """
        with self._client(server, name) as client:
            for version in versions:
                while True:
                    turn = min(deadline, self._clock() + _TURN_S) if self._replicas.change else deadline
                    try:
                        client.wait_available(version, turn)
                        break
                    except DeadlineExceeded:
                        if turn >= deadline or server not in self._here():
                            raise
                    if first is not None and version not in client.status():
                        log.info("replica %s does not know version %d of %s yet, told", server, version, name)
                        self._reload(server, first, deadline)

    def _here(self) -> tuple[str, ...]:
        try:
            return self.servers
        except ServerUnavailable:
            return ()

    def _named(self) -> str:
        return ", ".join(self._here()) or "no replica"

    def _reload(self, server: str, config: Any, deadline: float) -> None:
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded(f"no time left to reload the config of {server}")
        with self._client(server, "") as client:
            client.reload(config, timeout=left)

    def _client(self, server: str, name: str, version: int | None = None) -> PredictClient:
        return self._connect(server, name, version=version, label=None, clock=self._clock)
