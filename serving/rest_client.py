"""The predict client over TF Serving's REST API; standard library and NumPy only.

    RestPredictClient("http://127.0.0.1:8501", "digits").predict({"image": images})["classes"]

JSON costs about ten times what gRPC costs for the same arrays: this is for places where only HTTP passes.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serving.client import VersionStatus
from serving.credentials import Credentials
from serving.errors import (
    BadRequest,
    ConfigInvalid,
    DeadlineExceeded,
    ModelNotFound,
    NotAllowed,
    RequestTooLarge,
    ServerFailed,
    ServerUnavailable,
    ServingError,
)
from serving.sides import Sides
from serving.traffic import CallCounter, Route

__all__ = ["RestPredictClient"]

_ERRORS: dict[int, type[ServingError]] = {
    400: BadRequest,
    401: NotAllowed,
    403: NotAllowed,
    404: ModelNotFound,
    408: DeadlineExceeded,
    413: RequestTooLarge,
    429: ServerUnavailable,
    501: BadRequest,
    503: ServerUnavailable,
    504: DeadlineExceeded,
}


class RestPredictClient:
    """A model at one server over HTTP; same arguments and errors as PredictClient, `url` is "http://host:port"."""

    def __init__(
        self,
        url: str,
        model: str,
        version: int | None = None,
        label: str | None = "stable",
        *,
        signature: str = "",
        timeout: float = 30.0,
        canary_share: float | Path | str | Route = 0.0,
        counter: CallCounter | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigInvalid(f"url must be like http://127.0.0.1:8501, got {url!r}")
        self.url = url.rstrip("/")
        self.model = model
        self.signature = signature
        self.timeout = timeout
        name = urllib.parse.quote(model, safe="")
        self._base = f"{self.url}/v1/models/{name}"
        self._label = None if version is not None else label
        self._sides = Sides(model, canary_share, counter)
        self._path = self._base if version is None else f"{self._base}/versions/{int(version)}"
        if self._label:
            self._path = self._labelled(self._label)
        # Loopback and cluster addresses must not be sent to a proxy of the environment.
        handlers: list[Any] = [urllib.request.ProxyHandler({})]
        self._credentials = credentials or Credentials.from_environment()
        if parts.scheme == "https" and (context := self._credentials.ssl_context()) is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def _labelled(self, label: str) -> str:
        return f"{self._base}/labels/{urllib.parse.quote(label, safe='')}"

    def close(self) -> None:
        """Write what `counter` counted; there is no connection to drop."""
        self._sides.close()

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        signature: str | None = None,
        timeout: float | None = None,
        key: str | bytes | None = None,
    ) -> dict[str, np.ndarray]:
        """Answers of the model by output name; a model with one output answers under "outputs"."""
        body = {"inputs": {name: _plain(np.asarray(value)) for name, value in inputs.items()}}
        name = self.signature if signature is None else signature
        body = {"signature_name": name, **body} if name else body
        if self._label is None or not self._sides.active:
            answer = self._call(f"{self._path}:predict", body, timeout)
        else:
            answer = self._sides.call(
                self._label,
                key,
                lambda label: self._call(f"{self._labelled(label)}:predict", body, timeout),
            )
        outputs = answer["outputs"]
        named = isinstance(outputs, dict) and set(outputs) != {"b64"}
        return {key: _array(value) for key, value in (outputs if named else {"outputs": outputs}).items()}

    def metadata(self, *, timeout: float | None = None) -> dict[str, Any]:
        """TF Serving's own JSON of the served version's signatures."""
        return self._call(f"{self._path}/metadata", None, timeout)

    def status(self, *, timeout: float | None = None) -> dict[int, VersionStatus]:
        """State of every version that the server knows of this model; {} where it knows none."""
        try:
            answer = self._call(self._base, None, timeout)
        except ModelNotFound:
            return {}
        codes = {"OK": 0}
        return {
            int(item["version"]): VersionStatus(
                item["state"],
                codes.get(item.get("status", {}).get("error_code", "OK"), 2),
                item.get("status", {}).get("error_message", ""),
            )
            for item in answer["model_version_status"]
        }

    def _call(self, url: str, body: Any, timeout: float | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **dict(self._credentials.metadata())}
        request = urllib.request.Request(url, data, headers)  # noqa: S310  # checked: http
        try:
            with self._opener.open(request, timeout=self.timeout if timeout is None else timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as e:
            with e:
                raise self._error(e.code, e.read()) from e
        except TimeoutError as e:
            raise DeadlineExceeded(f"{self.url} did not answer in time") from e
        except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as e:
            reason = getattr(e, "reason", e)
            if isinstance(reason, TimeoutError):
                raise DeadlineExceeded(f"{self.url} did not answer in time") from e
            raise ServerUnavailable(
                f"{self.url}: {reason}", hint="is the model server running at this address?"
            ) from e
        except ValueError as e:
            raise ServerFailed(f"{self.url} answered with something other than JSON: {e}") from e

    def _error(self, status: int, body: bytes) -> ServingError:
        try:
            said = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            said = body[:500].decode("utf-8", "replace")
        kind = _ERRORS.get(status, ServerFailed)
        if status == 400 and "version label" in said:
            kind = ModelNotFound
        return kind(f"{self.url}: {said} (HTTP {status})")


def _plain(array: np.ndarray) -> Any:
    if array.dtype.kind in "OSU":
        return _encode(array.tolist())
    return array.tolist()


def _encode(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode(item) for item in value]
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        return base64.b64decode(value["b64"])
    return value


def _array(value: Any) -> np.ndarray:
    decoded = _decode(value)
    array = np.asarray(decoded)
    return np.asarray(decoded, object) if array.dtype.kind in "SU" else array
