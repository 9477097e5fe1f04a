"""Files of the storage root on the machine of an Airflow task, where storage is an object store (TRAINYARD_STORE).

    job_files     a job's folder here for as long as a light task works on it, and back in the store after it
    bring         a file or folder of the store, here
    give          what a task wrote under the storage root, for the pod of a step that names it

Without an object store the storage root is a folder that all share, and none of these does anything. The store wins
over what is here: an earlier task may have run on this machine, and a later one on another.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.shared import through
from trainyard.settings import PipelineSettings

if TYPE_CHECKING:
    from trainers.storage.mirror import Mirror

__all__ = ["bring", "check_store", "give", "job_files"]

_PATIENCE = 60.0  # seconds that a light task waits for a store that is away; then it is retried
# Nobody's business in a light task; where a job takes the place of another, all but the first two.
_NOT_BROUGHT = ("checkpoints", "history", "export", "logs", "stacks", "tensorboard")
_OURS = ("jobs", "records", "models")  # written by pods and releases, never by a task's own hand


def _mirror(settings: PipelineSettings) -> Mirror:
    from trainers.storage.mirror import Mirror
    from trainers.storage.objects import ObjectStore
    from trainers.storage.places import on_the_way

    return Mirror(ObjectStore(settings.store), settings.storage, rewrite=on_the_way(settings.storage))


def check_store(settings: PipelineSettings) -> None:
    """StorageRefused when a job's record could not be kept in the object store, StorageAway when it doesn't answer."""
    if settings.store:
        from trainers.storage.objects import ObjectStore

        _patiently(ObjectStore(settings.store).check)


def _patiently(action: Any) -> Any:
    from trainers.storage.retry import Weather, persist

    return persist(action, _PATIENCE, Weather())


@contextlib.contextmanager
def job_files(folder: Path | str, *parts: str, writes: bool = True, whole: bool = False) -> Iterator[None]:
    """Within it the job's folder is here as the store has it: `parts` of it, or what light tasks look at, or `whole`.

    Checkpoints never are. What is written meanwhile goes to the store, also when an error ends it; one task of a
    machine at a time.
    """
    settings = PipelineSettings.from_environment()
    if not settings.store:
        yield
        return
    folder = Path(folder)
    mirror = _mirror(settings)
    key = mirror.key(folder)

    def wanted(name: str) -> bool:
        top = name[len(key) + 1 :].partition("/")[0]
        return top in parts if parts else top not in (_NOT_BROUGHT[:2] if whole else _NOT_BROUGHT)

    with _alone(settings, key):
        _patiently(lambda: _take(mirror, key, wanted, folders=whole))
        try:
            with through(_Decider(mirror)):
                yield
        finally:
            if writes:
                _patiently(
                    lambda: mirror.push(key, lambda name: wanted(name) or (whole and "/history/" in name))
                )


class _Decider:
    """What `trainers.job.shared` asks within a task, which has no agent."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def create(self, path: Path, data: bytes) -> bool:
        """See `trainers.job.shared.Shared`."""
        return bool(_patiently(lambda: self._mirror.create(path, data)))

    def settle(self, folder: Path) -> None:
        """See `trainers.job.shared.Shared`."""
        key = self._mirror.key(folder)
        _patiently(lambda: self._mirror.push(key, lambda name: not name.startswith(f"{key}/checkpoints/")))


@contextlib.contextmanager
def _alone(settings: PipelineSettings, key: str) -> Iterator[None]:
    folder = settings.storage / ".trainyard"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    with (folder / f".{name}.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _take(mirror: Mirror, key: str, wanted: Any, *, folders: bool) -> None:
    """Make what is here below `key` what the store has there."""
    listing = mirror.store.find(key)
    here = mirror.root / key
    for path in [path for path in here.rglob("*") if path.is_file()]:
        if wanted(mirror.key(path)):
            path.unlink()
    mirror.pull(key, wanted, listing)
    if folders:
        shutil.rmtree(here / "history", ignore_errors=True)
        for name in listing:
            if name.startswith(f"{key}/history/"):
                (mirror.root / name).parent.mkdir(parents=True, exist_ok=True)  # whose numbers are taken


def bring(path: Path | str | None, *more: Path | str | None) -> None:
    """Have files or folders of the storage root here as the store has them."""
    settings = PipelineSettings.from_environment()
    if not settings.store:
        return
    mirror = _mirror(settings)
    for place in filter(None, (path, *more)):
        if Path(place).is_relative_to(settings.storage):
            key = mirror.key(place)
            with _alone(settings, key):
                _patiently(lambda key=key: _take(mirror, key, lambda _: True, folders=False))


def give(spec: Mapping[str, Any]) -> None:
    """Give the store what a task of this machine wrote at the places that a step's spec names."""
    settings = PipelineSettings.from_environment()
    if not settings.store:
        return
    from trainers.storage.places import key_below

    mirror = _mirror(settings)
    for text in _texts(spec):
        key = key_below(text, settings.storage)
        if key and key.partition("/")[0] not in _OURS and (settings.storage / key).exists():
            _patiently(lambda key=key: _give(mirror, key))


def _give(mirror: Mirror, key: str) -> None:
    there = mirror.store.find(key)

    def differs(name: str) -> bool:
        known = there.get(name)
        # S3's version of an object that came in one piece is its MD5; of others nobody knows, and they go again.
        path = mirror.root / name
        return (
            known is None
            or hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() not in known.version
        )

    count = mirror.push(key, differs)
    if count:
        print(f"storage: gave {count} files of {key} to {mirror.store.url}")


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for name, item in value.items() if name != "output" for text in _texts(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _texts(item)]
    return []
