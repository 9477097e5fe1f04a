"""Which files a source is: a file, a folder, or a path with wildcards, local or in a store.

Files come in the order of their names, so the same files are always read the same way. Hidden files are passed
over; links are followed, but not in circles. Local files are hashed; stores are asked for ETags and times.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from trainers.job.files import sha256_of_file
from trainers.records.errors import SourceChanged, SourceEmpty, SourceMissing, SourceUnreadable
from trainers.records.files import (
    COMPRESSED,
    SourceFile,
    filesystem,
    remote_errors,
    version_from,
    version_of,
)
from trainers.records.format import Format
from trainers.records.partitions import partition_values

__all__ = ["IMAGE_SUFFIXES", "SPEAK_EVERY", "TABLE_SUFFIXES", "list_files", "threads"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
TABLE_SUFFIXES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
_OTHER_SUFFIXES = {
    ".npy": "arrays",
    ".idx": "arrays",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".tfrec": "tfrecord",
}
_IDX = re.compile(r"(?i)[-.]idx[1-9]-u?byte$")  # the names of MNIST's files
_COMPRESSIBLE = ("csv", "jsonl", "arrays", "tfrecord")

SPEAK_EVERY = 5.0  # seconds between lines of progress


def threads() -> int:
    """Threads worth having for work that releases the interpreter's lock: the CPUs we may use, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))


def list_files(
    source: Path | str,
    progress: Callable[[str], None],
    format: Format | None = None,
    partitions: Mapping[str, Sequence[str]] | None = None,
) -> tuple[str, list[SourceFile]]:
    """What kind of files a source holds (one of format.KINDS), and the files with their versions.

    `partitions` keeps only files of some folders (`dt=2013-01`), as {"dt": ["2013-01"]}; every value must be
    there. Files of other kinds are counted aloud. Raises SourceMissing, SourceEmpty, SourceUnreachable, and
    SourceUnreadable when there is more than one kind.
    """
    format = format or Format()
    infos: dict[str, Any] = {}
    found = _find_remote(str(source), infos) if "://" in str(source) else _find_local(Path(source))
    kind, chosen, ignored = _of_one_kind(str(source), sorted(found, key=_folders_first), format)
    if ignored:
        progress(f"passed over {len(ignored)} files that are no data, such as {ignored[0]}")
    values: dict[str, tuple[tuple[str, Any], ...]] = {}
    if kind != "images" or partitions:
        values = partition_values(str(source), chosen, partitions or {})
        chosen = [name for name in chosen if name in values or (format.labels and name == format.labels)]
    files = _with_versions({name: found[name] for name in chosen}, infos, progress)
    return kind, [dataclasses.replace(file, partitions=values.get(file.name, ())) for file in files]


def _folders_first(name: str) -> list[str]:
    return name.split("/")


def _kind_of(name: str) -> str | None:
    path = PurePosixPath(name.lower())
    compressed = path.suffix in COMPRESSED
    path = path.with_suffix("") if compressed else path
    suffix = path.suffix
    if _IDX.search(path.name):
        return "arrays"
    if suffix in IMAGE_SUFFIXES:
        kind: str | None = "images"
    else:
        kind = TABLE_SUFFIXES.get(suffix) or _OTHER_SUFFIXES.get(suffix)
    return kind if not compressed or kind in _COMPRESSIBLE else None


def _of_one_kind(source: str, names: Sequence[str], format: Format) -> tuple[str, list[str], list[str]]:
    """The kind, the names of its files, and those passed over."""
    kinds: dict[str, list[str]] = {}
    ignored: list[str] = []
    known_alone = format.kind and not any(_kind_of(name) == format.kind for name in names)
    for name in names:
        kind = format.kind if known_alone else _kind_of(name)
        if format.labels and name == format.labels:
            kind = "images"
        if kind and (not format.kind or kind == format.kind):
            kinds.setdefault(kind, []).append(name)
        else:
            ignored.append(name)
    if not kinds:
        holds = f"only files such as {ignored[0]}" if ignored else "no file"
        known = ", ".join([*IMAGE_SUFFIXES, *TABLE_SUFFIXES, *_OTHER_SUFFIXES])
        raise SourceEmpty(f"{source} holds {holds}", hint=f"put files there that end in one of {known}")
    if len(kinds) > 1:
        examples = ", ".join(f"{kind} ({files[0]})" for kind, files in sorted(kinds.items()))
        raise SourceUnreadable(
            source,
            f"holds files of several kinds: {examples}",
            hint="name a folder that holds one kind, or give format.kind"
            + (", or format.labels if the table labels the pictures" if "images" in kinds else ""),
        )
    kind, chosen = next(iter(kinds.items()))
    return kind, chosen, ignored


# ------------------------------------------------------------------------------------------------------------
# Local


def _find_local(source: Path) -> dict[str, str]:
    """Name relative to the source -> path."""
    if source.is_file():
        paths, base = [source], source.parent
    elif source.is_dir():
        paths, base = list(_walk(source)), source
    elif glob.has_magic(str(source)):
        base = Path(*_fixed(source.parts))
        matches = [
            m for m in base.glob(str(source.relative_to(base))) if not _hidden(m.relative_to(base).parts)
        ]
        paths = [p for match in matches for p in (_walk(match) if match.is_dir() else [match])]
        paths = list(dict.fromkeys(paths))
        if not paths:
            raise SourceMissing(f"no file matches {source}", hint="check the pattern, and that it is mounted")
    else:
        raise SourceMissing(
            f"no such file or folder: {source}", hint="check the path, and that it is mounted"
        )
    base = Path(*_above_partitions(base.parts))
    return {path.relative_to(base).as_posix(): str(path) for path in paths}


def _hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def _fixed(parts: Sequence[str]) -> list[str]:
    """The parts of a pattern before its first wildcard."""
    at = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return list(parts[:at])


def _above_partitions(parts: Sequence[str]) -> list[str]:
    """A folder whose last parts are partitions begins above them: .../dt=2013-01 holds rows of that dt."""
    out = list(parts)
    while len(out) > 1 and "=" in out[-1]:
        out.pop()
    return out


def _walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    except OSError as e:
        raise SourceUnreadable(
            str(folder), f"can't be read: {e.strerror}", hint="check its owner and mode"
        ) from e
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise SourceUnreadable(str(folder), "is a link to a folder above it", hint="remove the link")
    for name, is_folder in sorted(found):
        if is_folder:
            yield from _walk(folder / name, (*above, here))
        else:
            yield folder / name


def _with_versions(
    found: Mapping[str, str], infos: Mapping[str, Any], progress: Callable[[str], None]
) -> list[SourceFile]:
    def look(item: tuple[str, str]) -> SourceFile:
        name, location = item
        if "://" in location:
            return SourceFile(location, name, *_remote(location, infos.get(name)))
        return _local(name, Path(location))

    files: list[SourceFile] = []
    spoken = time.monotonic()
    with ThreadPoolExecutor(threads()) as pool:
        for file in pool.map(look, found.items()):
            files.append(file)
            if time.monotonic() - spoken >= SPEAK_EVERY:
                spoken = time.monotonic()
                done = sum(f.size for f in files) / 1e6
                progress(f"looked at {len(files)} of {len(found)} files, {done:,.0f} MB")
    return files


def _local(name: str, path: Path) -> SourceFile:
    try:
        before = path.stat()
        digest = sha256_of_file(path)
    except FileNotFoundError as e:
        if path.is_symlink():
            raise SourceUnreadable(
                str(path), "is a link to a file that isn't there", hint="remove the link"
            ) from e
        raise SourceChanged(str(path), "went away") from e
    except OSError as e:
        raise SourceUnreadable(
            str(path), f"can't be read: {e.strerror}", hint="check its owner and mode"
        ) from e
    file = SourceFile(str(path), name, before.st_size, before.st_mtime_ns, digest)
    file.check_unchanged()
    return file


# ------------------------------------------------------------------------------------------------------------
# Stores


def _find_remote(source: str, infos: dict[str, Any]) -> dict[str, str]:
    """Name relative to the source -> URL; what the store says of each goes into `infos`."""
    with remote_errors(source):
        fs, path = filesystem(source)
        if source.startswith(("http://", "https://")):
            # Web servers list no folders that one could rely on: a URL is one file.
            return {PurePosixPath(path.partition("?")[0]).name: source}
        fs.invalidate_cache()
        path = path.rstrip("/")
        if glob.has_magic(path):
            base = "/".join(_fixed(path.split("/")))
            listed = fs.glob(path, detail=True)
        elif fs.isfile(path):
            base, listed = path.rpartition("/")[0], {path: fs.info(path)}
        else:
            base, listed = path, fs.find(path, detail=True)
    listed = {name: info for name, info in listed.items() if info["type"] == "file"}
    if not listed:
        raise SourceMissing(f"no such file or folder: {source}", hint="check the URL")
    base = "/".join(_above_partitions(base.split("/"))) if base else base
    names = {name: name[len(base) :].lstrip("/") for name in listed}
    infos.update({names[name]: info for name, info in listed.items()})
    urls = {names[name]: fs.unstrip_protocol(name) for name in listed}
    return {name: url for name, url in urls.items() if not _hidden(name.split("/"))}


def _remote(location: str, info: Mapping[str, Any] | None) -> tuple[int, int, str]:
    """Size, no time, and version."""
    size, version = version_of(location) if info is None else version_from(location, info)
    return size, 0, version
