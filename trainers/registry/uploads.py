"""Files to where MLflow keeps artifacts: straight into an object store where it says one, else through the server.

A tracking server that is started with `--default-artifact-root s3://...` and without `--serve-artifacts` hands out
URIs of the store, and nothing large passes through it. The store is written by fsspec (s3fs for S3 and MinIO), which
pods have for reading records; MLflow's own uploader would want boto3, which can't live in Airflow's environment.
Credentials are the store's own: AWS_SHARED_CREDENTIALS_FILE, a role of the pod, or the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainers.registry.tracking import TrackingUnavailable

__all__ = ["upload"]

_LOCAL = ("", "file")
_PROXIED = ("mlflow-artifacts", "http", "https", "dbfs", "runs", "models")


def upload(
    location: str,
    source: Path,
    through_client: Callable[[], Any],
    *,
    into: str = "",
    environ: Mapping[str, str] | None = None,
) -> bool:
    """Bring a file, or all files of a folder, to `location`/`into`; whether it went straight to the store.

    `through_client` is the client's own call for the same, for every location that is no object store. Files that
    are there already are written again, so that an upload that was cut short ends whole.
    """
    scheme = urlsplit(location).scheme
    if scheme in (*_LOCAL, *_PROXIED):
        through_client()
        return False
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(
            location, **_options(scheme, os.environ if environ is None else environ)
        )
    except (ImportError, ValueError):  # a store that fsspec has no package for: MLflow may
        through_client()
        return False
    root = "/".join(filter(None, (root.rstrip("/"), into)))
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    base = source.parent if source.is_file() else source
    try:
        for path in files:
            fs.put_file(str(path), f"{root}/{path.relative_to(base).as_posix()}")
    except OSError as e:
        raise TrackingUnavailable(
            f"{location} does not take artifacts: {e}",
            hint="check the store's address and the credentials of the pod; docs/tracking.md has them",
        ) from e
    except Exception as e:
        # Stores' clients have families of errors of their own (botocore's are no OSError).
        if type(e).__module__.partition(".")[0] not in (
            "botocore",
            "aiobotocore",
            "aiohttp",
            "gcsfs",
            "adlfs",
        ):
            raise
        raise TrackingUnavailable(f"{location} does not take artifacts: {e}") from e
    return True


def _options(scheme: str, environ: Mapping[str, str]) -> dict[str, Any]:
    if scheme not in ("s3", "s3a"):
        return {}
    limits = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 3}}
    options: dict[str, Any] = {"config_kwargs": limits, "skip_instance_cache": True}
    endpoint = environ.get("MLFLOW_S3_ENDPOINT_URL")
    if endpoint:
        options["client_kwargs"] = {"endpoint_url": endpoint}
    return options
