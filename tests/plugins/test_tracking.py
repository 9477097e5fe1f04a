"""The early MLflow run, against a small real HTTP server that speaks the part of MLflow's API it needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from trainyard.links import LINKS, DriftReportLink, EvaluationReportLink, MlflowRunLink, ModelLink
from trainyard.tracking import early_run, model_url, run_url, set_alias


class _Mlflow(BaseHTTPRequestHandler):
    calls: list[tuple[str, dict[str, Any]]]
    experiments: dict[str, str]
    broken = False

    def _answer(self, body: dict[str, Any]) -> None:
        path = self.path.split("?")[0].removeprefix("/api/2.0/mlflow/")
        self.calls.append((path, body))
        status, answer = 200, {}
        if self.broken:
            status = 500
        elif path == "experiments/get-by-name":
            name = self.path.split("experiment_name=")[1]
            known = self.experiments.get(name)
            status = 200 if known else 404
            gone = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
            answer = {"experiment": {"experiment_id": known}} if known else gone
        elif path == "experiments/create":
            self.experiments[body["name"]] = "7"
            answer = {"experiment_id": "7"}
        elif path == "runs/create":
            answer = {"run": {"info": {"run_id": "r1"}}}
        elif path == "registered-models/get":
            aliases = [{"alias": "challenger", "version": "3"}, {"alias": "previous", "version": "2"}]
            answer = {"registered_model": {"aliases": aliases}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_DELETE(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer({"delete": body["alias"]})

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def mlflow() -> Iterator[Any]:
    handler = type("Handler", (_Mlflow,), {"calls": [], "experiments": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", handler=handler)
        server.shutdown()
        thread.join()


def _early(folder: Path, url: str) -> Any:
    return early_run(folder, url, experiment="digits", name="manual", tags={"a": "b"})


def test_a_run_is_made_once(mlflow: Any, tmp_path: Path) -> None:
    run = _early(tmp_path, mlflow.url)
    url = f"{mlflow.url}/#/experiments/7/runs/r1"
    assert run == {"run_id": "r1", "experiment_id": "7", "tracking_uri": mlflow.url, "url": url}
    assert json.loads((tmp_path / "tracking" / "run.json").read_text()) == run
    assert _early(tmp_path, mlflow.url) == run
    assert [path for path, _ in mlflow.handler.calls].count("runs/create") == 1
    assert run_url(tmp_path) == url
    _early(tmp_path / "other", mlflow.url)
    assert [path for path, _ in mlflow.handler.calls].count("experiments/create") == 1


@pytest.mark.parametrize("url", ["", "file:///tmp/mlruns", "http://127.0.0.1:1"])
def test_without_mlflow_there_is_no_run_and_no_error(tmp_path: Path, url: str) -> None:
    assert _early(tmp_path, url) is None
    assert run_url(tmp_path) == ""


def test_a_broken_mlflow_is_a_warning(mlflow: Any, tmp_path: Path) -> None:
    mlflow.handler.broken = True
    assert _early(tmp_path, mlflow.url) is None


def test_an_alias_moves(mlflow: Any) -> None:
    set_alias(mlflow.url, "digits", "previous", "3")
    body = {"name": "digits", "alias": "previous", "version": "3"}
    assert mlflow.handler.calls == [("registered-models/alias", body)]
    mlflow.handler.calls.clear()
    set_alias(mlflow.url, "digits", "champion", "3")  # it was the challenger
    assert [path for path, _ in mlflow.handler.calls] == [
        "registered-models/alias",
        "registered-models/get",
        "registered-models/alias",
    ]
    assert mlflow.handler.calls[-1][1] == {"delete": "challenger"}
    set_alias(mlflow.url, "digits", "previous", "")
    assert mlflow.handler.calls[-1][1] == {"delete": "previous"}
    with pytest.raises(httpx.HTTPError):
        set_alias("http://127.0.0.1:1", "digits", "champion", "3")


def test_links_show_what_the_operator_knows() -> None:
    operator = SimpleNamespace(
        mlflow_run_url="http://run", model_url="http://model", report_url="http://report"
    )
    assert [link.get_link(operator, ti_key=None) for link in LINKS] == [
        "http://run",
        "http://model",
        "http://report",  # of records, of an evaluation, of drift: each task has one of them
        "http://report",
        "http://report",
    ]  # type: ignore[arg-type]
    assert MlflowRunLink().get_link(object(), ti_key=None) == ""  # type: ignore[arg-type]
    assert {link.xcom_key for link in LINKS} == {
        "trainyard_mlflow_run",
        "trainyard_model",
        "trainyard_records_report",
        EvaluationReportLink().xcom_key,
        DriftReportLink().xcom_key,
    }
    assert len({link.xcom_key for link in LINKS}) == len(LINKS)
    assert ModelLink().name == "Model"
    assert model_url("http://m/", "digits", 3) == "http://m/#/models/digits/versions/3"
    assert model_url("", "digits", 3) == ""
