"""Holds the versions that the config wants: finds, loads, swaps and unloads them, and finds them for callers.

A new version is loaded and warmed up before an old one goes (so memory for both is needed), requests in
flight keep the version they began with, and a version that can't be loaded ends with its message while the
others serve on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.server.flags import Options
from serving.server.metrics import Metrics
from serving.server.servable import Servable
from serving.server.status import Code, Refused
from serving.server.versions import check_config, find_versions, identity, wanted_versions
from serving.stubs import get_model_status_pb2

__all__ = ["ModelManager", "State"]

log = logging.getLogger(__name__)

State = get_model_status_pb2.ModelVersionStatus.State
START, LOADING, AVAILABLE, UNLOADING, END = map(
    State.Value, ("START", "LOADING", "AVAILABLE", "UNLOADING", "END")
)
_UNLOAD_WAIT_S = 60.0
_CLOSE_WAIT_S = 5.0

Loader = Callable[[str, int, Path], Servable]


@dataclass
class _Version:
    path: Path
    state: Any = START
    code: Code = Code.OK
    message: str = ""
    servable: Servable | None = None
    identity: tuple[int, ...] | None = None

    @property
    def settled(self) -> bool:
        return self.state in (AVAILABLE, END)


@dataclass(frozen=True)
class _Serving:
    """What callers may use of one model; replaced as a whole, so that reading needs no lock."""

    versions: Mapping[int, Servable] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)
    latest: int | None = None


class ModelManager:
    """The models of one server. `loader` makes a warmed servable of a version folder, or raises."""

    def __init__(self, options: Options, metrics: Metrics, loader: Loader) -> None:
        self._options = options
        self._metrics = metrics
        self._loader = loader
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self._reloading = threading.Lock()
        self._stopping = threading.Event()
        self._configs: dict[str, Any] = {}
        self._versions: dict[str, dict[int, _Version]] = {}
        self._serving: dict[str, _Serving] = {}
        self._complaints: dict[str, str] = {}
        self._loads = ThreadPoolExecutor(options.num_load_threads, "load")
        self._poller = threading.Thread(target=self._poll, name="poll", daemon=True)
        self.ready = threading.Event()

    # ---- for callers

    def knows(self, model: str) -> bool:
        """The config names this model."""
        return model in self._configs

    def logging_rate(self, model: str) -> float | None:
        """Share of requests that the model's config wants logged; None where it says nothing."""
        config = self._configs.get(model)
        if config is None or not config.HasField("logging_config"):
            return None
        return config.logging_config.sampling_config.sampling_rate

    @contextmanager
    def hold(self, spec: Any) -> Iterator[Servable]:
        """The servable that a ModelSpec names, kept loaded while inside; raises Refused."""
        servable = self._find(spec)
        while not servable.acquire():  # swapped away between the two: the next look finds its successor
            servable = self._find(spec)
        try:
            yield servable
        finally:
            servable.release()

    def _find(self, spec: Any) -> Servable:
        if not spec.name:
            raise Refused(Code.INVALID_ARGUMENT, "ModelSpec has no name specified.")
        serving = self._serving.get(spec.name, _NOTHING)
        choice = spec.WhichOneof("version_choice")
        if choice == "version_label":
            version = serving.labels.get(spec.version_label)
            if version is None and self.ready.is_set():
                raise Refused(
                    Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {spec.version_label}"
                )
        elif choice == "version":
            version = spec.version.value
        else:
            version = serving.latest
        servable = None if version is None else serving.versions.get(version)
        if servable is not None:
            return servable
        if not self.ready.is_set():
            raise Refused(Code.UNAVAILABLE, "The server is starting: its models are not loaded yet")
        asked = f"Latest({spec.name})" if choice is None else f"Specific({spec.name}, {version})"
        raise Refused(Code.NOT_FOUND, f"Servable not found for request: {asked}")

    def states(self, model: str) -> dict[int, tuple[Any, Code, str]]:
        """State, error code and message of every version known, loaded or not."""
        with self._lock:
            versions = self._versions.get(model, {})
            return {number: (v.state, v.code, v.message) for number, v in versions.items()}

    # ---- config

    def configure(self, config: Any) -> None:
        """Take the first config as it is, without loading: versions show as START."""
        models = check_config(config)
        with self._lock:
            self._configs = models
            for name in models:
                for number, path in (self._wanted(name) or {}).items():
                    self._versions.setdefault(name, {})[number] = _Version(path)
            self._publish()

    def start(self) -> None:
        """Load what the first config wants, wait for it, then watch for new versions."""
        with self._lock:
            for name in self._configs:
                self._reconcile(name)
            self._settled.wait_for(lambda: self._stopping.is_set() or self._all_settled(self._configs))
            for name, model in self._configs.items():
                loaded = self._serving.get(name, _NOTHING).versions
                for label, version in model.version_labels.items():
                    if version not in loaded:
                        log.error(
                            "label %s of %s names version %d, which is not loaded", label, name, version
                        )
        self.ready.set()
        self._poller.start()

    def reload(self, config: Any, deadline: float | None = None) -> None:
        """Replace the config, all or nothing.

        Returns when every model that is new has a version AVAILABLE; versions of models known before load
        in the background (ask `states`). Raises Refused, with the old config in force, when the config is
        wrong, a label names a version that is not AVAILABLE, or a new model can't be loaded.
        """
        models = check_config(config)
        with self._reloading, self._lock:
            self._check_labels(models)
            before, self._configs = self._configs, models
            self._complaints.clear()
            self._forget_failures()
            self._publish()
            for name in {*before, *models}:
                self._reconcile(name)
            fresh = set(models) - set(before)
            left = None if deadline is None else deadline - time.monotonic()
            settled = self._settled.wait_for(
                lambda: self._stopping.is_set() or self._all_settled(fresh), left
            )
            missing = sorted(name for name in fresh if not self._serving[name].versions)
            if not missing:
                log.info("config reloaded: %d models", len(models))
                return
            reasons = "; ".join(self._why(name) for name in missing)
            self._configs = before
            self._publish()
            for name in {*before, *models}:
                self._reconcile(name)
        raise Refused(
            Code.UNKNOWN if settled else Code.DEADLINE_EXCEEDED,
            f"{len(missing)} servable(s) did not become available: {{{reasons}}}; the config before stays in force",
        )

    def _check_labels(self, models: Mapping[str, Any]) -> None:
        for name, model in models.items():
            serving = self._serving.get(name, _NOTHING)
            for label, version in model.version_labels.items():
                known = serving.labels.get(label)
                early = self._options.allow_unavailable_labels and known in (None, version)
                if version not in serving.versions and not early:
                    raise Refused(
                        Code.FAILED_PRECONDITION,
                        f"Request to assign label to version {version} of model {name}, "
                        "which is not currently available for inference",
                    )

    def _why(self, name: str) -> str:
        failed = [
            f"{name}/{number}: {version.message or State.Name(version.state)}"
            for number, version in self._versions.get(name, {}).items()
        ]
        return ", ".join(failed) or f"{name}: no versions found under {self._configs[name].base_path}"

    def _forget_failures(self) -> None:
        for versions in self._versions.values():
            for number in [n for n, v in versions.items() if v.code is not Code.OK and v.settled]:
                del versions[number]

    # ---- versions

    def _wanted(self, name: str) -> dict[int, Path] | None:
        """Versions wanted and found; None where the base path can't be read, so that nothing changes."""
        model = self._configs.get(name)
        if model is None:
            return {}
        try:
            found = find_versions(model.base_path)
        except OSError as e:
            self._complain(name, f"base path {model.base_path} of {name} can't be read: {e.strerror or e}")
            return None
        wanted = wanted_versions(model, found)
        absent = sorted(set(model.model_version_policy.specific.versions) - set(found))
        if absent:
            self._complain(name, f"versions {absent} of {name} are not found under {model.base_path}")
        elif not wanted:
            self._complain(name, f"no versions of {name} found under base path {model.base_path}")
        else:
            self._complaints.pop(name, None)
        return wanted

    def _complain(self, name: str, message: str) -> None:
        if self._complaints.get(name) != message:  # once, not at every poll
            self._complaints[name] = message
            log.warning("%s", message)

    def _reconcile(self, name: str) -> None:
        """Start the loads and unloads that bring one model nearer to its config. Called with the lock."""
        wanted = self._wanted(name)
        if wanted is None or self._stopping.is_set():
            return
        versions = self._versions.setdefault(name, {})
        for number, path in wanted.items():
            version = versions.get(number)
            if version is None or (version.state == END and self._may_load(version, path)):
                version = versions[number] = _Version(path)
            if version.state == START and version.identity is None:
                version.identity = ()  # taken: a load is queued
                self._loads.submit(self._load, name, number, version)
        available = {n for n, v in versions.items() if v.state == AVAILABLE}
        if not wanted or available & set(wanted):
            for number in available - set(wanted):
                self._unload(name, number, versions[number])
        self._settled.notify_all()

    @staticmethod
    def _may_load(version: _Version, path: Path) -> bool:
        if version.code is Code.OK:
            return True  # was unloaded in peace, and is wanted again
        try:
            return identity(path) != version.identity
        except OSError:
            return False

    def _load(self, name: str, number: int, version: _Version) -> None:
        servable: Servable | None = None
        with self._lock:
            version.state = LOADING
        for attempt in range(self._options.max_load_retries + 1):
            if attempt and self._stopping.wait(self._options.load_retry_s):
                return
            start = time.perf_counter()
            try:
                found = identity(version.path)
                servable = self._loader(name, number, version.path)
            except Exception as e:  # noqa: BLE001  # a broken model, whatever it raises, must not end the server
                self._metrics.load(str(version.path), False, 0)
                code, message = _failure(e)
                log.error("loading %s version %d failed (try %d): %s", name, number, attempt + 1, message)
            else:
                took = time.perf_counter() - start
                self._metrics.load(str(version.path), True, took * 1e6)
                log.info(
                    "successfully loaded servable version {name: %s version: %d} in %.2f s",
                    name,
                    number,
                    took,
                )
                break
        with self._lock:
            if servable is None:
                version.state, version.code, version.message = END, code, message
                version.identity = _identity_or_none(version.path)
            else:
                version.state, version.servable, version.identity = AVAILABLE, servable, found
            self._publish()
            self._reconcile(name)

    def _unload(self, name: str, number: int, version: _Version) -> None:
        servable = version.servable
        version.state, version.servable = UNLOADING, None
        self._publish()

        def finish() -> None:
            if servable is not None and not servable.close(time.monotonic() + _UNLOAD_WAIT_S):
                log.warning("%s version %d still answers a request, left to it", name, number)
            with self._lock:
                version.state = END
                self._reconcile(name)  # it may be wanted again by now
            log.info("unloaded %s version %d", name, number)

        threading.Thread(target=finish, name=f"unload-{name}-{number}", daemon=True).start()

    def _publish(self) -> None:
        """Let callers see the current versions and labels. Called with the lock."""
        serving = {}
        for name, model in self._configs.items():
            loaded = {
                n: v.servable for n, v in self._versions.get(name, {}).items() if v.servable is not None
            }
            serving[name] = _Serving(loaded, dict(model.version_labels), max(loaded, default=None))
        self._serving = serving

    def _all_settled(self, names: Any) -> bool:
        return all(version.settled for name in names for version in self._versions.get(name, {}).values())

    # ---- watching

    def _poll(self) -> None:
        file, every = self._options.model_config_file, self._options.model_config_file_poll_s
        read_at, text = time.monotonic(), None
        while not self._stopping.wait(self._options.poll_s):
            with self._lock:
                for name in {*self._configs, *self._versions}:
                    self._reconcile(name)
            if file and every > 0 and time.monotonic() - read_at >= every:
                read_at = time.monotonic()
                text = self._reload_file(file, text)

    def _reload_file(self, file: Path, before: str | None) -> str | None:
        from serving.tfserving.config import parse_config

        try:
            text = file.read_text()
            if text != before:
                self.reload(parse_config(text))
        except (OSError, ValueError, Refused) as e:
            log.error("config file %s is not taken over: %s", file, e)
            return before
        return text

    def stop(self) -> None:
        """Stop watching and loading, and free every model; callers inside get a short time to leave."""
        self._stopping.set()
        with self._lock:
            self._settled.notify_all()
            self._serving = {}
            servables = [v.servable for vs in self._versions.values() for v in vs.values() if v.servable]
        if self._poller.is_alive():
            self._poller.join()
        self._loads.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for servable in servables:
            servable.close(deadline)


_NOTHING = _Serving()


def _identity_or_none(path: Path) -> tuple[int, ...] | None:
    try:
        return identity(path)
    except OSError:
        return None


def _failure(error: Exception) -> tuple[Code, str]:
    code = getattr(error, "code", None) or getattr(error, "error_code", None)
    if isinstance(error, OSError):
        code = Code.NOT_FOUND
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    try:
        return Code(int(code)) if code else Code.UNKNOWN, str(message)[:2000]
    except (TypeError, ValueError):
        return Code.UNKNOWN, str(message)[:2000]
