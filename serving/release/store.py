"""The release store: version numbers, published versions, the champion.

Every operation may be killed at any point and run again: the next run finishes or cleans up. Servers see a
version whole or not at all, since it appears by one rename on its own file system.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from serving.errors import ExportInvalid, ReleaseConflict, ReleaseNotFound
from serving.files import create_exclusive, fsync_path, locked, write_atomic
from serving.names import check_name
from serving.release.exported import GOLDEN, MANIFEST, Export, ExportedFile
from serving.release.promotions import DELETE, PROMOTE, REJECT, ROLLBACK, Promotion, PromotionLog

__all__ = ["ReleaseStore"]

log = logging.getLogger(__name__)

# What a version's record keeps of its export's manifest, which goes when the version is pruned.
_KEPT = ("job", "run_id", "trainer", "code_version", "code", "records_digest", "created", "step", "lineage")
_STAGING, _TRASH = ".staging-", ".trash-"
_CHUNK = 1 << 20


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class ReleaseStore:
    """Releases of one model under a storage root.

    `lock_wait_s` bounds the wait for another process that works on the same model (StoreBusy after it).
    """

    def __init__(
        self,
        storage: Path | str,
        name: str,
        *,
        lock_wait_s: float = 120.0,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self.name = check_name(name)
        self.models = Path(storage) / "models" / name
        self.releases = Path(storage) / "releases" / name
        self.log = PromotionLog(self.releases / "promotion.jsonl")
        self._records = self.releases / "versions"
        self._lock_wait_s = lock_wait_s
        self._now = now

    # ---- numbers

    def reserve(self, digest: str, hint: int | None = None) -> int:
        """The version number of an export digest; the same digest gets the same number, unless it was pruned.

        A new digest gets `hint` (the registry's version number) where it is larger than every number used
        so far, else the next one. Numbers are never used again, not even after `prune`.
        """
        with self._locked():
            used = self.versions()
            for version in used:
                record = self.record(version)
                if record.get("digest") == digest and not record.get("removed"):
                    return version
            highest = max([*used, *self.published()], default=0)
            version = hint if hint is not None and hint > highest else highest + 1
            while not create_exclusive(
                self._records / f"{version}.json",
                _json({"version": version, "digest": digest, "reserved": self._when()}),
            ):
                version += 1
            return version

    def versions(self) -> list[int]:
        """All numbers ever given, ascending."""
        return _numbers(self._records, ".json")

    def published(self) -> list[int]:
        """Versions that servers can load now, ascending."""
        return _numbers(self.models, "")

    def record(self, version: int) -> dict[str, Any]:
        """What is known of a number: digest, times, the export's job and run; raises ReleaseNotFound."""
        path = self._records / f"{version}.json"
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError as e:
            raise ReleaseNotFound(
                f"{self.name} has no version {version}", hint=f"known versions: {self.versions() or 'none'}"
            ) from e
        except ValueError:
            log.warning("%s is not whole, its number stays taken", path)
            return {"version": version}

    def path(self, version: int) -> Path:
        """Where servers find a version."""
        return self.models / str(version)

    # ---- publishing

    def publish(self, export_dir: Path | str, version: int, *, mlflow_version: str | None = None) -> Path:
        """Make an export visible to servers as a version, and return its path.

        Copies into a hidden folder of the same file system while checking every digest, syncs, renames. Does
        nothing where this export is published already. Raises ExportInvalid, ReleaseConflict.
        """
        export = Export.load(export_dir)
        with self._locked():
            record = self.record(version)
            if record.get("digest") != export.digest:
                raise ReleaseConflict(
                    f"version {version} of {self.name} is reserved for another export",
                    hint="reserve a number for this export's digest first",
                )
            if record.get("removed"):
                raise ReleaseConflict(f"version {version} of {self.name} was pruned on {record['removed']}")
            self._clean()
            final = self.path(version)
            if final.exists():
                if Export.load(final).digest != export.digest:
                    raise ReleaseConflict(f"{final} holds another export")
            else:
                staging = self.models / f"{_STAGING}{version}-{secrets.token_hex(4)}"
                _copy(export, staging)
                staging.rename(final)
                fsync_path(self.models)
            if not record.get("published"):
                record.update(
                    published=self._when(),
                    bytes=export.bytes,
                    mlflow_version=mlflow_version,
                    export={key: export.info.get(key) for key in _KEPT},
                )
                write_atomic(self._records / f"{version}.json", _json(record))
            return final

    def _clean(self) -> None:
        """Finish what killed runs left behind. Called with the lock, so nobody is still at it."""
        for left in self.models.glob(f"{_TRASH}*"):
            number = left.name.removeprefix(_TRASH).partition("-")[0]
            if number.isdigit():
                self._mark_removed(int(number))
        for left in (*self.models.glob(f"{_STAGING}*"), *self.models.glob(f"{_TRASH}*")):
            log.info("removing %s, left by a run that was killed", left)
            shutil.rmtree(left)
        for left in self._records.glob(".*.tmp"):
            left.unlink()

    # ---- champion

    def champion(self) -> dict[str, Any] | None:
        """The version that serves, with path and promotion; None before the first promotion."""
        entries = self.log.entries()
        stack = self.log.champions()
        if not stack:
            return None
        last = _last(entries, stack[-1])
        return {
            "name": self.name,
            "version": last.version,
            "path": str(self.path(last.version)),
            "digest": self.record(last.version).get("digest"),
            "mlflow_version": last.mlflow_version,
            "promoted": last.when,
            "by": last.by,
            "previous": stack[-2] if len(stack) > 1 else None,
        }

    def promote(
        self,
        version: int,
        *,
        by: str,
        why: str,
        gate: Mapping[str, Any] | None = None,
        mlflow_version: str | None = None,
        canary: Mapping[str, Any] | None = None,
    ) -> Promotion:
        """Make a published version the champion in the log; the same champion again writes nothing."""
        with self._locked():
            self._require_published(version)
            stack = self.log.champions()
            if stack and stack[-1] == version:
                return _last(self.log.entries(), version)
            known = mlflow_version or self.record(version).get("mlflow_version")
            previous = stack[-1] if stack else None
            entry = Promotion(version, self._when(), by, PROMOTE, why, gate, known, previous, canary)
            self.log.append(entry)
            return entry

    def rollback_target(self, to: int | None = None) -> int:
        """The version a rollback would go to; raises ReleaseNotFound."""
        stack = self.log.champions()
        if to is None:
            if len(stack) < 2:
                raise ReleaseNotFound(
                    f"{self.name} has no earlier champion to go back to",
                    hint="name a version to roll back to" if self.published() else "",
                )
            to = stack[-2]
        self._require_published(to)
        return to

    def rollback(self, *, by: str, why: str, to: int | None = None) -> Promotion:
        """Make an earlier champion (or version `to`) the champion again in the log."""
        with self._locked():
            stack = self.log.champions()
            version = self.rollback_target(to)
            if stack and stack[-1] == version:
                return _last(self.log.entries(), version)
            known = self.record(version).get("mlflow_version")
            previous = stack[-1] if stack else None
            entry = Promotion(version, self._when(), by, ROLLBACK, why, None, known, previous)
            self.log.append(entry)
            return entry

    def reject(self, version: int, *, by: str, why: str, canary: Mapping[str, Any]) -> Promotion:
        """Write into the log that a canary was taken back; once for one watch, known by its `started`."""
        with self._locked():
            for entry in self.log.entries():
                if (
                    entry.what == REJECT
                    and entry.version == version
                    and (entry.canary or {}).get("started") == canary.get("started")
                ):
                    return entry
            stack = self.log.champions()
            known = self.record(version).get("mlflow_version")
            champion = stack[-1] if stack else None
            entry = Promotion(version, self._when(), by, REJECT, why, None, known, champion, canary)
            self.log.append(entry)
            return entry

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep others from changing the champion (labels, log and aliases together) while inside."""
        with locked(self.releases / ".champion.lock", self._lock_wait_s):
            for left in self.releases.glob(".pending.json.*.tmp"):
                left.unlink(missing_ok=True)
            yield

    def _require_published(self, version: int) -> None:
        if not self.path(version).is_dir():
            raise ReleaseNotFound(
                f"version {version} of {self.name} is not published under {self.models}",
                hint=f"published versions: {self.published() or 'none'}",
            )

    # ---- room

    def prune(self, keep: int, protected: Iterable[int] = ()) -> list[int]:
        """Remove versions but the newest `keep`; returns those removed.

        The champion, the one before it and `protected` ones (those that labels, aliases or replicas hold)
        always stay; so do the records and the log.
        """
        if keep < 1:
            raise ReleaseConflict(f"keep must be 1 or more, got {keep}")
        with self._locked():
            self._clean()
            published = self.published()
            stay = {*published[-keep:], *self.log.champions()[-2:], *protected}
            removed = [version for version in published if version not in stay]
            for version in removed:
                self._remove(version)
            return removed

    def remove(self, version: int) -> None:
        """Remove one published version that is no champion and was none before it; its record stays."""
        with self._locked():
            self._clean()
            self._require_published(version)
            if version in self.log.champions()[-2:]:
                raise ReleaseConflict(
                    f"version {version} of {self.name} is the champion, or would be again by a rollback",
                    hint="promote another version first, or delete the whole model",
                )
            self._remove(version)

    def remove_all(self, *, by: str, why: str) -> list[int]:
        """Remove every published version, with an entry in the log, which stays as the records do."""
        with self._locked():
            self._clean()
            stack, published = self.log.champions(), self.published()
            if stack:
                # First of all: from here on nothing takes a version that goes away for the champion.
                self.log.append(Promotion(stack[-1], self._when(), by, DELETE, why))
            for version in published:
                self._remove(version)
            return published

    def _remove(self, version: int) -> None:
        trash = self.models / f"{_TRASH}{version}-{secrets.token_hex(4)}"
        self.path(version).rename(trash)  # away at once, whole, before its files go one by one
        self._mark_removed(version)
        shutil.rmtree(trash)

    def _mark_removed(self, version: int) -> None:
        if version in self.versions():
            record = self.record(version)
            if not record.get("removed"):
                write_atomic(self._records / f"{version}.json", _json({**record, "removed": self._when()}))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with locked(self.releases / ".lock", self._lock_wait_s):
            self._records.mkdir(parents=True, exist_ok=True)
            self.models.mkdir(parents=True, exist_ok=True)
            yield

    def _when(self) -> str:
        return self._now().astimezone(timezone.utc).isoformat(timespec="seconds")


def _last(entries: list[Promotion], version: int) -> Promotion:
    """The entry by which a champion became one."""
    return next(e for e in reversed(entries) if e.version == version and e.what in (PROMOTE, ROLLBACK))


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _numbers(folder: Path, suffix: str) -> list[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    stems = [name[: len(name) - len(suffix)] for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def _copy(export: Export, target: Path) -> None:
    """Copy an export's files durably; every byte written is a byte checked."""
    for file in export.files:
        _copy_file(export, file, target / file.path)
    listed = {file.path for file in export.files}
    for name in (MANIFEST, GOLDEN):
        source = export.folder / name
        if name not in listed and source.is_file():
            (target / name).write_bytes(source.read_bytes())
            fsync_path(target / name)
    for folder, _, _ in os.walk(target):
        fsync_path(Path(folder))


def _copy_file(export: Export, file: ExportedFile, target: Path) -> None:
    source = export.folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as read, target.open("xb") as write:
            while chunk := read.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                write.write(chunk)
            write.flush()
            os.fsync(write.fileno())
    except (FileNotFoundError, IsADirectoryError) as e:
        raise ExportInvalid(f"{source} can't be read: {e.strerror}", hint="run the export again") from e
    if digest.hexdigest() != file.sha256:
        raise ExportInvalid(
            f"{source} is not what its exporter wrote: {size} bytes for {file.bytes}, or other content",
            hint="run the export again",
        )
