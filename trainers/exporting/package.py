"""An export folder: files staged beside it, digested, described by export.json, and published in one rename.

Standard library only. The digest is SHA-256 over a line "PATH SHA256" a file, sorted by path; export.json itself,
which is written last and holds it, is not in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, sha256_of_file, sync_path, write_json

__all__ = [
    "FORMAT",
    "GOLDEN",
    "MANIFEST",
    "checkpoint_id",
    "code",
    "code_version",
    "complete",
    "describe",
    "packages",
    "staged",
]

FORMAT = 1
MANIFEST = "export.json"
GOLDEN = "golden.json"
_COMMIT = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})(-dirty)?")
_ABANDONED_S = 3600.0  # nobody stages for so long without touching the folder


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder to write into; when all went well it is made durable and becomes `target`, else it is removed.

    What was at `target` is replaced: it moves aside first, so that a reader finds the old folder, none, or the
    new one, and never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    folder = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    folder.mkdir()
    try:
        yield folder
        _make_durable(folder)
        old = folder.with_name(folder.name + ".old")
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        folder.rename(target)
        sync_path(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what exports that were killed have left."""
    for path in target.parent.glob(f".{target.name}.*.tmp*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def _digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    lines = "".join(f"{path} {files[path]['sha256']}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def describe(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write export.json: `facts` with the format, every file's bytes and SHA-256, their digest and total bytes."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    total = sum(int(file["bytes"]) for file in files.values())
    manifest = {"format": FORMAT, "files": files, "digest": _digest(files), "bytes": total, **facts}
    write_json(folder / MANIFEST, manifest)
    return manifest


def complete(folder: Path) -> dict[str, Any] | None:
    """The manifest of an export folder whose files are all as it says, or None."""
    try:
        manifest = read_json(folder / MANIFEST)
        if not manifest or manifest["format"] != FORMAT or manifest["digest"] != _digest(manifest["files"]):
            return None
        for name, file in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != file["bytes"] or sha256_of_file(path) != file["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # cut, changed or of another make: it is written anew
    result: dict[str, Any] = manifest
    return result


def checkpoint_id(job: Path) -> str:
    """What tells the trained weights of a job from others without reading them; "" for a job with none.

    TensorFlow's index files hold a checksum of every tensor, so a digest over them is one over the weights.
    """
    digest = hashlib.sha256()
    found = sorted(job.glob("checkpoints/**/*.index"))
    for path in found:
        digest.update(f"{path.relative_to(job).as_posix()} {sha256_of_file(path)}\n".encode())
    return digest.hexdigest() if found else ""


def code_version() -> str:
    """The version of the code: TRAINYARD_CODE_VERSION (images set it), the git commit, or the package's version.

    A commit is 40 hex digits, with "-dirty" behind it where files differ from it.
    """
    return str(code()["version"])


def code() -> dict[str, Any]:
    """The deployed code: {"version", "commit", "dirty", "source"}; commit and dirty are None where nobody knows.

    `source` says who told: "environment" (TRAINYARD_CODE_VERSION, which an image sets from the label
    org.opencontainers.image.revision), "git" (the checkout that this runs from) or "package".
    """
    said = os.environ.get("TRAINYARD_CODE_VERSION", "")
    if said:
        return _code(said, "environment")
    root = Path(__file__).parents[2]
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return _code(run.stdout.strip(), "git")
        except (OSError, subprocess.SubprocessError):
            pass  # a repository of another owner, a broken one: the package's version is known in any case
    try:
        return _code(metadata.version("trainyard"), "package")
    except metadata.PackageNotFoundError:
        return _code("unknown", "package")


def _code(version: str, source: str) -> dict[str, Any]:
    found = _COMMIT.fullmatch(version)
    commit, dirty = (found[1], bool(found[2])) if found else (None, None)
    return {"version": version, "commit": commit, "dirty": dirty, "source": source}


def packages() -> dict[str, str]:
    """Versions of what the model was made with: Python, and those of the packages that are there."""
    found = {"python": platform.python_version()}
    for name in ("trainyard", "tensorflow", "keras", "numpy", "tensorflow-serving-api"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
