"""Fetching a model from where it lies: a folder, a file, a URL, an archive; whole, within limits, and safely.

An archive is taken apart member by member: names that lead out of the folder, links, devices and names that come
twice are refused, and so is what grows beyond the limits while it is unpacked, whatever its headers say.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from serving.errors import ConfigInvalid, ExportInvalid, ServerUnavailable

__all__ = ["Limits", "fetch", "find_model"]

_CHUNK = 1 << 20
_GRAPH = "saved_model.pb"


@dataclass(frozen=True)
class Limits:
    """What a model may take up on its way in."""

    bytes: int = 8 << 30
    files: int = 10_000

    def __post_init__(self) -> None:
        if self.bytes < 1 or self.files < 1:
            raise ConfigInvalid(f"limits must be 1 or more, got {self.bytes} bytes, {self.files} files")


class _Budget:
    """Counts down while files are written; raises ExportInvalid at the limit."""

    def __init__(self, limits: Limits, source: str) -> None:
        self._limits, self._source = limits, source
        self._bytes, self._files = limits.bytes, limits.files

    def write(self, folder: Path, name: str, content: IO[bytes]) -> None:
        """Copy a stream to a file of the folder, by its checked name."""
        self._files -= 1
        if self._files < 0:
            raise ExportInvalid(f"{self._source} has more than {self._limits.files} files")
        path = folder / _safe(name, self._source)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                while chunk := content.read(min(_CHUNK, self._bytes + 1)):
                    self._bytes -= len(chunk)
                    if self._bytes < 0:
                        raise ExportInvalid(
                            f"{self._source} is larger than {self._limits.bytes} bytes",
                            hint="raise the limit with --max-bytes if it is what you think it is",
                        )
                    file.write(chunk)
        except FileExistsError as e:
            raise ExportInvalid(f"{self._source} holds {name!r} twice") from e


def _safe(name: str, source: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ExportInvalid(f"{source} holds a file that would lie outside of its folder: {name!r}")
    return path


def fetch(source: str, folder: Path, limits: Limits | None = None) -> Path:
    """Bring what lies at `source` into the empty `folder`; the folder within it that holds the SavedModel.

    `source` is a path or a URL that fsspec knows ("s3://bucket/model", "https://host/model.tar.gz"); of a folder, or
    of a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip. Raises ExportInvalid, ConfigInvalid, ServerUnavailable.
    """
    limits = limits or Limits()
    budget = _Budget(limits, source)
    content = folder / "content"
    content.mkdir()
    if "://" in source and not source.startswith("file://"):
        archive = _download(source, folder, content, budget)
    else:
        path = Path(source.removeprefix("file://")).expanduser()
        if not path.exists():
            raise ConfigInvalid(f"there is nothing at {path}", hint="give a folder, a URL or an archive")
        archive = None if path.is_dir() else path
        if archive is None:
            _copy_folder(path, content, budget)
    if archive is not None:
        _unpack(archive, content, _Budget(limits, source), source)
    return find_model(content, source)


def find_model(folder: Path, source: str) -> Path:
    """The one folder that holds saved_model.pb: this one, or one below it."""
    found = sorted(path.parent for path in folder.rglob(_GRAPH))
    if len(found) == 1:
        return found[0]
    if not found:
        hint = "export it with tf.saved_model.save or model.export(); .keras and .h5 files are not served"
        raise ExportInvalid(f"{source} holds no {_GRAPH}, so it is no SavedModel", hint=hint)
    names = ", ".join(path.relative_to(folder).as_posix() for path in found[:5])
    raise ExportInvalid(f"{source} holds {len(found)} SavedModels ({names})", hint="name the folder of one")


def _copy_folder(source: Path, target: Path, budget: _Budget) -> None:
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_symlink():
            raise ExportInvalid(f"{path} is a link", hint="copy the file itself into the model's folder")
        if path.is_file():
            with path.open("rb") as file:
                budget.write(target, name, file)
        elif not path.is_dir():
            raise ExportInvalid(f"{path} is neither a file nor a folder")


def _download(url: str, folder: Path, content: Path, budget: _Budget) -> Path | None:
    """Copy a folder of a store into `content`, or an archive into `folder`: then its path."""
    if "::" in url:
        raise ConfigInvalid(
            f"a model's URL must not be a chain, got {url!r}", hint="give the archive's own URL"
        )
    import fsspec.core

    try:
        fs, path = fsspec.core.url_to_fs(url)
        if not fs.isdir(path):
            with fs.open(path, "rb") as file:
                budget.write(folder, "archive", file)
            return folder / "archive"
        root = str(path).rstrip("/")
        for name in sorted(fs.find(path)):
            with fs.open(name, "rb") as file:
                budget.write(content, str(name).removeprefix(root).lstrip("/"), file)
        return None
    except (ImportError, ValueError) as e:  # a protocol that is not known, or whose package is not there
        raise ConfigInvalid(f"{url} can't be read: {e}") from e
    except FileNotFoundError as e:
        raise ConfigInvalid(f"there is nothing at {url}") from e
    except OSError as e:
        raise ServerUnavailable(
            f"{url} can't be read: {e}", hint="check the network and the credentials"
        ) from e
    except Exception as e:
        # Each store has errors of its own (aiohttp's, botocore's), which share no base.
        if type(e).__module__.partition(".")[0] in ("aiohttp", "botocore", "aiobotocore", "gcsfs", "s3fs"):
            raise ServerUnavailable(f"{url} can't be read: {type(e).__name__}: {e}") from e
        raise


def _unpack(archive: Path, target: Path, budget: _Budget, source: str) -> None:
    try:
        members = _zipped(archive, source) if zipfile.is_zipfile(archive) else _tarred(archive, source)
        with closing(members):
            for name, content in members:
                with content:
                    budget.write(target, name, content)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as e:
        raise ExportInvalid(
            f"{source} can't be unpacked: {e}", hint="give a .tar.gz or .zip of a SavedModel's folder"
        ) from e
    except ImportError:
        raise
    except Exception as e:
        # Decompressors raise errors of their own (zlib.error, lzma.LZMAError).
        if type(e).__name__ in ("error", "LZMAError"):
            raise ExportInvalid(f"{source} can't be unpacked: {e}") from e
        raise


def _zipped(archive: Path, source: str) -> Iterator[tuple[str, Any]]:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            kind = (member.external_attr >> 16) & 0o170000
            if kind not in (0, 0o100000, 0o040000):
                raise ExportInvalid(f"{source} holds {member.filename!r}, which is a link or a device")
            if not member.is_dir():
                yield member.filename, opened.open(member)
            else:
                _safe(member.filename, source)


def _tarred(archive: Path, source: str) -> Iterator[tuple[str, Any]]:
    with tarfile.open(archive, "r|*") as opened:
        for member in opened:
            if member.isdir():
                if member.name not in (".", "./"):
                    _safe(member.name, source)
                continue
            if not member.isreg():
                raise ExportInvalid(f"{source} holds {member.name!r}, which is a link or a device")
            content = opened.extractfile(member)
            assert content is not None
            yield member.name.removeprefix("./"), content
