"""Aliases of MLflow's model registry (champion, challenger, previous), set after a release.

The registry is told of a release, it does not decide it: steps take `set_alias` as an argument and turn its
errors into warnings. A tracking server is asked by MLflow's documented REST API, within seconds: MLflow's own
client takes 5 s to import and tries a dead server for minutes. It serves where the URI is a database.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from serving.errors import ConfigInvalid, ServerFailed, ServerUnavailable

__all__ = ["CHALLENGER", "CHAMPION", "PREVIOUS", "set_alias"]

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
_ENDPOINT = "/api/2.0/mlflow/registered-models/alias"
_MODEL = "/api/2.0/mlflow/registered-models/get"
_TIMEOUT_S = 10.0


def set_alias(name: str, alias: str, version: str | int) -> None:
    """Point an alias of a registered model at a version, at the tracking server of MLFLOW_TRACKING_URI.

    Version "" takes the alias away. A version that becomes champion is no challenger any more.
    Credentials are MLflow's own: MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN. Raises
    ServerUnavailable when nobody answers there, ServerFailed when MLflow refuses.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise ConfigInvalid("MLFLOW_TRACKING_URI must be set to move aliases, got nothing")
    body = {"name": name, "alias": alias, "version": str(version)}
    if urllib.parse.urlsplit(uri).scheme not in ("http", "https"):
        _write(uri, body)
        return
    if not body["version"]:
        _ask(uri, body, "DELETE")
        return
    _ask(uri, body, "POST")
    if alias == CHAMPION:
        query = urllib.parse.urlencode({"name": name})
        found = _ask(uri, body, "GET", f"{_MODEL}?{query}")
        challenge = {"alias": CHALLENGER, "version": body["version"]}
        if challenge in found.get("registered_model", {}).get("aliases", ()):
            _ask(uri, {"name": name, "alias": CHALLENGER, "version": ""}, "DELETE")


def _ask(uri: str, body: dict[str, str], method: str, endpoint: str = _ENDPOINT) -> dict[str, Any]:
    sent = {key: value for key, value in body.items() if value}
    request = urllib.request.Request(  # noqa: S310  # the caller checked: http
        uri.rstrip("/") + endpoint,
        None if method == "GET" else json.dumps(sent).encode(),
        {"Content-Type": "application/json", **_credentials()},
        method=method,
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    parts = urllib.parse.urlsplit(uri)
    where = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return dict(json.loads(answer.read() or b"{}"))
    except urllib.error.HTTPError as e:
        with e:
            raise _refused(where, body, f"{e.read(500).decode('utf-8', 'replace')} (HTTP {e.code})") from e
    except OSError as e:
        raise ServerUnavailable(f"mlflow at {where} does not answer: {getattr(e, 'reason', e)}") from e


def _credentials() -> dict[str, str]:
    user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _write(uri: str, body: dict[str, str]) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        client, name, version = mlflow.MlflowClient(uri, uri), body["name"], body["version"]
        if not version:
            client.delete_registered_model_alias(name, body["alias"])
            return
        client.set_registered_model_alias(name, body["alias"], version)
        challenger = client.get_registered_model(name).aliases.get(CHALLENGER)
        if body["alias"] == CHAMPION and str(challenger) == version:
            client.delete_registered_model_alias(name, CHALLENGER)
    except MlflowException as e:
        raise _refused("the database of MLFLOW_TRACKING_URI", body, str(e)) from e


def _refused(where: Any, body: dict[str, str], reason: str) -> ServerFailed:
    return ServerFailed(
        f"mlflow at {where} does not set alias {body['alias']} of {body['name']} to version {body['version']}: {reason}"
    )
