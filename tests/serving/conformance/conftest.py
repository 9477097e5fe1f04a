"""The server under test: the embedded one, or the one at TRAINYARD_CONFORMANCE_GRPC and TRAINYARD_CONFORMANCE_REST."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from serving.stubs import model_service_pb2_grpc, prediction_service_pb2_grpc
from tests.serving.conformance import models as models_script
from tests.serving.server_process import ServerProcess


@dataclass(frozen=True)
class Endpoint:
    """A server's addresses, and the models' folder as that server sees it."""

    grpc: str
    rest: str
    models: str
    embedded: bool


@pytest.fixture(scope="session", params=["plain", "batching"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The server; the embedded one is asked twice, without and with request batching."""
    given = os.environ.get("TRAINYARD_CONFORMANCE_GRPC")
    if given:
        if request.param == "batching":
            pytest.skip("a server that is given runs as it was started")
        yield Endpoint(
            given,
            os.environ["TRAINYARD_CONFORMANCE_REST"].rstrip("/"),
            os.environ["TRAINYARD_CONFORMANCE_MODELS"],
            embedded=False,
        )
        return
    root = tmp_path_factory.getbasetemp() / "conformance"
    if not root.exists():
        models_script.write(root)
    flags = [
        f"--model_config_file={root / 'models.config'}",
        f"--monitoring_config_file={root / 'monitoring.config'}",
        "--allow_version_labels_for_unavailable_models=true",
    ]
    if request.param == "batching":
        flags += ["--enable_batching", f"--batching_parameters_file={root / 'batching.config'}"]
    server = ServerProcess(root, *flags, name=request.param)
    try:
        yield Endpoint(server.grpc, server.rest, str(root), embedded=True)
        assert server.process.poll() is None, "the server must outlive the suite"
    finally:
        server.process.terminate()
        server.process.wait(30)


@pytest.fixture(scope="session")
def channel(endpoint: Endpoint) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoint.grpc) as opened:
        yield opened


@pytest.fixture(scope="session")
def predictions(channel: grpc.Channel) -> Any:
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture(scope="session")
def models(channel: grpc.Channel) -> Any:
    return model_service_pb2_grpc.ModelServiceStub(channel)


Rest = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="session")
def rest(endpoint: Endpoint) -> Rest:
    """Calls a path of the REST API; gives the status, the JSON answer, and its content type."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(
        path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, str]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = urllib.request.Request(f"{endpoint.rest}{path}", data, headers or {}, method=method)
        try:
            with opener.open(sent, timeout=30) as answer:
                kind = answer.headers["Content-Type"]
                text = answer.read().decode()
                return answer.status, json.loads(text) if "json" in kind else text, kind
        except urllib.error.HTTPError as e:
            with e:
                text, kind = e.read().decode(), e.headers["Content-Type"] or ""
                return e.code, json.loads(text) if "json" in kind else text, kind

    return call
