"""Small files of a folder, both ways between this machine's disk and an object store, each when it has changed.

Every file has one writer at a time, which sees its own; so what was changed here goes up, what was changed there
comes down, and where both were, here wins. What others must not see half of is written by rename, and goes up
as it was at one moment. Files that many may make go through `create`, which the store decides.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainers.job.files import write_bytes
from trainers.storage.objects import Found, ObjectStore

__all__ = ["Mirror", "Wanted", "is_passing"]

Wanted = Callable[[str], bool]
"""Whether a file is copied, by its key."""

_IN_MEMORY = 64 << 20  # larger files are uploaded from the disk, and must not change meanwhile
_AT_ONCE = 16
_BYTES_PER_S = 2e6  # a log that grows is not sent whole each second


@dataclasses.dataclass
class _Known:
    """A file as it was when it was last copied, either way; `version` is None until a listing tells it."""

    local: tuple[int, int, int] | None
    version: str | None
    sent: float = 0.0


def is_passing(name: str) -> bool:
    """Whether a file is half-written, a lock, or otherwise nobody else's business, by its name."""
    return name == "lock" or (name.startswith(".") and name.endswith((".tmp", ".lock", ".old")))


class Mirror:
    """The files below `root` whose keys are `wanted`; keys are paths relative to `root`.

    `rewrite` changes what a file holds on its way: it is given key, bytes, and whether they go up.
    """

    def __init__(
        self,
        store: ObjectStore,
        root: Path,
        *,
        rewrite: Callable[[str, bytes, bool], bytes] = lambda _key, data, _up: data,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.root = root
        self._rewrite = rewrite
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self.lock = threading.RLock()

    def key(self, path: Path | str) -> str:
        """The key of a path below the root; ValueError for another."""
        return Path(os.path.normpath(path)).relative_to(self.root).as_posix()

    # ---- down

    def pull(self, prefix: str, wanted: Wanted, listing: dict[str, Found] | None = None) -> list[str]:
        """Take what has changed in the store below `prefix`; the keys that came or went."""
        with self.lock:
            found = self.store.find(prefix) if listing is None else listing
            changed = []
            asked = []
            for key in sorted(found):
                known = self._known.get(key)
                if not wanted(key):
                    continue
                if known is not None and known.version is None:
                    known.version = found[key].version  # of our own upload
                    continue
                if known is not None and known.version == found[key].version:
                    continue
                if self._is_changed(key, known):
                    continue  # it goes up with the next push
                asked.append(key)
            took = _at_once(lambda key: self._take(key, found[key].version), asked)
            changed += [key for key, done in zip(asked, took, strict=True) if done]
            gone = [k for k in self._known if _below(k, prefix) and k not in found and wanted(k)]
            for key in gone:
                if self._known[key].version is None or self._is_changed(key, self._known[key]):
                    continue  # sent after that listing
                (self.root / key).unlink(missing_ok=True)
                del self._known[key]
                changed.append(key)
            return changed

    def _take(self, key: str, version: str) -> bool:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        if key.endswith((".json", ".jsonl")):
            data = self.store.read(key)
            if data is None:
                return False  # just removed
            write_bytes(path, self._rewrite(key, data, False))
        elif not self.store.fetch(key, path):
            return False
        self._known[key] = _Known(_signature(path), version)
        return True

    def _is_changed(self, key: str, known: _Known | None) -> bool:
        signature = _signature(self.root / key)
        return signature != known.local if known is not None else signature is not None

    # ---- up

    def push(
        self, prefix: str, wanted: Wanted, *, last: Wanted = lambda _key: False, all_: bool = True
    ) -> int:
        """Give the store what has changed here below `prefix`, and remove there what was removed here.

        Files that are `last` go after all others: they tell readers that the others are there. Without `all_`,
        large files that were sent a moment ago wait. The number of files that went.
        """
        with self.lock:
            count = 0
            here = {key for key in self._here(prefix) if wanted(key)}
            going = []
            for key in sorted(here):
                known = self._known.get(key)
                if not self._is_changed(key, known):
                    continue
                if not all_ and known is not None and self._too_soon(key, known):
                    continue
                going.append(key)
            for part in ([k for k in going if not last(k)], [k for k in going if last(k)]):
                count += sum(_at_once(self._send, part))
            gone = [k for k in self._known if _below(k, prefix) and k not in here and wanted(k)]
            for key in [k for k in gone if _signature(self.root / k) is None]:
                self.store.remove([key])
                del self._known[key]
                count += 1
            return count

    def _too_soon(self, key: str, known: _Known) -> bool:
        size = (self.root / key).stat().st_size
        return self._clock() - known.sent < size / _BYTES_PER_S

    def _send(self, key: str) -> bool:
        path = self.root / key
        try:
            signature = _signature(path)
            if signature is None:
                return False
            if signature[1] > _IN_MEMORY:
                self.store.upload(path, key)
            else:
                self.store.write(key, self._rewrite(key, path.read_bytes(), True))
        except FileNotFoundError:
            return False  # removed meanwhile
        self._known[key] = _Known(signature, None, self._clock())
        return True

    def _here(self, prefix: str) -> Iterator[str]:
        top = self.root / prefix
        if top.is_file():
            yield prefix
        for folder, _, names in os.walk(top):
            for name in names:
                if not is_passing(name) and not any(map(is_passing, Path(folder).relative_to(top).parts)):
                    yield (Path(folder) / name).relative_to(self.root).as_posix()

    def forget_changes(self, prefix: str) -> None:
        """Take what is here below `prefix` as known to the store: it goes up when it changes again."""
        with self.lock:
            for key in self._here(prefix):
                self._known.setdefault(key, _Known(_signature(self.root / key), None))

    # ---- one of many

    def create(self, path: Path, data: bytes) -> bool:
        """Make a file that is nowhere yet, here and there; False when another was first, whose file is here then."""
        key = self.key(path)
        with self.lock:
            made = self.store.create(key, self._rewrite(key, data, True))
            found = data if made else self.store.read(key)
            if found is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, found if made else self._rewrite(key, found, False))
                self._known[key] = _Known(_signature(path), None)
            if not made and found == self._rewrite(key, data, True):
                return True  # our own, whose answer was lost on the way
            return made


def _at_once(action: Callable[[str], bool], keys: Sequence[str]) -> list[bool]:
    """`action` of each key, several at a time: a store answers many requests as fast as one."""
    if len(keys) < 3:
        return [action(key) for key in keys]
    with ThreadPoolExecutor(_AT_ONCE, "trainyard-storage") as pool:
        return [*pool.map(action, keys)]


def _below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/") or not prefix


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if stat.S_ISREG(found.st_mode) else None
