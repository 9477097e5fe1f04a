"""The model server's config file (ModelServerConfig as text proto): the truth of what is deployed.

A config replaces everything a server has, so one model is always changed within the whole list, under a
lock, and written atomically: a model of another name is never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid, ReleaseConflict
from serving.files import locked, write_atomic
from serving.stubs import model_server_config_pb2, text_format

__all__ = ["Change", "ConfigFile", "ModelEntry", "Update", "ensure_config", "parse_config", "read_config"]

_LOCK_WAIT_S = 180.0  # a server may load a new model while another deploy holds the file


@dataclass(frozen=True)
class ModelEntry:
    """One model's part of the config: the versions held and where the labels point."""

    name: str
    base_path: str
    versions: tuple[int, ...]
    labels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigInvalid("name must not be empty")
        if not self.base_path:
            raise ConfigInvalid(f"base_path of {self.name} must not be empty")
        if not self.versions or any(version < 1 for version in self.versions):
            raise ConfigInvalid(
                f"versions of {self.name} must be one or more numbers over 0, got {self.versions}"
            )
        object.__setattr__(self, "versions", tuple(sorted(set(self.versions))))
        object.__setattr__(self, "labels", dict(sorted(self.labels.items())))
        for label, version in self.labels.items():
            if version not in self.versions:
                raise ConfigInvalid(
                    f"label {label} of {self.name} must point at one of versions {self.versions}, got {version}"
                )


Update = Callable[["ModelEntry | None"], "ModelEntry | None"]
"""Makes a model's new entry of the one before, None for a model that is not in the config."""


def parse_config(text: str, source: str = "model config") -> Any:
    """The ModelServerConfig of a text proto; an empty text is an empty list."""
    config = model_server_config_pb2.ModelServerConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as e:
        raise ConfigInvalid(f"{source}: {e}", hint="it must be a ModelServerConfig as text proto") from e
    config.model_config_list.SetInParent()
    return config


def read_config(path: Path) -> Any:
    """The ModelServerConfig of a file; raises ConfigInvalid where it is missing or wrong."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigInvalid(f"model config file {path} can't be read: {e}") from e
    return parse_config(text, f"model config file {path}")


def ensure_config(path: Path) -> Path:
    """Make an empty config file where there is none, so that a server can start before the first release."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, b"model_config_list {\n}\n")
    return path


@dataclass(frozen=True)
class Change:
    """A change of the config file under way: the whole config to be and the one before, the model's new entry."""

    config: Any
    before: Any
    entry: ModelEntry | None = None


class ConfigFile:
    """Reads and changes one config file; `change` is the only way to write."""

    def __init__(self, path: Path | str, *, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        self.path = Path(path)
        self._lock_wait_s = lock_wait_s

    def read(self) -> Any:
        """The whole config; an empty one where the file does not exist yet."""
        return read_config(self.path) if self.path.exists() else parse_config("")

    def entry(self, name: str) -> ModelEntry | None:
        """One model's part, None where the config has no such model."""
        return _entry(self.read(), name)

    @contextmanager
    def change(self, name: str, entry: ModelEntry | Update | None) -> Iterator[Change]:
        """Put one model's new entry (None removes it) into the file, and hold the lock while inside.

        An update is called with the entry before while the lock is held, so that what others changed in the
        meantime is never undone. When the body raises, the file gets its old content back, so that file and
        servers stay of one mind.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.locked():
            before = self.path.read_bytes() if self.path.exists() else None
            config, old = self.read(), self.read()
            new = entry(_entry(old, name)) if callable(entry) else entry
            _merge(config, name, new)
            write_atomic(self.path, text_format.MessageToString(config).encode())
            try:
                yield Change(config, old, new)
            except BaseException:
                if before is None:
                    self.path.unlink()
                else:
                    write_atomic(self.path, before)
                raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody else from changing the file; what killed writers left beside it is removed."""
        with locked(self.path.with_name(f".{self.path.name}.lock"), self._lock_wait_s):
            for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):
                left.unlink(missing_ok=True)
            yield


def _entry(config: Any, name: str) -> ModelEntry | None:
    for model in config.model_config_list.config:
        if model.name == name:
            versions = tuple(model.model_version_policy.specific.versions)
            if not versions:
                raise ReleaseConflict(
                    f"model {name} is in the config file with a version policy other than `specific`",
                    hint="it is kept by hand; remove it there to let releases manage it, or choose another name",
                )
            return ModelEntry(name, model.base_path, versions, dict(model.version_labels))
    return None


def _merge(config: Any, name: str, entry: ModelEntry | None) -> None:
    models = config.model_config_list.config
    place = next((i for i, model in enumerate(models) if model.name == name), None)
    if entry is None:
        if place is not None:
            del models[place]
        return
    model = models.add() if place is None else models[place]
    # Fields that are not ours (logging, platform) stay as somebody set them.
    model.name = name
    model.base_path = entry.base_path
    model.model_platform = model.model_platform or "tensorflow"
    model.ClearField("model_version_policy")
    model.model_version_policy.specific.versions.extend(entry.versions)
    model.ClearField("version_labels")
    for label, version in entry.labels.items():
        model.version_labels[label] = version
