"""Aliases of MLflow's model registry (champion, challenger, previous), set after a release.

The registry is told of a release, it does not decide it: steps take `set_alias` as an argument and turn its
errors into warnings.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request

from serving.errors import ConfigInvalid, ServerFailed, ServerUnavailable

__all__ = ["CHALLENGER", "CHAMPION", "PREVIOUS", "set_alias"]

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
_PROBE_S = 3.0


def set_alias(name: str, alias: str, version: str | int) -> None:
    """Point an alias of a registered model at a version, at the tracking server of MLFLOW_TRACKING_URI.

    Raises ServerUnavailable within seconds when nobody answers there, ServerFailed when MLflow refuses.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise ConfigInvalid("MLFLOW_TRACKING_URI must be set to move aliases, got nothing")
    _probe(uri)
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        mlflow.MlflowClient(uri).set_registered_model_alias(name, alias, str(version))
    except MlflowException as e:
        raise ServerFailed(
            f"mlflow at {uri} does not set alias {alias} of {name} to version {version}: {e}"
        ) from e


def _probe(uri: str) -> None:
    """MLflow's client retries a dead server for minutes; a release does not wait for that."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"{uri.rstrip('/')}/health", timeout=_PROBE_S).close()
    except urllib.error.HTTPError as e:
        e.close()  # it answers: a server that wants a password says so here, and MLflow's client has it
    except OSError as e:
        where = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
        raise ServerUnavailable(f"mlflow at {where} does not answer: {getattr(e, 'reason', e)}") from e
