"""Whether there is an MLflow to talk to, and a client that gives up soon.

MLflow's own defaults wait for minutes: seven retries of two minutes each. A pipeline's model is trained and
exported by now; what MLflow doesn't hear today, the next `register` tells it.
"""

from __future__ import annotations

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trainers.job.errors import InfraError
from trainers.lean import without

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["TrackingUnavailable", "connected", "tracking_uri"]

_PROBE_S = 3.0
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds without a byte, not of the whole upload
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


class TrackingUnavailable(InfraError):
    """There is no MLflow, or it does not answer, or it refuses."""

    code = "register.unavailable"


def tracking_uri() -> str:
    """Where MLflow is, from MLFLOW_TRACKING_URI; TrackingUnavailable when nobody says so."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if not uri:
        raise TrackingUnavailable("MLFLOW_TRACKING_URI is not set, so there is no registry to tell")
    try:
        urlsplit(uri)
    except ValueError as e:
        raise TrackingUnavailable(f"MLFLOW_TRACKING_URI is no address: {e}") from e
    return uri


def _probe(uri: str) -> None:
    """Ask a tracking server for its health: three seconds, before two seconds of CPU go into importing MLflow."""
    try:
        # The scheme is one of http and https; a proxy of the environment is for the world outside.
        request = urllib.request.Request(f"{uri}/health")  # noqa: S310
        with urllib.request.build_opener().open(request, timeout=_PROBE_S):
            pass
    except urllib.error.HTTPError:
        pass  # it answers; whether it lets us in, the calls will tell
    except (OSError, ValueError) as e:
        raise TrackingUnavailable(f"mlflow at {_shown(uri)} does not answer: {e}") from e


def _shown(uri: str) -> str:
    """The address without user and password, for messages and logs."""
    parts = urlsplit(uri)
    return uri.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2], 1) if "@" in parts.netloc else uri


@contextlib.contextmanager
def connected(uri: str) -> Iterator[MlflowClient]:
    """A client of the MLflow at `uri`, a tracking server or a database; its errors become TrackingUnavailable."""
    if urlsplit(uri).scheme in ("http", "https"):
        _probe(uri)
    before = {name: os.environ.get(name) for name in _LIMITS}
    os.environ.update({name: value for name, value in _LIMITS.items() if before[name] is None})
    try:
        with without("pandas", "sklearn", "matplotlib"):
            import mlflow
        import requests
        from mlflow.exceptions import MlflowException

        try:
            yield mlflow.MlflowClient(uri, registry_uri=uri)
        except (MlflowException, requests.RequestException, OSError) as e:
            raise TrackingUnavailable(f"mlflow at {_shown(uri)} failed: {_first_line(e)}") from e
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
