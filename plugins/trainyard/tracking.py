"""The MLflow run of a job as Airflow's tasks see it: made before training starts, told of the gate, ended.

All of it is best effort and within seconds: what MLflow is not told now stays in the job's folder, and is told by the
next task, by the next run, or by `trainyard tracking deliver`. No task waits for MLflow, and none fails for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import MissingRecord
from trainers.job.files import read_json
from trainers.runtime.tracking import RUN as RUN_FILE
from trainers.runtime.tracking import Spool

__all__ = [
    "RUN_FILE",
    "deliver_leftovers",
    "deliver_soon",
    "early_run",
    "model_url",
    "note_verdict",
    "run_url",
    "set_alias",
]

_BUDGET = 2.0  # seconds: tracking never holds a task up
_LEFTOVERS = 20.0  # seconds, where nobody waits
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
    from trainers.runtime.deliver import run_of
    from trainers.runtime.tracker import Refused, TrackerAway, connect

    try:
        tracker = connect(tracking_uri, timeout=_BUDGET / 2)
        run_of(folder, tracking_uri, tracker, experiment=experiment, name=name, tags=tags)
    except (TrackerAway, Refused) as e:
        log.warning("no mlflow run yet (training goes on without): %s", e.message)
        return None
    return dict(read_json(folder / RUN_FILE) or {})


def note_verdict(folder: Path | str, verdict: Mapping[str, Any]) -> None:
    """Tag the run of a job with its gate's verdict, {"outcome", "reasons", "override", "approval"}, now or later."""
    tags = {
        "trainyard.gate": str(verdict["outcome"]),
        "trainyard.gate.reasons": "; ".join(map(str, verdict.get("reasons", ()))),
    }
    override = verdict.get("override")
    if override:
        told = override if isinstance(override, Mapping) else {"reason": override}
        tags["trainyard.gate.override"] = ": ".join(str(told[k]) for k in ("author", "reason") if told.get(k))
        if told.get("on_behalf_of"):
            tags["trainyard.gate.override_on_behalf_of"] = str(told["on_behalf_of"])
    approval = verdict.get("approval")
    if approval:
        by = "nobody in time" if approval.get("timed_out") else str(approval.get("by", ""))
        said = (approval["decision"], by, approval.get("comment"))
        tags["trainyard.gate.approval"] = ": ".join(str(part) for part in said if part)
    try:
        Spool(folder, "gate").tags(tags)
    except OSError as e:
        log.warning("the verdict is not noted for mlflow: %s", e)
    else:
        deliver_soon(folder)


def deliver_soon(folder: Path | str, *, timeout: float = _BUDGET) -> bool:
    """Tell MLflow now what it has not been told of a job; False when that has to wait."""
    from trainers.runtime.deliver import Undelivered, deliver

    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri.startswith(("http://", "https://")):
        return False  # a database's client takes seconds to import; the step `register` has it
    try:
        deliver(folder, timeout=timeout)
    except (Undelivered, MissingRecord, OSError) as e:  # a folder without a job has no run to tell of
        log.warning("mlflow is told later: %s", e)
        return False
    return True


def deliver_leftovers(jobs: Path, *, but: Path | None = None, budget: float = _LEFTOVERS) -> int:
    """Tell MLflow what it was not told of earlier jobs under `jobs`, newest first; of how many it was told.

    Stops at the first that MLflow does not take, and after `budget` seconds.
    """
    from trainers.runtime.deliver import undelivered

    deadline = time.monotonic() + budget
    folders = sorted(
        (path.parent for path in jobs.glob("*/tracking")), key=lambda path: path.stat().st_mtime, reverse=True
    )
    told = 0
    for folder in folders:
        if time.monotonic() > deadline:
            break
        if folder == but or not (folder / "outcome.json").exists() or not undelivered(folder):
            continue
        if not deliver_soon(folder):
            break
        told += 1
    return told


def set_alias(tracking_uri: str, name: str, alias: str, version: str) -> None:
    """Point an alias of a registered model at a version, "" takes it away; httpx.HTTPError when MLflow won't.

    A version that becomes champion is no challenger any more.
    """
    with _client(tracking_uri) as client:
        body = {"name": name, "alias": alias}
        if not version:
            _call(client, "DELETE", "registered-models/alias", json=body)
            return
        _call(client, "POST", "registered-models/alias", json={**body, "version": version})
        if alias == "champion":
            _end_challenge(client, name, version)


def _end_challenge(client: Any, name: str, version: str) -> None:
    found = _call(client, "GET", "registered-models/get", params={"name": name})
    for alias in found.get("registered_model", {}).get("aliases", ()):
        if alias == {"alias": "challenger", "version": version}:
            _call(client, "DELETE", "registered-models/alias", json={"name": name, "alias": "challenger"})


def _client(tracking_uri: str) -> Any:
    import httpx

    # trust_env would send loopback requests through a proxy.
    return httpx.Client(base_url=tracking_uri, timeout=_BUDGET / 2, auth=_auth(), trust_env=False)


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


def model_url(tracking_uri: str, name: str, version: str | int) -> str:
    """The page of a model's version in the registry, "" without a server."""
    return f"{tracking_uri.rstrip('/')}/#/models/{name}/versions/{version}" if tracking_uri else ""
