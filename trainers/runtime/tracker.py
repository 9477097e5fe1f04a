"""The few calls of MLflow that delivery needs: over its documented REST API, or by its client for a database.

A tracking server is asked with the standard library: MLflow's own client costs 2 CPU-seconds and 76 MB to import
beside a training that wants them, and tries a dead server for minutes. It serves where the URI is no server's.

Source of the calls: https://mlflow.org/docs/latest/api_reference/rest-api.html
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainers.job.errors import InfraError

__all__ = ["KEY_TAG", "Refused", "Tracker", "TrackerAway", "connect", "shown"]

KEY_TAG = "trainyard.key"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PAGE = 10_000


class TrackerAway(InfraError):
    """MLflow does not answer, or not as MLflow does; trying again may help."""

    code = "tracking.away"


class Refused(InfraError):
    """MLflow will not take what it was sent, now or later."""

    code = "tracking.refused"


class Tracker(Protocol):
    """MLflow, as far as delivery uses it. Every call raises TrackerAway or Refused."""

    def experiment(self, name: str) -> str:
        """The id of an experiment, made unless it is there."""

    def find_run(self, experiment_id: str, key: str) -> str | None:
        """The id of the run whose tag `trainyard.key` is `key`."""

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], at: float) -> str:
        """The id of a new run that began `at` epoch seconds."""

    def run(self, run_id: str) -> dict[str, Any] | None:
        """{"status", "deleted", "experiment_id", "params"} of a run, None when there is none."""

    def log(
        self,
        run_id: str,
        metrics: Sequence[Mapping[str, Any]],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        """One batch; metrics as {"key", "value", "timestamp", "step"}."""

    def history(self, run_id: str, key: str) -> set[tuple[float, int, int]]:
        """What a run holds of a metric: {(value, milliseconds, step)}."""

    def set_status(self, run_id: str, status: str, at: float | None) -> None:
        """RUNNING, or an end at epoch seconds: FINISHED, FAILED, KILLED."""


def connect(uri: str, environ: Mapping[str, str] | None = None, *, timeout: float = 10.0) -> Tracker:
    """A tracker for MLFLOW_TRACKING_URI; `timeout` seconds without a byte are too many."""
    if urllib.parse.urlsplit(uri).scheme in ("http", "https"):
        return RestTracker(uri, os.environ if environ is None else environ, timeout)
    return StoreTracker(uri)


def shown(uri: str) -> str:
    """An address without user and password, for messages and logs."""
    parts = urllib.parse.urlsplit(uri)
    return uri.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1) if "@" in parts.netloc else uri


class RestTracker:
    """MLflow's REST API, without retries: who delivers decides when to try again."""

    def __init__(self, uri: str, environ: Mapping[str, str], timeout: float) -> None:
        parts = urllib.parse.urlsplit(uri.rstrip("/"))
        host = parts.netloc.rpartition("@")[2]
        self._base = urllib.parse.urlunsplit((parts.scheme, host, f"{parts.path}/api/2.0/mlflow", "", ""))
        self._shown = shown(uri)
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json", **_credentials(parts, environ)}
        handlers: list[urllib.request.BaseHandler] = []
        if parts.hostname in _LOOPBACK:
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy is for the world outside
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_tls(environ)))
        self._opener = urllib.request.build_opener(*handlers)

    def experiment(self, name: str) -> str:
        """See Tracker."""
        query = {"experiment_name": name}
        found = self._call("GET", "experiments/get-by-name", query, missing=None)
        if found is None:
            try:
                return str(self._call("POST", "experiments/create", {"name": name})["experiment_id"])
            except Refused:  # another delivery was faster
                found = self._call("GET", "experiments/get-by-name", query)
        return str(found["experiment"]["experiment_id"])

    def find_run(self, experiment_id: str, key: str) -> str | None:
        """See Tracker."""
        body = {"experiment_ids": [experiment_id], "filter": f"tags.`{KEY_TAG}` = '{key}'", "max_results": 1}
        runs = self._call("POST", "runs/search", body).get("runs", [])
        return str(runs[0]["info"]["run_id"]) if runs else None

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], at: float) -> str:
        """See Tracker."""
        body = {"experiment_id": experiment_id, "run_name": name, "start_time": int(at * 1000)}
        listed = [{"key": key, "value": value} for key, value in tags.items()]
        return str(self._call("POST", "runs/create", {**body, "tags": listed})["run"]["info"]["run_id"])

    def run(self, run_id: str) -> dict[str, Any] | None:
        """See Tracker."""
        found = self._call("GET", "runs/get", {"run_id": run_id}, missing=None)
        if found is None:
            return None
        info, data = found["run"]["info"], found["run"].get("data", {})
        return {
            "status": info.get("status", "RUNNING"),
            "deleted": info.get("lifecycle_stage") == "deleted",
            "experiment_id": info["experiment_id"],
            "params": {param["key"]: param["value"] for param in data.get("params", ())},
        }

    def log(
        self,
        run_id: str,
        metrics: Sequence[Mapping[str, Any]],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        """See Tracker."""
        body: dict[str, Any] = {"run_id": run_id, "metrics": list(metrics)}
        body["params"] = [{"key": key, "value": value} for key, value in params.items()]
        body["tags"] = [{"key": key, "value": value} for key, value in tags.items()]
        self._call("POST", "runs/log-batch", body)

    def history(self, run_id: str, key: str) -> set[tuple[float, int, int]]:
        """See Tracker."""
        found: set[tuple[float, int, int]] = set()
        query = {"run_id": run_id, "metric_key": key, "max_results": str(_PAGE)}
        while True:
            page = self._call("GET", "metrics/get-history", query)
            for metric in page.get("metrics", ()):
                found.add((float(metric["value"]), int(metric["timestamp"]), int(metric.get("step", 0))))
            token = page.get("next_page_token")
            if not token:
                return found
            query["page_token"] = token

    def set_status(self, run_id: str, status: str, at: float | None) -> None:
        """See Tracker."""
        end = {} if at is None else {"end_time": int(at * 1000)}
        self._call("POST", "runs/update", {"run_id": run_id, "status": status, **end})

    def _call(self, method: str, path: str, values: Mapping[str, Any], **missing: Any) -> Any:
        """The answer; `missing`, where it is given, in the place of one about what is not there."""
        url, data = f"{self._base}/{path}", None
        if method == "GET":
            url += f"?{urllib.parse.urlencode(values)}"
        else:
            data = json.dumps(values).encode()
        # The scheme was looked at by `connect`.
        request = urllib.request.Request(url, data, self._headers, method=method)  # noqa: S310
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                value = json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as e:
            with e:
                code, words = _error(e)
            if code == "RESOURCE_DOES_NOT_EXIST" and "missing" in missing:
                return missing["missing"]
            # What is MLflow's own word about the request; anything else may be a proxy, a start, a stranger.
            kind = (
                Refused
                if code and 400 <= e.code < 500 and e.code not in (401, 403, 408, 429)
                else TrackerAway
            )
            raise kind(f"mlflow at {self._shown} says to {path}: {words} (HTTP {e.code})") from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = getattr(e, "reason", None) or e
            raise TrackerAway(f"mlflow at {self._shown} does not answer: {reason or type(e).__name__}") from e
        if not isinstance(value, dict):
            raise TrackerAway(f"mlflow at {self._shown} answers {path} otherwise than MLflow does")
        return value


def _error(error: urllib.error.HTTPError) -> tuple[str, str]:
    """MLflow's error code and the first line of its message; no code from what is no MLflow."""
    try:
        text = error.read(65_536).decode("utf-8", "replace")
        body = json.loads(text)
        return str(body["error_code"]), str(body.get("message", "")).strip().partition("\n")[0][:300]
    except (OSError, ValueError, KeyError, TypeError):
        return "", str(error.reason)


def _credentials(parts: urllib.parse.SplitResult, environ: Mapping[str, str]) -> dict[str, str]:
    """MLflow's own variables, or the address's user, for a server with users; never written anywhere."""
    user = environ.get("MLFLOW_TRACKING_USERNAME") or urllib.parse.unquote(parts.username or "")
    if user:
        secret = environ.get("MLFLOW_TRACKING_PASSWORD") or urllib.parse.unquote(parts.password or "")
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{secret}'.encode()).decode()}"}
    token = environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None)


class StoreTracker:
    """MLflow's client, for a database and whatever else is no server."""

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from trainers.lean import without

        with without("pandas", "sklearn", "matplotlib"):
            from mlflow import MlflowClient

        self._shown = shown(uri)
        self._client = self._try(lambda: MlflowClient(tracking_uri=uri))

    def experiment(self, name: str) -> str:
        """See Tracker."""
        found = self._try(lambda: self._client.get_experiment_by_name(name))
        if found is None:
            try:
                return str(self._try(lambda: self._client.create_experiment(name)))
            except Refused:  # another delivery was faster
                found = self._try(lambda: self._client.get_experiment_by_name(name))
        return str(found.experiment_id)

    def find_run(self, experiment_id: str, key: str) -> str | None:
        """See Tracker."""
        query = f"tags.`{KEY_TAG}` = '{key}'"
        runs = self._try(lambda: self._client.search_runs([experiment_id], query, max_results=1))
        return str(runs[0].info.run_id) if runs else None

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], at: float) -> str:
        """See Tracker."""
        run = self._try(
            lambda: self._client.create_run(experiment_id, int(at * 1000), tags=dict(tags), run_name=name)
        )
        return str(run.info.run_id)

    def run(self, run_id: str) -> dict[str, Any] | None:
        """See Tracker."""
        found = self._try(lambda: self._client.get_run(run_id), missing=None)
        if found is None:
            return None
        return {
            "status": found.info.status,
            "deleted": found.info.lifecycle_stage == "deleted",
            "experiment_id": found.info.experiment_id,
            "params": dict(found.data.params),
        }

    def log(
        self,
        run_id: str,
        metrics: Sequence[Mapping[str, Any]],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        """See Tracker."""
        from mlflow.entities import Metric, Param, RunTag

        self._try(
            lambda: self._client.log_batch(
                run_id,
                metrics=[Metric(**metric) for metric in metrics],
                params=[Param(key, value) for key, value in params.items()],
                tags=[RunTag(key, value) for key, value in tags.items()],
            )
        )

    def history(self, run_id: str, key: str) -> set[tuple[float, int, int]]:
        """See Tracker."""
        found = self._try(lambda: self._client.get_metric_history(run_id, key))
        return {(metric.value, metric.timestamp, metric.step) for metric in found}

    def set_status(self, run_id: str, status: str, at: float | None) -> None:
        """See Tracker."""
        if at is None:
            self._try(lambda: self._client.update_run(run_id, status=status))
        else:
            self._try(lambda: self._client.set_terminated(run_id, status, int(at * 1000)))

    def _try(self, call: Any, **missing: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return call()
        except MlflowException as e:
            if e.error_code == "RESOURCE_DOES_NOT_EXIST" and "missing" in missing:
                return missing["missing"]
            said = str(e).strip().partition("\n")[0][:300]
            refused = e.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST")
            kind = Refused if refused else TrackerAway
            raise kind(f"mlflow at {self._shown} says: {said}") from e
        except (OSError, ImportError) as e:
            raise TrackerAway(f"mlflow at {self._shown} does not answer: {e}") from e
