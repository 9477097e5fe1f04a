"""One object store, by fsspec: whole objects only, and errors that say whose they are.

A key is a path under the store's URL: "jobs/digits/run-1/plan.json" of "s3://bucket/prefix" is the object
"prefix/jobs/digits/run-1/plan.json". Credentials come from where the store's client looks for them (environment,
files, the machine's identity) and are never part of a URL, a message or a log.

    StorageRefused   class CONFIG: no such bucket, no rights, no or wrong credentials, no client installed
    StorageAway      class INFRA: it does not answer now; an OSError too, as a disk that is away would raise
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainers.job.errors import ConfigError, InfraError, InvalidSpec
from trainers.job.shared import ENV_STORE

__all__ = [
    "SCHEMES",
    "Found",
    "ObjectStore",
    "StorageAway",
    "StorageRefused",
    "check_store_url",
    "store_from_environment",
]

SCHEMES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs"}
"""Stores with a write that fails where the object is there, and fsspec's package for each."""

# Codes of S3 and words of fsspec's clients that mean the same on every try.
_REFUSALS = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "InvalidClientTokenId",
        "InvalidToken",
        "NoSuchBucket",
        "PermanentRedirect",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
        "401",
        "403",
    }
)
_REFUSING_TYPES = frozenset(
    {
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "RefreshError",
        "TokenRetrievalError",
    }
)
_VALIDATORS = ("ETag", "etag", "md5Hash", "generation")
_TIMES = ("LastModified", "updated", "mtime", "created")


class StorageRefused(ConfigError):
    """The object store can't be used as it is set up."""

    code = "storage.refused"


class StorageAway(InfraError, OSError):
    """The object store doesn't answer."""

    code = "storage.away"

    def __str__(self) -> str:
        return InfraError.__str__(self)


@dataclasses.dataclass(frozen=True)
class Found:
    """An object in a listing: bytes, and what changes with its content."""

    size: int
    version: str


def check_store_url(url: str) -> str:
    """`url` without a slash at its end; InvalidSpec when no pipeline could keep its files there."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Not quoted: it may hold a secret.
        raise InvalidSpec(
            ENV_STORE,
            "be a bucket and a prefix alone",
            "a URL with more in it",
            hint="credentials belong into the environment or into files of the pods",
        )
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise InvalidSpec(ENV_STORE, f"be {' or '.join(f'{s}://bucket/prefix' for s in SCHEMES)}", url)
    if not re.fullmatch(r"[A-Za-z0-9._/=-]*", parts.path) or ".." in parts.path.split("/"):
        raise InvalidSpec(ENV_STORE, "have a prefix of letters, digits, '.', '_', '-', '=' and '/'", url)
    return url.rstrip("/")


def store_from_environment(environ: Mapping[str, str] | None = None) -> ObjectStore | None:
    """The store that the environment names, or None."""
    url = (os.environ if environ is None else environ).get(ENV_STORE, "")
    return ObjectStore(check_store_url(url)) if url else None


class ObjectStore:
    """The objects under a URL; for many threads at once, not for use after a fork."""

    def __init__(self, url: str, *, connect_timeout: float = 5, read_timeout: float = 60) -> None:
        import fsspec

        self.url = url
        scheme = url.partition("://")[0]
        options: dict[str, Any] = {"skip_instance_cache": True}
        if scheme == "s3":
            options["config_kwargs"] = {
                "connect_timeout": connect_timeout,
                "read_timeout": read_timeout,
                "retries": {"max_attempts": 3},
            }
        try:
            with self._errors("opened"):
                self._files, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as e:
            raise StorageRefused(
                f"{url}: no client for {scheme}:// is installed",
                hint=f"install {SCHEMES.get(scheme, 'the package of fsspec for it')} in the images",
            ) from e
        self._root = root.rstrip("/")

    # ---- objects

    def find(self, prefix: str) -> dict[str, Found]:
        """All objects below a prefix ("jobs/digits/run-1"), by key."""
        with self._errors("listed"):
            self._files.invalidate_cache()
            found = self._files.find(self._path(prefix), detail=True, withdirs=False)
        cut = len(self._root) + 1
        return {
            path[cut:]: Found(int(info["size"]), _version(info))
            for path, info in found.items()
            if info.get("type", "file") == "file"
        }

    def read(self, key: str) -> bytes | None:
        """An object's bytes, or None when there is none."""
        with self._errors("read"):
            try:
                content: bytes = self._files.cat_file(self._path(key))
            except FileNotFoundError as e:
                if _code(e) == "NoSuchBucket":
                    raise
                return None
        return content

    def fetch(self, key: str, path: Path) -> bool:
        """Copy an object to a file, which appears whole; whether there is one."""
        temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._errors("read"):
                try:
                    self._files.get_file(self._path(key), str(temp))
                except FileNotFoundError as e:
                    if _code(e) == "NoSuchBucket":
                        raise
                    return False
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
        return True

    def write(self, key: str, data: bytes) -> None:
        """Write an object; readers see the one before or the new one."""
        with self._errors("written to"):
            self._files.pipe_file(self._path(key), data)

    def upload(self, path: Path, key: str) -> None:
        """Write a file that nobody changes meanwhile as an object, in parts where it is large."""
        with self._errors("written to"):
            self._files.put_file(str(path), self._path(key))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that is not there yet; False when there is one."""
        with self._errors("written to"):
            try:
                self._files.pipe_file(self._path(key), data, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are gone are well too."""
        for key in keys:
            with self._errors("written to"), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(key))

    def check(self) -> None:
        """Raise StorageRefused unless objects can be written, read and removed, and of two writers one is first.

        A store of S3's protocol that knows no conditional write would let two failures end one job.
        """
        key = f".trainyard/check-{secrets.token_hex(8)}"
        first, second = self.create(key, b"1"), self.create(key, b"2")
        content = self.read(key)
        self.remove([key])
        if not first or second or content != b"1":
            raise StorageRefused(
                f"{self.url} lets a second writer replace what a first one has made",
                hint="a job's record needs a store with conditional writes (If-None-Match): S3, "
                "Google Cloud Storage, MinIO of 2024-08 or later; or use a shared file system",
            )

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    # ---- errors

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (ImportError, FileExistsError, KeyboardInterrupt, ConfigError, InfraError):
            raise
        except FileNotFoundError as e:
            # A missing object is no error to any of our callers: what is missing is the bucket.
            raise self._refused(verb, "NoSuchBucket") from _bare(e)
        except PermissionError as e:
            raise self._refused(verb, _code(e) or "AccessDenied") from _bare(e)
        # botocore, aiohttp, google.auth and gcsfs have each a tree of errors of their own.
        except Exception as e:  # noqa: BLE001 - each becomes one of ours
            code, kind = _code(e), type(e).__name__
            if code in _REFUSALS or kind in _REFUSING_TYPES:
                raise self._refused(verb, code or kind) from _bare(e)
            raise StorageAway(
                f"{self.url} can't be {verb}: {kind}{f' ({code})' if code else ''}",
                hint="see whether the store is up and can be reached from the pods",
            ) from _bare(e)

    def _refused(self, verb: str, why: str) -> StorageRefused:
        hint = {
            "NoSuchBucket": "the bucket is not there; make it, or correct TRAINYARD_STORE",
            "PermanentRedirect": "the bucket is in another region; set AWS_DEFAULT_REGION",
            "AccessDenied": "the credentials are known, but may not do this with the bucket",
        }.get(why, "give Airflow's tasks and the pods credentials of the store (env-from or a mounted file)")
        return StorageRefused(f"{self.url} can't be {verb}: {why}", hint=hint)


def _code(error: BaseException) -> str:
    """The store's own code of an error ("NoSuchBucket"), "" where it has none; s3fs keeps it in the cause."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, Mapping):
            return str(response.get("Error", {}).get("Code", ""))
        code = getattr(seen, "code", None)
        if isinstance(code, int):
            return "NoSuchBucket" if code == 404 and "bucket" in str(seen).lower() else str(code)
        seen = seen.__cause__
    return ""


def _bare(error: BaseException) -> Exception:
    """The error's kind alone: its text may quote a request, and a request a key."""
    return RuntimeError(f"{type(error).__module__}.{type(error).__name__}")


def _version(info: Mapping[str, Any]) -> str:
    found = next((str(info[name]) for name in (*_VALIDATORS, *_TIMES) if info.get(name)), "")
    return f"{found}:{info['size']}"
