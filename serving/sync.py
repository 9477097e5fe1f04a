"""Copies published versions from an object store to a volume, whole or not at all: python -m serving.sync --help.

    python -m serving.sync --source s3://models/prod --target /models --once          before the server starts
    python -m serving.sync --source s3://models/prod --target /models --interval 10   beside it

TensorFlow Serving can't read S3. This runs beside it: a version comes into a hidden folder, every digest of its
manifest is checked, and one rename shows it. The servers' config is replaced last, and only by one whose versions
are all here. Versions that are gone from the store go from the volume too, unless a config names them. Killed at
any point, the next pass cleans up and goes on.

<source>/models/<name>/<version>/...   as serving.release.mirror writes it; without a manifest it is not there yet
<source>/models.config
<target>/<name>/<version>/...          what servers load
<target>/models.config
<target>/.synced                       when the last pass ended, for probes
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid, ExportInvalid, ServerUnavailable, ServingError
from serving.files import fsync_path, locked, write_atomic
from serving.names import check_name
from serving.release.exported import GOLDEN, MANIFEST, Export

__all__ = ["Passed", "Sync", "main"]

log = logging.getLogger(__name__)

CONFIG, SYNCED = "models.config", ".synced"
_COPYING, _TRASH = ".sync-", ".trash-"
_LOCK_WAIT_S = 600.0


@dataclass
class Passed:
    """What one pass did: versions copied and removed, and what it could not do yet, in words."""

    copied: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Sync:
    """Brings one volume to what an object store (any URL of fsspec) holds; one at a time per volume."""

    def __init__(self, source: str, target: Path | str, *, now: Callable[[], float] = time.time) -> None:
        self.source = source.rstrip("/")
        self.target = Path(target)
        self._now = now

    def once(self) -> Passed:
        """One pass; raises ServerUnavailable where the store can't be listed. A version that fails is a problem
        of its own, and the others come all the same."""
        import fsspec

        self.target.mkdir(parents=True, exist_ok=True)
        passed = Passed()
        with locked(self.target / ".sync.lock", _LOCK_WAIT_S):
            self._clean()
            try:
                files, root = fsspec.core.url_to_fs(self.source)
                files.invalidate_cache()
                there = _versions(files, f"{root}/models")
                config = files.cat_file(f"{root}/{CONFIG}") if files.exists(f"{root}/{CONFIG}") else None
            except (OSError, ValueError) as e:
                raise ServerUnavailable(
                    f"{self.source} can't be read: {e}", hint="the next pass tries again"
                ) from e
            for name, versions in sorted(there.items()):
                for version in versions:
                    self._bring(files, f"{root}/models/{name}/{version}", name, version, passed)
            # Until the next pass the versions of the config before stay too: the server may not have read the new one.
            before = (self.target / CONFIG).read_bytes() if (self.target / CONFIG).exists() else None
            self._take_config(config, passed)
            self._remove(there, (config, before), passed)
            done = {
                "at": self._now(),
                "copied": passed.copied,
                "removed": passed.removed,
                "problems": passed.problems,
            }
            write_atomic(self.target / SYNCED, json.dumps(done).encode())
        return passed

    def _clean(self) -> None:
        """Remove what a pass that was killed left; the lock says that nobody is still at it."""
        for left in (*self.target.glob(f"*/{_COPYING}*"), *self.target.glob(f"*/{_TRASH}*")):
            shutil.rmtree(left)
        for left in self.target.glob(".*.tmp"):
            left.unlink()

    def _bring(self, files: Any, source: str, name: str, version: int, passed: Passed) -> None:
        final = self.target / name / str(version)
        try:
            if final.exists():
                if files.cat_file(f"{source}/{MANIFEST}") != (final / MANIFEST).read_bytes():
                    passed.problems.append(
                        f"version {version} of {name} is another one in the store than here"
                    )
                return
            self._copy(files, source, final)
        except (ServingError, OSError, ValueError) as e:
            passed.problems.append(f"version {version} of {name}: {e}")
            log.warning("version %d of %s is not here yet: %s", version, name, e)
            return
        passed.copied.append(f"{name}/{version}")
        log.info("version %d of %s is here", version, name)

    def _copy(self, files: Any, source: str, final: Path) -> None:
        copying = final.parent / f"{_COPYING}{final.name}-{secrets.token_hex(4)}"
        try:
            copying.mkdir(parents=True)
            (copying / MANIFEST).write_bytes(files.cat_file(f"{source}/{MANIFEST}"))
            export = Export.load(copying)  # and no path in it leads out of the folder
            names = {file.path for file in export.files}
            if files.exists(f"{source}/{GOLDEN}"):
                names.add(GOLDEN)
            for path in sorted(names):
                (copying / path).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(f"{source}/{path}", str(copying / path))
            export.verify()
            for path in sorted(copying.rglob("*"), reverse=True):
                fsync_path(path)
            fsync_path(copying)
            copying.rename(final)
            fsync_path(final.parent)
        except FileNotFoundError as e:
            raise ExportInvalid(f"{source} is not whole: {e}", hint="it may be just being removed") from e
        finally:
            if copying.exists():
                shutil.rmtree(copying)

    def _take_config(self, content: bytes | None, passed: Passed) -> None:
        here = self.target / CONFIG
        if content is None:
            if not here.exists():  # servers want a file to start with, before the first release too
                write_atomic(here, b"model_config_list {\n}\n")
            return
        try:
            wanted = _named(content)
        except ConfigInvalid as e:
            passed.problems.append(f"{CONFIG}: {e}")
            return
        absent = [f"{n}/{v}" for n, vs in sorted(wanted.items()) for v in sorted(vs) if not self._has(n, v)]
        if absent:
            passed.problems.append(f"{CONFIG} waits for {', '.join(absent)}")
        elif not here.exists() or here.read_bytes() != content:
            write_atomic(here, content)
            log.info("the config names %s", {name: sorted(versions) for name, versions in wanted.items()})

    def _has(self, name: str, version: int) -> bool:
        return (self.target / name / str(version)).is_dir()

    def _remove(self, there: dict[str, list[int]], configs: Sequence[bytes | None], passed: Passed) -> None:
        try:
            held = [_named(content) for content in configs if content]
        except ConfigInvalid:
            return  # nobody knows what is held
        for folder in sorted(path for path in self.target.iterdir() if path.is_dir()):
            name = folder.name
            versions = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            gone = [
                v
                for v in versions
                if v not in there.get(name, ()) and not any(v in h.get(name, ()) for h in held)
            ]
            if not held and gone == versions:
                continue  # an empty listing and no config: rather a wrong bucket than a wish to serve nothing
            for version in gone:
                trash = folder / f"{_TRASH}{version}-{secrets.token_hex(4)}"
                (folder / str(version)).rename(trash)
                shutil.rmtree(trash)
                passed.removed.append(f"{name}/{version}")
                log.info("version %d of %s is removed", version, name)


def _versions(files: Any, root: str) -> dict[str, list[int]]:
    """Whole versions by model: those that have a manifest."""
    found: dict[str, list[int]] = {}
    for folder in files.ls(root, detail=False) if files.exists(root) else ():
        name = folder.rstrip("/").rsplit("/", 1)[-1]
        try:
            check_name(name)
        except ConfigInvalid as e:
            log.warning("%s is left out: %s", folder, e)
            continue
        for path in files.ls(folder, detail=False):
            number = path.rstrip("/").rsplit("/", 1)[-1]
            if number.isascii() and number.isdigit() and files.exists(f"{path.rstrip('/')}/{MANIFEST}"):
                found.setdefault(name, []).append(int(number))
    return {name: sorted(versions) for name, versions in found.items()}


def _named(config: bytes) -> dict[str, set[int]]:
    """Versions by model that a config names; raises ConfigInvalid."""
    from serving.tfserving.config import parse_config

    try:
        text = config.decode()
    except UnicodeDecodeError as e:
        raise ConfigInvalid(f"the config is not text: {e}") from e
    return {
        model.name: {*model.model_version_policy.specific.versions, *model.version_labels.values()}
        for model in parse_config(text).model_config_list.config
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m serving.sync", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", required=True, help="URL of the store, as s3://bucket/prefix")
    parser.add_argument("--target", required=True, type=Path, help="the volume's folder")
    parser.add_argument("--once", action="store_true", help="one pass that must succeed, then end")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two passes")
    parser.add_argument("--timeout", type=float, default=300.0, help="with --once: seconds to try for")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT, or once; 1 when --once could not bring everything in time."""
    given = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sync = Sync(given.source, given.target)
    deadline = time.monotonic() + given.timeout
    while not stop.is_set():
        try:
            problems = sync.once().problems
        except ServingError as e:
            problems = [str(e)]
            log.warning("%s", e)
        if given.once and (not problems or time.monotonic() >= deadline):
            for problem in problems:
                log.error("%s", problem)
            return 1 if problems else 0
        stop.wait(given.interval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
