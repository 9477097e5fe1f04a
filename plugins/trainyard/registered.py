"""MLflow over REST, for what no spool of a job is for: aliases of a model, and metrics of what is served.

Answers are waited for some seconds; nothing here may fail a release or a task.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from trainyard.tracking import _auth

__all__ = ["aliases_of", "delete_alias", "log_metrics"]

log = logging.getLogger(__name__)

_SECONDS = 10.0
_AT_ONCE = 900  # metrics; MLflow takes 1,000


def _client(tracking_uri: str) -> Any:
    import httpx

    # trust_env would send loopback requests through a proxy.
    return httpx.Client(base_url=tracking_uri, timeout=_SECONDS, auth=_auth(), trust_env=False)


def _call(client: Any, method: str, path: str, **options: Any) -> dict[str, Any]:
    response = client.request(method, f"/api/2.0/mlflow/{path}", **options)
    response.raise_for_status()
    return dict(response.json())


def aliases_of(tracking_uri: str, name: str) -> dict[str, str] | None:
    """Alias -> the registry's version; {} for a model that it doesn't know, None where it does not answer."""
    if not tracking_uri.startswith(("http://", "https://")):
        return {}
    import httpx

    try:
        with _client(tracking_uri) as client:
            found = _call(client, "GET", "registered-models/get", params={"name": name})
    except httpx.HTTPStatusError as e:
        return {} if e.response.status_code == 404 else None
    except (httpx.HTTPError, ValueError) as e:
        log.warning("mlflow does not say the aliases of %s: %s", name, e)
        return None
    listed = found.get("registered_model", {}).get("aliases", ())
    return {str(item["alias"]): str(item["version"]) for item in listed}


def delete_alias(tracking_uri: str, name: str, alias: str) -> None:
    """Take an alias away; httpx.HTTPError when MLflow can't or won't."""
    with _client(tracking_uri) as client:
        _call(client, "DELETE", "registered-models/alias", params={"name": name, "alias": alias})


def log_metrics(tracking_uri: str, experiment: str, run_name: str, metrics: Mapping[str, float]) -> bool:
    """Add metrics to the run of this name, which is made when there is none; False when MLflow is not there."""
    if not tracking_uri.startswith(("http://", "https://")):
        return False
    import httpx

    now = int(time.time() * 1000)
    rows = [{"key": k, "value": v, "timestamp": now, "step": now // 1000} for k, v in metrics.items()]
    try:
        with _client(tracking_uri) as client:
            run = _run(client, _experiment(client, experiment), run_name, now)
            for at in range(0, len(rows), _AT_ONCE):
                batch = {"run_id": run, "metrics": rows[at : at + _AT_ONCE]}
                _call(client, "POST", "runs/log-batch", json=batch)
    except (httpx.HTTPError, KeyError, ValueError) as e:
        log.warning("metrics of %s are not in mlflow: %s: %s", run_name, type(e).__name__, e)
        return False
    return True


def _experiment(client: Any, name: str) -> str:
    import httpx

    try:
        found = _call(client, "GET", "experiments/get-by-name", params={"experiment_name": name})
    except httpx.HTTPStatusError as e:
        if e.response.status_code != 404:
            raise
        return str(_call(client, "POST", "experiments/create", json={"name": name})["experiment_id"])
    return str(found["experiment"]["experiment_id"])


def _run(client: Any, experiment: str, name: str, now: int) -> str:
    wanted = {"experiment_ids": [experiment], "filter": f"attributes.run_name = '{name}'", "max_results": 1}
    found = _call(client, "POST", "runs/search", json=wanted).get("runs")
    if found:
        return str(found[0]["info"]["run_id"])
    body = {"experiment_id": experiment, "run_name": name, "start_time": now}
    return str(_call(client, "POST", "runs/create", json=body)["run"]["info"]["run_id"])
