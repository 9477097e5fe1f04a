"""The MLflow run of a job, made before training starts so that links work while it runs.

Over MLflow's REST API and not its client, whose import costs seconds. Best effort: a job without a run trains
just as well, and the chief makes one later.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, write_json

__all__ = ["RUN_FILE", "early_run", "model_url", "run_url", "set_alias"]

RUN_FILE = "tracking/run.json"
"""Where a job's folder holds its run: {"run_id", "experiment_id", "tracking_uri"}."""

_BUDGET = 2.0  # seconds: tracking never holds training up
log = logging.getLogger(__name__)


def early_run(
    folder: Path, tracking_uri: str, *, experiment: str, name: str, tags: Mapping[str, str]
) -> dict[str, Any] | None:
    """The job's run, made if it has none yet; None when there is no MLflow, or it does not answer in 2 s."""
    known = read_json(folder / RUN_FILE)
    if known:
        return dict(known)
    if not tracking_uri.startswith(("http://", "https://")):
        return None
    import httpx

    try:
        with _client(tracking_uri) as client:
            experiment_id = _experiment(client, experiment)
            body = {
                "experiment_id": experiment_id,
                "run_name": name,
                "start_time": int(time.time() * 1000),
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
            }
            run_id = _call(client, "POST", "runs/create", json=body)["run"]["info"]["run_id"]
    except (httpx.HTTPError, KeyError, ValueError) as e:
        log.warning("no mlflow run yet (training goes on without): %s: %s", type(e).__name__, e)
        return None
    run = {"run_id": run_id, "experiment_id": experiment_id, "tracking_uri": tracking_uri}
    run["url"] = _url(run)
    (folder / RUN_FILE).parent.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN_FILE, run)
    return run


def set_alias(tracking_uri: str, name: str, alias: str, version: str) -> None:
    """Point an alias of a registered model at a version; httpx.HTTPError when MLflow can't or won't."""
    with _client(tracking_uri) as client:
        body = {"name": name, "alias": alias, "version": version}
        _call(client, "POST", "registered-models/alias", json=body)


def _client(tracking_uri: str) -> Any:
    import httpx

    # trust_env would send loopback requests through a proxy.
    return httpx.Client(base_url=tracking_uri, timeout=_BUDGET / 2, auth=_auth(), trust_env=False)


def _experiment(client: Any, name: str) -> str:
    import httpx

    try:
        found = _call(client, "GET", "experiments/get-by-name", params={"experiment_name": name})
    except httpx.HTTPStatusError as e:
        if e.response.status_code != 404:
            raise
        return str(_call(client, "POST", "experiments/create", json={"name": name})["experiment_id"])
    return str(found["experiment"]["experiment_id"])


def _call(client: Any, method: str, path: str, **options: Any) -> dict[str, Any]:
    response = client.request(method, f"/api/2.0/mlflow/{path}", **options)
    response.raise_for_status()
    return dict(response.json())


def _auth() -> Any:
    """MLflow's own variables for a server with users; never written anywhere."""
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    return (user, password) if user and password else None


def run_url(folder: Path | str) -> str:
    """The page of a job's run, "" when it has none."""
    return str((read_json(Path(folder) / RUN_FILE) or {}).get("url", ""))


def _url(run: Mapping[str, str]) -> str:
    return f"{run['tracking_uri'].rstrip('/')}/#/experiments/{run['experiment_id']}/runs/{run['run_id']}"


def model_url(tracking_uri: str, name: str, version: str | int) -> str:
    """The page of a model's version in the registry, "" without a server."""
    return f"{tracking_uri.rstrip('/')}/#/models/{name}/versions/{version}" if tracking_uri else ""
