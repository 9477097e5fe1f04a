"""Lineage both ways: raw data -> records -> job and run -> registered version -> release, and back.

Read from the files of the storage root alone: the release store's record of every version (which keeps what
export.json said of its origin, and outlives the version's files), the promotion log, and what is still there of
jobs and records. MLflow is not asked; its ids are in the records where it was there.

Things are known by digest. A folder that was moved is found again by its digest under the storage root; one that is
gone is said to be gone, with what is still known of it. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.errors import ReleaseNotFound
from serving.release.store import ReleaseStore

__all__ = ["Lineage", "Target", "came_from", "lineage_of", "models"]

_TARGET = re.compile(r"(?P<name>[^@/]+)(?:@(?P<alias>[A-Za-z_-]+)|/(?P<version>[0-9]+))?")
_SHORTEST = 6  # hex digits that name a digest
_EXPORT = "export.json"


@dataclass(frozen=True)
class Target:
    """A version as people name it: NAME (the champion, or else the newest), NAME@ALIAS, NAME/VERSION."""

    name: str
    alias: str = ""
    version: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read one; ReleaseNotFound when it is none."""
        found = _TARGET.fullmatch(text)
        if found is None:
            raise ReleaseNotFound(
                f"{text!r} names no version of a model", hint="write NAME, NAME@champion or NAME/7"
            )
        version = found["version"]
        return cls(found["name"], found["alias"] or "", None if version is None else int(version))


@dataclass(frozen=True)
class Lineage:
    """Where one version comes from and what became of it; values of JSON throughout.

    `state` is "published", "removed" (by pruning; its record stays) or "reserved" (never made visible); `roles` are
    champion, previous and challenger, as the promotion log has them. `job` and `records` have "present": whether
    they are still there, and "found" where. A part that nothing is known of is {}.
    """

    name: str
    version: int
    state: str
    when: str
    digest: str
    bytes: int | None
    roles: tuple[str, ...]
    registered: Mapping[str, Any]
    code: Mapping[str, Any]
    job: Mapping[str, Any]
    records: Mapping[str, Any]
    releases: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...] = field(default=())

    @property
    def serves(self) -> bool:
        """Whether this is what serves now."""
        return "champion" in self.roles

    def to_json(self) -> dict[str, Any]:
        """The lineage as JSON values."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        out.update(roles=list(self.roles), releases=list(self.releases), remarks=list(self.remarks))
        return {**out, "serves": self.serves}


def models(storage: Path | str) -> list[str]:
    """Names of all models that were ever released, sorted."""
    return sorted(path.name for path in (Path(storage) / "releases").glob("*") if path.is_dir())


def lineage_of(storage: Path | str, target: str) -> Lineage:
    """The lineage of a version, named as `Target` says; ReleaseNotFound."""
    storage, wanted = Path(storage), Target.parse(target)
    known = models(storage)
    if wanted.name not in known:
        raise ReleaseNotFound(
            f"there is no model {wanted.name!r}", hint=f"there are: {', '.join(known) or 'none yet'}"
        )
    store = ReleaseStore(storage, wanted.name)
    return _lineage(storage, store, _version(store, wanted), _Index(storage))


def came_from(storage: Path | str, *, records: str = "", raw: str = "") -> list[Lineage]:
    """All versions of all models that came from records or raw data, newest first within a model.

    `records` is a digest or its first 6 digits or more, or the path of a dataset or its manifest; a window of spans
    came from each of its spans. `raw` is a URI or path, of the source, of a folder above it or of a file within it,
    or a digest of its content.
    """
    storage = Path(storage)
    index = _Index(storage)
    digest = _digest_of(records) if records else ""
    found = []
    for name in models(storage):
        store = ReleaseStore(storage, name)
        for version in reversed(store.versions()):
            lineage = _lineage(storage, store, version, index)
            if digest and not any(d.startswith(digest) for d in _digests(lineage.records)):
                continue
            if raw and not any(_same_data(raw, source) for source in _raw(lineage.records)):
                continue
            found.append(lineage)
    return found


# ---- one version


def _version(store: ReleaseStore, wanted: Target) -> int:
    if wanted.version is not None:
        store.record(wanted.version)  # raises ReleaseNotFound, with those that there are
        return wanted.version
    roles = _roles(store)
    if wanted.alias:
        for version, names in roles.items():
            if wanted.alias in names:
                return version
        there = ", ".join(sorted({name for names in roles.values() for name in names}))
        raise ReleaseNotFound(
            f"{store.name} has no {wanted.alias}", hint=f"it has: {there or 'no promoted version yet'}"
        )
    champion = next((version for version, names in roles.items() if "champion" in names), None)
    versions = store.versions()
    if champion is None and not versions:
        raise ReleaseNotFound(f"{store.name} has no version yet")
    return versions[-1] if champion is None else champion


def _roles(store: ReleaseStore) -> dict[int, list[str]]:
    """What each version is now, by the promotion log; the challenger is the newest one that came after the champion."""
    stack = store.log.champions()
    roles: dict[int, list[str]] = {}
    for role, place in (("champion", -1), ("previous", -2)):
        if len(stack) >= -place:
            roles.setdefault(stack[place], []).append(role)
    ever = {entry.version for entry in store.log.entries()}
    published = store.published()
    if published and published[-1] not in ever:
        roles.setdefault(published[-1], []).append("challenger")
    return roles


def _lineage(storage: Path, store: ReleaseStore, version: int, index: _Index) -> Lineage:
    record = store.record(version)
    kept = dict(record.get("export") or {})
    present = store.path(version).is_dir()
    manifest = _read(store.path(version) / _EXPORT) or {}
    told = {**kept, **{key: value for key, value in manifest.items() if value is not None}}
    origin = told.get("lineage") or {}
    state = "removed" if record.get("removed") else "published" if present else "reserved"
    remarks = []
    if record.get("published") and not present and not record.get("removed"):
        state = "removed"
        remarks.append(f"its files are gone from {store.path(version)}, though nothing has pruned them")
    if not origin:
        remarks.append("its export says nothing of its origin, only what is shown here is known")
    return Lineage(
        name=store.name,
        version=version,
        state=state,
        when=str(record.get("removed") or record.get("published") or record.get("reserved") or ""),
        digest=str(record.get("digest", "")),
        bytes=record.get("bytes"),
        roles=tuple(_roles(store).get(version, ())),
        registered=_registered(record, origin),
        code=told.get("code") or ({"version": told["code_version"]} if told.get("code_version") else {}),
        job=_job(storage, told, origin),
        records=_records(told, origin, index),
        releases=tuple(
            _entry(entry) for entry in store.log.entries() if version in (entry.version, entry.previous)
        ),
        remarks=tuple(remarks),
    )


def _registered(record: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in (origin.get("mlflow") or {}).items() if value}
    if record.get("mlflow_version") is not None:
        out["version"] = str(record["mlflow_version"])
    return out


def _entry(entry: Any) -> dict[str, Any]:
    gate = entry.gate or {}
    return {
        "what": entry.what,
        "version": entry.version,
        "previous": entry.previous,
        "when": entry.when,
        "by": entry.by,
        "why": entry.why,
        "gate": gate.get("outcome"),
    }


def _job(storage: Path, told: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    job = dict(origin.get("job") or {})
    folder = Path(str(job.get("folder") or told.get("job") or ""))
    if not folder.name:
        return {}
    job.setdefault("folder", str(folder))
    job.setdefault("name", f"{folder.parent.name}/{folder.name}")
    job.setdefault("trainer", told.get("trainer"))
    job.setdefault("step", told.get("step"))
    # Where it was, or at the same place under the root, should the root have moved.
    for place in (folder, storage / "jobs" / folder.parent.name / folder.name):
        if (place / "plan.json").is_file():
            return {**job, "present": True, "found": str(place)}
    return {**job, "present": False, "found": None}


def _records(told: Mapping[str, Any], origin: Mapping[str, Any], index: _Index) -> dict[str, Any]:
    records = dict(origin.get("records") or {})
    records.setdefault("digest", told.get("records_digest"))
    if not records["digest"]:
        return {}
    records = {**records, **index.place(records)}
    if "raw" not in records and records["present"]:  # an older export: the dataset itself still knows
        manifest = _read(Path(records["found"])) or {}
        records.setdefault("name", manifest.get("name"))
        records.setdefault("counts", manifest.get("counts"))
        raw = manifest.get("raw") or {}
        records["raw"] = [raw] if raw else [{"uri": uri} for uri in manifest.get("sources", ())]
    records.setdefault("raw", [])
    if records.get("spans"):
        records["spans"] = [{**span, **index.place(span)} for span in records["spans"]]
    records["raw"] = [_seen(source) for source in records["raw"]]
    return records


def _seen(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source with whether it is there; None for a pattern, and where that would need a network."""
    path = _local(str(source.get("uri", "")))
    if path is None or any(sign in str(path) for sign in "*?["):
        return {**source, "present": None}
    return {**source, "present": path.exists()}


class _Index:
    """Datasets under a storage root by digest, read once and only when something is not where it was."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._found: dict[str, Path] | None = None

    def place(self, dataset: Mapping[str, Any]) -> dict[str, Any]:
        """{"present", "found": manifest's path} of a dataset: where it was, or wherever its digest is now."""
        digest, was = str(dataset["digest"]), Path(str(dataset.get("manifest") or ""))
        if was.name and (_read(was) or {}).get("digest") == digest:
            return {"present": True, "found": str(was)}
        if self._found is None:
            self._found = {}
            for path in self._storage.glob("records/**/manifest.json"):
                self._found.setdefault(str((_read(path) or {}).get("digest")), path)
        now = self._found.get(digest)
        return {"present": now is not None, "found": None if now is None else str(now)}


# ---- back from data


def _digest_of(records: str) -> str:
    path = _local(records)
    if re.fullmatch(f"[0-9a-f]{{{_SHORTEST},64}}", records):
        return records
    for place in () if path is None else (path, path / "manifest.json"):
        found = _read(place) if place.is_file() else None
        if found and found.get("digest"):
            return str(found["digest"])
    raise ReleaseNotFound(
        f"{records} is neither a digest of records nor a dataset that is there",
        hint=f"give {_SHORTEST} digits or more of its digest, or the path of its folder or manifest",
    )


def _digests(records: Mapping[str, Any]) -> Iterator[str]:
    if records:
        yield str(records["digest"])
        for span in records.get("spans", ()):
            yield str(span["digest"])


def _raw(records: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from records.get("raw", ())
    for span in records.get("spans", ()):
        yield from span.get("raw", ())


def _same_data(wanted: str, source: Mapping[str, Any]) -> bool:
    digest = str(source.get("digest", ""))
    if digest and len(wanted) >= _SHORTEST and digest.startswith(wanted):
        return True
    one, other = _parts(wanted), _parts(str(source.get("uri", "")))
    shorter = min(len(one), len(other))
    # The same, a folder of it, or something in it; "/" alone is a part of everything and means nothing.
    return shorter > 1 and one[:shorter] == other[:shorter]


def _parts(uri: str) -> tuple[str, ...]:
    path = _local(uri)
    return path.parts if path is not None else tuple(uri.rstrip("/").split("/"))


def _local(uri: str) -> Path | None:
    """The path of a local URI, None for another."""
    if uri.startswith("file://"):
        return Path(uri.removeprefix("file://"))
    return None if "://" in uri or not uri else Path(uri).absolute()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
