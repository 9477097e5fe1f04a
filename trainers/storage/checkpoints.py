"""Checkpoints in an object store: each is whole there or not there at all.

    <job>/checkpoints/step-40.66f2c1aa-9d3e51/step-40.data-00000-of-00001
                                              step-40.index
                                              complete.json     last: sizes, SHA-256, step, whose job, when

No two uploads share a name, so that none can mix with another, whatever is killed when. What has no `complete.json`
is not looked at; what has one is checked against it, byte by byte, and passed over for the one before where it is
not as it says. Checkpoints of another job that had this folder before are not restored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, sha256_of_file, write_bytes
from trainers.storage.objects import Found, ObjectStore
from trainers.storage.places import moved

__all__ = ["KEEP", "CheckpointSets", "SavedSet", "identity_of"]

log = logging.getLogger(__name__)

KEEP = 3
COMPLETE = "complete.json"
_ABANDONED_S = 3600.0  # an upload that has not become whole for so long never will
_NAMED = re.compile(r'^all_model_checkpoint_paths: "([^"]+)"$', re.MULTILINE)
_SET = re.compile(r"(?P<name>[\w.-]+)\.(?P<at>[0-9a-f]{8,})-[0-9a-f]{6}")


@dataclasses.dataclass(frozen=True)
class SavedSet:
    """A whole checkpoint in the store: `name` is TensorFlow's ("step-40"), `prefix` where its files are."""

    prefix: str
    name: str
    step: int
    job: str
    at: float
    files: Mapping[str, Mapping[str, Any]]


def identity_of(folder: Path, root: Path) -> str:
    """Which job the checkpoints of `folder` are of: a digest of its plan, the same under any `root`; "" without one."""
    plan = read_json(folder / "plan.json")
    if plan is None:
        return ""
    return hashlib.sha256(moved(json.dumps(plan["job"], sort_keys=True).encode(), root, up=True)).hexdigest()


class CheckpointSets:
    """The checkpoints of one job, in the store at `key` and on this disk at `folder` (both `<job>/checkpoints`)."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        folder: Path,
        job: str,
        *,
        keep: int = KEEP,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._key = key
        self._folder = folder
        self._job = job
        self._keep = keep
        self._now = now
        self._done: dict[
            str, tuple[tuple[str, int, int], ...]
        ] = {}  # by name: its files as they were uploaded

    # ---- up

    def publish(self) -> SavedSet | None:
        """Upload the newest checkpoint of this disk, unless the store has it; None when there is nothing to do."""
        name = next(iter(reversed(self._named())), "")
        shape = self._shape(name)
        if not shape or self._done.get(name) == shape:
            return None
        # Links, so that the trainer may remove or replace its files while they are sent.
        staged = self._folder / f".{name}.{secrets.token_hex(4)}.tmp"
        staged.mkdir()
        try:
            try:
                for file, _, _ in shape:
                    os.link(self._folder / file, staged / file)
            except FileNotFoundError:
                return None
            if self._shape(name) != shape:
                return None  # being written anew: the next look finds it whole
            saved = self._upload(name, staged)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        self._done = {name: shape}
        self._prune()
        return saved

    def _upload(self, name: str, staged: Path) -> SavedSet:
        prefix = f"{self._key}/{name}.{int(self._now()):08x}-{secrets.token_hex(3)}"
        files = {}
        for path in sorted(staged.iterdir(), key=lambda p: (p.suffix == ".index", p.name)):
            self._store.upload(path, f"{prefix}/{path.name}")
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        step = int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdigit() else 0
        saved = SavedSet(prefix, name, step, self._job, self._now(), files)
        document = {field: value for field, value in dataclasses.asdict(saved).items() if field != "prefix"}
        self._store.write(f"{prefix}/{COMPLETE}", json.dumps(document, sort_keys=True).encode())
        return saved

    def _named(self) -> list[str]:
        try:
            return _NAMED.findall((self._folder / "checkpoint").read_text(errors="replace"))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _shape(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """The files of a checkpoint on this disk, and what tells one writing of them from another."""
        found = []
        for path in self._folder.glob(f"{name}.*") if name else ():
            try:
                about = path.stat()
            except FileNotFoundError:
                return ()
            found.append((path.name, about.st_ino, about.st_mtime_ns))
        whole = any(file.endswith(".index") for file, _, _ in found) and len(found) > 1
        return tuple(sorted(found)) if whole else ()

    # ---- what is there

    def saved(self, listing: Mapping[str, Found] | None = None) -> list[SavedSet]:
        """The whole checkpoints of this job, oldest first."""
        listing = self._store.find(self._key) if listing is None else listing
        found = []
        for key in listing:
            prefix, _, last = key.rpartition("/")
            if last != COMPLETE or not prefix.startswith(f"{self._key}/"):
                continue
            data = self._store.read(key)
            try:
                known = None if data is None else SavedSet(prefix=prefix, **json.loads(data))
            except (ValueError, TypeError):
                log.warning("%s is damaged: passing that checkpoint over", key)
                continue
            if known is not None and known.job == self._job:
                found.append(known)
        # By step and not by time: the clocks of two pods differ.
        return sorted(found, key=lambda s: (s.step, s.at))

    def sweep(self, *, everything: bool = False) -> None:
        """Remove what uploads that were killed have left; `everything`: when nobody else may be uploading."""
        listing = self._store.find(self._key)
        whole = {key.rpartition("/")[0] for key in listing if key.endswith(f"/{COMPLETE}")}
        for key in listing:
            prefix = key.rpartition("/")[0]
            named = _SET.fullmatch(prefix.removeprefix(f"{self._key}/"))
            if prefix in whole or named is None:
                continue
            if everything or self._now() - int(named["at"], 16) > _ABANDONED_S:
                self._store.remove([key])

    def _prune(self) -> None:
        """Keep the newest; of the others the word that they are whole goes first."""
        listing = self._store.find(self._key)
        for old in self.saved(listing)[: -self._keep]:
            self._remove(old, listing)

    def _remove(self, old: SavedSet, listing: Iterable[str]) -> None:
        files = [key for key in listing if key.startswith(f"{old.prefix}/")]
        self._store.remove(sorted(files, key=lambda key: not key.endswith(f"/{COMPLETE}")))

    # ---- down

    def fetch(self, count: int = 1) -> list[SavedSet]:
        """Bring the newest whole checkpoints to this disk, those that are not here; which are here then, oldest first.

        A second one is for whoever finds that the first can't be read.
        """
        found: dict[str, SavedSet] = {}
        for saved in reversed(self.saved()):
            if saved.name in found:
                continue
            if self._is_here(saved) or self._bring(saved):
                found[saved.name] = saved
            else:
                log.warning("checkpoint %s is not as it should be: taking the one before", saved.prefix)
            if len(found) == count:
                break
        here = [*reversed(found.values())]
        if here:
            self._name_all([saved.name for saved in here])
            self._done = {here[-1].name: self._shape(here[-1].name)}
        return here

    def _is_here(self, saved: SavedSet) -> bool:
        return all(
            (self._folder / file).is_file() and sha256_of_file(self._folder / file) == about["sha256"]
            for file, about in saved.files.items()
        )

    def _bring(self, saved: SavedSet) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        staged = self._folder / f".{saved.name}.{secrets.token_hex(4)}.tmp"
        staged.mkdir()
        try:
            for file, about in saved.files.items():
                if "/" in file or not self._store.fetch(f"{saved.prefix}/{file}", staged / file):
                    return False
                if (staged / file).stat().st_size != about["bytes"] or sha256_of_file(staged / file) != about[
                    "sha256"
                ]:
                    return False
            for file in sorted(saved.files, key=lambda file: file.endswith(".index")):
                (staged / file).replace(self._folder / file)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return True

    def _name_all(self, names: list[str]) -> None:
        """The file by which TensorFlow finds checkpoints, oldest first."""
        lines = [
            f'model_checkpoint_path: "{names[-1]}"',
            *(f'all_model_checkpoint_paths: "{n}"' for n in names),
        ]
        write_bytes(self._folder / "checkpoint", ("\n".join(lines) + "\n").encode())
