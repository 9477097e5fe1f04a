from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from serving.errors import ConfigInvalid, ServerFailed, ServerUnavailable
from serving.release import mlflow_aliases


@pytest.fixture
def tracking(monkeypatch):
    """A server that speaks the part of MLflow's REST API that moves aliases."""
    calls = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append((self.path, body, self.headers["Authorization"]))
            if body["name"] == "unknown":
                error = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such model"}
                self._answer(404, json.dumps(error).encode())
            else:
                self._answer(200, b"{}")

        def do_GET(self):
            aliases = [{"alias": "challenger", "version": "7"}]
            self._answer(200, json.dumps({"registered_model": {"aliases": aliases}}).encode())

        def do_DELETE(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append(("DELETE", body, None))
            self._answer(200, b"{}")

        def _answer(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        yield calls
        server.shutdown()
        thread.join()


def test_aliases_are_moved_at_a_tracking_server(tracking, monkeypatch):
    path, body = (
        "/api/2.0/mlflow/registered-models/alias",
        {"name": "digits", "alias": "previous", "version": "7"},
    )
    mlflow_aliases.set_alias("digits", "previous", 7)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    mlflow_aliases.set_alias("digits", "previous", "7")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    mlflow_aliases.set_alias("digits", "previous", 7)
    assert tracking == [
        (path, body, None),
        (path, body, "Bearer t0ken"),
        (path, body, "Basic YW5uOnNlY3JldA=="),
    ]
    with pytest.raises(
        ServerFailed, match=r"does not set alias champion of unknown to version 7: .*no such model"
    ):
        mlflow_aliases.set_alias("unknown", "champion", 7)


def test_a_champion_is_no_challenger(tracking):
    path = "/api/2.0/mlflow/registered-models/alias"
    mlflow_aliases.set_alias("digits", "champion", 7)
    mlflow_aliases.set_alias("digits", "champion", 8)
    mlflow_aliases.set_alias("digits", "previous", "")
    assert [(method, body) for method, body, _ in tracking] == [
        (path, {"name": "digits", "alias": "champion", "version": "7"}),
        ("DELETE", {"name": "digits", "alias": "challenger"}),
        (path, {"name": "digits", "alias": "champion", "version": "8"}),
        ("DELETE", {"name": "digits", "alias": "previous"}),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own, and those of what it imports
def test_aliases_are_moved_in_a_database(tmp_path, monkeypatch):
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = mlflow.MlflowClient(uri, uri)
    client.create_registered_model("digits")
    client.create_model_version("digits", "file:///models/digits/1")
    mlflow_aliases.set_alias("digits", "champion", 1)
    assert client.get_model_version_by_alias("digits", "champion").version in (1, "1")
    with pytest.raises(ServerFailed, match="does not set alias champion of digits to version 9"):
        mlflow_aliases.set_alias("digits", "champion", 9)


def test_mlflow_away_is_known_at_once(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(ServerUnavailable, match=r"mlflow at 127\.0\.0\.1:1 does not answer"):
        mlflow_aliases.set_alias("digits", "champion", 7)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ConfigInvalid, match="MLFLOW_TRACKING_URI must be set"):
        mlflow_aliases.set_alias("digits", "champion", 7)
