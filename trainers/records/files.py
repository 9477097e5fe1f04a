# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""One file of raw data, on a local disk or in a store: open it, and tell whether it is still the one listed.

A file has a version: the SHA-256 of its bytes where it is local, what the store says of it (ETag, or size and
time of the last change) where it is not. A store that says neither gives its bytes once, into a temporary file,
and their SHA-256 is the version. Reading is by streams and ranges, so memory doesn't grow with files.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import dataclasses
import datetime
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
import fsspec.core
import pyarrow as pa

from trainers.records.errors import SourceChanged, SourceMissing, SourceUnreachable, SourceUnreadable

__all__ = ["COMPRESSED", "SourceFile", "filesystem", "read_errors", "remote_errors", "version_of"]

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # by the last suffix, as Arrow names them

_CHUNK = 1 << 20
_VALIDATORS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "crc32c")
_TIMES = ("LastModified", "last_modified", "updated", "created", "mtime", "modified", "Last-Modified")

# Bytes of files that had to be copied, by location and version; removed when the process ends.
_staged: dict[tuple[str, str], Path] = {}


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was listed.

    `location` is a path or a URL; `name` is relative to the source, with slashes; `version` changes with the
    bytes; `partitions` are the values that its folders' names say (`dt=2013-01`).
    """

    location: str
    name: str
    size: int
    mtime_ns: int
    version: str
    partitions: tuple[tuple[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The file as JSON values."""
        dates = {
            name: value.isoformat() for name, value in self.partitions if isinstance(value, datetime.date)
        }
        values = [(name, dates.get(name, value), name in dates) for name, value in self.partitions]
        return {**dataclasses.asdict(self), "partitions": values}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SourceFile:
        """The file of JSON values."""
        partitions = [
            (name, datetime.date.fromisoformat(value) if is_date else value)
            for name, value, is_date in data["partitions"]
        ]
        return cls(**{**data, "partitions": tuple(partitions)})

    @property
    def remote(self) -> bool:
        """Whether the file lies in a store."""
        return "://" in self.location

    @property
    def path(self) -> Path:
        """The path of a local file, or of a copy of a remote one, for what needs to seek."""
        return self._copy() if self.remote else Path(self.location)

    @property
    def kind_suffix(self) -> str:
        """The suffix that tells the kind: ".csv" of a.csv.gz."""
        path = PurePosixPath(self.name.lower())
        return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix

    @property
    def compression(self) -> str | None:
        """gzip or zstd by the name's suffix, or None."""
        return COMPRESSED.get(PurePosixPath(self.name.lower()).suffix)

    @contextlib.contextmanager
    def stream(self, encoding: str | None = None) -> Iterator[pa.NativeFile]:
        """The file from its start, decompressed; as UTF-8 when its encoding is given, utf-8 too: then checked."""
        with contextlib.ExitStack() as stack:
            raw: Any = self.raw()
            stack.callback(raw.close)
            if self.compression:
                raw = stack.enter_context(pa.CompressedInputStream(raw, self.compression))
            if encoding:
                recoder = _Recoder(raw, encoding, self.location)
                raw = stack.enter_context(pa.PythonFile(recoder, "r"))
            yield raw

    @contextlib.contextmanager
    def seekable(self) -> Iterator[pa.NativeFile]:
        """The file's own bytes at any place: by ranges where the store gives them, else from a copy."""
        if not self.remote or self._must_copy():
            with pa.OSFile(str(self.path)) as opened:
                yield opened
            return
        with self._listed():
            fs, path = filesystem(self.location)
            opened = fs.open(path, "rb", block_size=_CHUNK, cache_type="none")  # Arrow has a buffer a column
        with opened, pa.PythonFile(opened, "r") as native:
            yield native

    def raw(self) -> pa.NativeFile:
        """The file's own bytes from its start."""
        if not self.remote:
            return pa.OSFile(self.location)
        if self.version.startswith("sha256:"):
            return pa.OSFile(str(self._copy()))
        with self._listed():
            fs, path = filesystem(self.location)
            # Without blocks, HTTP gives one stream: not every server knows ranges.
            options = {"block_size": 0} if _is_http(self.location) else {"block_size": 4 * _CHUNK}
            opened = fs.open(path, "rb", **options)
        return pa.PythonFile(_Counted(opened, self), "r")

    def read_bytes(self) -> bytes:
        """All bytes of a small file."""
        if not self.remote:
            return Path(self.location).read_bytes()
        with self.raw() as opened:
            return b"".join(iter(lambda: opened.read(_CHUNK), b""))

    def check_unchanged(self) -> None:
        """SourceChanged when the file isn't the one that was listed."""
        if self.remote:
            self._check_remote()
            return
        try:
            now = Path(self.location).stat()
        except FileNotFoundError as e:
            raise SourceChanged(self.location, "went away") from e
        if now.st_size != self.size:
            raise SourceChanged(self.location, f"went from {self.size} to {now.st_size} bytes")
        if now.st_mtime_ns != self.mtime_ns:
            raise SourceChanged(self.location, "was written to")

    def _check_remote(self) -> None:
        if self.version.startswith("sha256:"):
            return  # what was read is the copy
        try:
            size, version = version_of(self.location)
        except SourceMissing as e:
            raise SourceChanged(self.location, "went away") from e
        if size != self.size:
            raise SourceChanged(self.location, f"went from {self.size} to {size} bytes")
        if version != self.version:
            raise SourceChanged(self.location, "was written to")

    @contextlib.contextmanager
    def _listed(self) -> Iterator[None]:
        """What was listed is not missing, but went away."""
        try:
            with remote_errors(self.location):
                yield
        except SourceMissing as e:
            raise SourceChanged(self.location, "went away") from e

    def _must_copy(self) -> bool:
        return self.version.startswith("sha256:") or _is_http(self.location)

    def _copy(self) -> Path:
        key = (self.location, self.version)
        if key not in _staged or not _staged[key].exists():
            with self._listed():
                path, size, digest = _fetch(self.location)
            if size != self.size or (self.version.startswith("sha256:") and digest != self.version):
                path.unlink()
                raise SourceChanged(self.location, f"gave {size} bytes that aren't those that were listed")
            _staged[key] = path
            self.check_unchanged()
        return _staged[key]


@contextlib.contextmanager
def read_errors(file: SourceFile, hint: str) -> Iterator[None]:
    """Around reading a file: SourceUnreadable for what goes wrong, SourceChanged where the file is another by now."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as e:
        file.check_unchanged()
        raise SourceUnreadable(file.location, f"can't be read: {str(e).splitlines()[0]}", hint=hint) from e


def filesystem(location: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it; credentials come from the environment and fsspec's config."""
    try:
        return fsspec.core.url_to_fs(location)
    except ImportError as e:
        scheme = location.partition("://")[0]
        raise SourceUnreachable(
            location,
            f"no support for {scheme}:// is installed",
            hint=f"install fsspec's package for {scheme}",
        ) from e


def version_of(location: str) -> tuple[int, str]:
    """Size and version of a remote file as it is now; it is copied where the store tells neither."""
    with remote_errors(location):
        fs, path = filesystem(location)
        fs.invalidate_cache()
        info = fs.info(path)
    return version_from(location, info)


def version_from(location: str, info: Mapping[str, Any]) -> tuple[int, str]:
    """Size and version from what a store says of a file."""
    size = info.get("size")
    etag = next((str(info[name]) for name in _VALIDATORS if info.get(name)), "")
    time = next((info[name] for name in _TIMES if info.get(name)), "")
    if isinstance(time, datetime.datetime):  # a listing may give seconds where a look at one file gives this
        time = time.timestamp()
    if size is not None and (etag or time):
        return int(size), f"etag:{etag}" if etag else f"time:{time}"
    path, size, digest = _fetch(location)
    _staged[location, digest] = path
    return size, digest


@contextlib.contextmanager
def remote_errors(location: str) -> Iterator[None]:
    """Turn what stores' clients raise into our errors: missing, or not reachable."""
    from trainers.job.errors import TrainyardError

    try:
        yield
    except (TrainyardError, KeyboardInterrupt):
        raise
    except FileNotFoundError as e:
        raise SourceMissing(f"no such file or folder: {location}", hint="check the URL") from e
    # botocore, aiohttp and others have each a tree of errors of their own.
    except Exception as e:
        problem = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        raise SourceUnreachable(location, f"can't be read: {problem}") from e


def _is_http(location: str) -> bool:
    return location.startswith(("http://", "https://"))


def _fetch(location: str) -> tuple[Path, int, str]:
    """Copy a remote file: where to, its bytes, and their digest."""
    digest, size = hashlib.sha256(), 0
    with remote_errors(location):
        fs, path = filesystem(location)
        options = {"block_size": 0} if _is_http(location) else {}
        with (
            fs.open(path, "rb", **options) as source,
            tempfile.NamedTemporaryFile(prefix="trainyard-raw-", delete=False) as target,
        ):
            _mine.add((os.getpid(), target.name))
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                target.write(chunk)
    return Path(target.name), size, f"sha256:{digest.hexdigest()}"


_mine: set[tuple[int, str]] = set()


@atexit.register
def _remove_copies() -> None:
    for pid, name in _mine:
        if pid == os.getpid():
            Path(name).unlink(missing_ok=True)


class _Counted(io.RawIOBase):
    """A remote file that says so when it ends early; errors of its client become ours."""

    def __init__(self, opened: IO[bytes], file: SourceFile) -> None:
        super().__init__()
        self._opened = opened
        self._file = file
        self._done = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        try:
            with remote_errors(self._file.location):
                chunk = self._opened.read(size)
        except SourceUnreachable:
            self._file.check_unchanged()  # a store refuses a range of a file that is another now
            raise
        self._done += len(chunk)
        if not chunk and size and self._done != self._file.size:
            self._file.check_unchanged()
            raise SourceUnreachable(
                self._file.location, f"gave {self._done} of its {self._file.size} bytes", hint="run again"
            )
        return chunk

    def close(self) -> None:
        self._opened.close()
        super().close()


class _Recoder(io.RawIOBase):
    """Bytes of an encoding as UTF-8, which they are certain to be."""

    def __init__(self, source: pa.NativeFile, encoding: str, location: str) -> None:
        super().__init__()
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._encoding = encoding
        self._location = location
        self._ready = b""
        self._lines = 1

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        wanted = size if size is not None and size >= 0 else 1 << 62
        while len(self._ready) < wanted:
            chunk = self._source.read(min(wanted - len(self._ready), 8 * _CHUNK))
            held = self._decoder.getstate()[0]
            try:
                text = self._decoder.decode(chunk, final=not chunk)
            except UnicodeError as e:
                raise self._error(e, held + chunk) from e
            if self._encoding == "utf-8":
                self._ready += chunk
                self._lines += chunk.count(b"\n")
            else:
                self._ready += text.encode()
                self._lines += text.count("\n")
            if not chunk:
                break
        out, self._ready = self._ready[:wanted], self._ready[wanted:]
        return out

    def _error(self, error: UnicodeError, seen: bytes) -> SourceUnreadable:
        problem = f"is not {self._encoding.upper()}: {error}"
        hint = "give the encoding that it has as format.encoding"
        if self._encoding == "utf-8" and isinstance(error, UnicodeDecodeError):
            line = self._lines + seen[: error.start].count(b"\n")
            problem = f"line {line} is not UTF-8, but has the byte 0x{seen[error.start]:02x}"
            hint = 'save it as UTF-8, or give its encoding: format={"encoding": "latin-1"}'
        return SourceUnreadable(self._location, problem, hint=hint)
