"""The objects of the cluster, their versions and their history for watchers; kept on disk.

Objects are never changed in place: a change puts a new dict where the old one was, so that readers may hold
on to what they got without a lock.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainyard.kubelet.clock import timestamp
from trainyard.kubelet.errors import ApiError, already_exists, not_found
from trainyard.kubelet.resources import RESOURCES, Resource

__all__ = ["Change", "Store"]

log = logging.getLogger(__name__)

# Changes that a watcher may be late; later ones get 410 Expired and list again, as on a cluster. A pod's life
# is about ten, and each holds a whole object.
HISTORY = 1000

Object = dict[str, Any]
Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Change:
    """One entry of the history; `before` is None for ADDED."""

    version: int
    type: str  # ADDED, MODIFIED, DELETED
    plural: str
    object: Object
    before: Object | None


class Store:
    """All objects by (plural, namespace, name); every change gets the next resource version.

    `folder` None keeps nothing on disk. Files are written by rename but without fsync: they must survive a
    kill of the kubelet, not a power cut, after which none of the processes they speak of exists either.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._objects: dict[Key, Object] = {}
        self._history: deque[Change] = deque(maxlen=HISTORY)
        self._changed = threading.Condition(threading.RLock())
        self._version = 1
        self._closed = False
        if folder is not None:
            self._load(folder)
        self._oldest = self._version  # what was before this life can't be watched

    @property
    def version(self) -> int:
        """The newest resource version."""
        with self._changed:
            return self._version

    def create(self, resource: Resource, obj: Object, *, dry_run: bool = False) -> Object:
        """Add an object whose name and namespace are set; 409 when the name is taken."""
        meta = obj["metadata"]
        key = _key(resource, meta.get("namespace"), meta["name"])
        with self._changed:
            if key in self._objects:
                raise already_exists(resource.plural, meta["name"])
            obj = copy.deepcopy(obj)
            obj["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=timestamp())
            if dry_run:
                return obj
            return self._put(resource, key, obj, None)

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """The object; 404 when there is none."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource.plural, name)
        return found

    def find(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """The object, or None."""
        with self._changed:
            return self._objects.get(_key(resource, namespace, name))

    def list(self, resource: Resource, namespace: str | None = None) -> tuple[list[Object], int]:
        """All objects of a kind, of one namespace or of all, by name; and the version of that state."""
        with self._changed:
            rows = [
                (key, obj)
                for key, obj in self._objects.items()
                if key[0] == resource.plural and (namespace is None or key[1] == namespace)
            ]
            version = self._version
        return [obj for _, obj in sorted(rows, key=lambda row: row[0])], version

    def update(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        change: Callable[[Object], Object | None],
        *,
        uid: str | None = None,
        dry_run: bool = False,
    ) -> Object:
        """Change an object: `change` edits the copy that it gets, or returns another.

        Raises 404 when there is none, or when `uid` is given and the name belongs to another object by now.
        A change that changes nothing makes no new version.
        """
        key = _key(resource, namespace, name)
        with self._changed:
            before = self._objects.get(key)
            if before is None or (uid is not None and before["metadata"]["uid"] != uid):
                raise not_found(resource.plural, name)
            draft = copy.deepcopy(before)
            after = change(draft) or draft
            if after == before or dry_run:
                return after
            return self._put(resource, key, after, before)

    def delete(
        self, resource: Resource, namespace: str | None, name: str, *, uid: str | None = None
    ) -> Object:
        """Remove an object and return its last state; 404 as in `update`."""
        key = _key(resource, namespace, name)
        with self._changed:
            before = self._objects.get(key)
            if before is None or (uid is not None and before["metadata"]["uid"] != uid):
                raise not_found(resource.plural, name)
            del self._objects[key]
            last = copy.deepcopy(before)
            self._record("DELETED", resource, last, before)
            if path := self._path(resource, key):
                path.unlink(missing_ok=True)
            return last

    def changes(self, after: int, timeout: float) -> list[Change]:
        """The changes after a version, waiting up to `timeout` seconds for the first one.

        Raises 410 Expired when the history no longer goes back that far.
        """
        with self._changed:
            if after < self._oldest:
                raise ApiError(
                    410, "Expired", f"too old resource version: {after} ({self._oldest}); list again"
                )
            self._changed.wait_for(lambda: self._version > after or self._closed, timeout)
            if self._history and self._history[0].version > after + 1:  # versions have no gaps
                raise ApiError(410, "Expired", f"too old resource version: {after}; list again")
            found: list[Change] = []
            for entry in reversed(self._history):
                if entry.version <= after:
                    break
                found.append(entry)
            return found[::-1]

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until `done()`, asked after every change; False when the time ran out."""
        with self._changed:
            return self._changed.wait_for(done, timeout)

    def wake(self) -> None:
        """Have those that `wait` ask again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether watchers should leave."""
        return self._closed

    def close(self) -> None:
        """Wake all watchers for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, resource: Resource, key: Key, obj: Object, before: Object | None) -> Object:
        self._record("ADDED" if before is None else "MODIFIED", resource, obj, before)
        self._objects[key] = obj
        if path := self._path(resource, key):
            _write(path, obj)
        return obj

    def _record(self, kind: str, resource: Resource, obj: Object, before: Object | None) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._history.append(Change(self._version, kind, resource.plural, obj, before))
        self._changed.notify_all()

    def _path(self, resource: Resource, key: Key) -> Path | None:
        if self._folder is None or not resource.kept:
            return None
        # "_" can't be the name of a namespace.
        return self._folder / key[0] / (key[1] or "_") / f"{key[2]}.json"

    def _load(self, folder: Path) -> None:
        for path in _files(folder):
            resource = RESOURCES.get(path.parent.parent.name)
            if resource is None:
                continue
            try:
                obj = json.loads(path.read_text())
                meta = obj["metadata"]
                key = _key(resource, meta.get("namespace"), meta["name"])
                version = int(meta["resourceVersion"])
            except (ValueError, KeyError, TypeError) as e:
                log.warning("%s is not an object of ours and is left out: %s", path, e)
                continue
            self._objects[key] = obj
            self._version = max(self._version, version)


def _files(folder: Path) -> Iterable[Path]:
    return sorted(folder.glob("*/*/*.json"))


def _key(resource: Resource, namespace: str | None, name: str) -> Key:
    return (resource.plural, (namespace or "default") if resource.namespaced else "", name)


def _write(path: Path, obj: Object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_suffix(".tmp")
    # 0600: secrets are among them.
    with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        json.dump(obj, f)
    temp.replace(path)
