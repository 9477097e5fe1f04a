"""Published versions and the servers' config in an object store, for servers that sync from there.

    <uri>/models/<name>/<version>/...     saved_model.pb last but one, the manifest last
    <uri>/models.config

An object store has no rename: what tells a whole version is its manifest, which comes last. `serving.sync` takes
nothing without one; TensorFlow Serving on Google's store, which needs no sync, finds `saved_model.pb` only when
all else is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serving.errors import ReleaseConflict, ServerUnavailable
from serving.release.exported import MANIFEST, Export
from serving.release.store import ReleaseStore

__all__ = ["mirror_file", "mirror_version", "remove_versions"]

log = logging.getLogger(__name__)


def mirror_version(storage: Path | str, name: str, version: int, uri: str) -> str:
    """Copy a published version to `uri`/models, and return its URI; does nothing where it is there already.

    Raises ReleaseConflict where another export has that number there, ServerUnavailable where the store fails.
    """
    export = Export.load(ReleaseStore(storage, name).path(version))
    target = f"{uri.rstrip('/')}/models/{name}/{version}"
    try:
        files, root = _open(target)
        manifest = f"{root}/{MANIFEST}"
        if files.exists(manifest):
            if files.cat_file(manifest) != (export.folder / MANIFEST).read_bytes():
                raise ReleaseConflict(
                    f"{target} holds another export", hint="give each storage root a store of its own"
                )
            return target
        for path in _in_order(export.folder):
            files.put_file(str(export.folder / path), f"{root}/{path}")
            if files.size(f"{root}/{path}") != (export.folder / path).stat().st_size:
                raise ServerUnavailable(f"{target}/{path} did not arrive whole", hint="try again")
    except OSError as e:
        raise ServerUnavailable(f"{target} can't be written: {e}", hint="is the object store there?") from e
    log.info("version %d of %s is at %s", version, name, target)
    return target


def _in_order(folder: Path) -> list[str]:
    """A version's files, those that tell that it is whole at the end."""
    last = {"saved_model.pb": 1, MANIFEST: 2}
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(paths, key=lambda path: (last.get(path, 0), path))


def remove_versions(name: str, versions: Iterable[int], uri: str) -> None:
    """Remove versions from the store, the manifest first, so that nobody begins to copy one."""
    for version in versions:
        target = f"{uri.rstrip('/')}/models/{name}/{version}"
        try:
            files, root = _open(target)
            for path in (f"{root}/{MANIFEST}", root):
                if files.exists(path):
                    files.rm(path, recursive=path == root)
        except OSError as e:  # it costs room and nothing else
            log.warning("%s can't be removed: %s", target, e)


def mirror_file(path: Path | str, uri: str) -> None:
    """Copy one file; object stores replace it as a whole."""
    try:
        files, target = _open(uri)
        files.pipe_file(target, Path(path).read_bytes())
    except OSError as e:
        raise ServerUnavailable(f"{uri} can't be written: {e}", hint="is the object store there?") from e


def _open(uri: str) -> tuple[Any, str]:
    import fsspec

    files, path = fsspec.core.url_to_fs(uri)
    files.invalidate_cache()
    if "file" in files.protocol:
        files.auto_mkdir = True
    return files, path.rstrip("/")
