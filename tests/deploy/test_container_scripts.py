"""What runs in the containers beside the programs themselves: preparing the volumes, asking for health."""

from __future__ import annotations

import importlib.util
import json
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy import compose_file
from tests.deploy.compose_file import ROOT

PASSWORD = {"AIRFLOW_ADMIN_PASSWORD": "s3cret"}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


volumes = load(ROOT / "deploy" / "compose" / "volumes.py")
healthcheck = load(ROOT / "deploy" / "docker" / "healthcheck.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in volumes.FOLDERS:
        (tmp_path / name).mkdir()
    return tmp_path


def test_volumes_get_a_private_password_file_and_an_empty_model_config(root: Path) -> None:
    assert len(volumes.prepare(root, PASSWORD)) == 2
    passwords = root / "airflow-auth" / "passwords.json"
    assert json.loads(passwords.read_text()) == {"admin": "s3cret"}
    assert stat.S_IMODE(passwords.stat().st_mode) == 0o600
    assert (root / "storage" / "serving" / "models.config").read_text() == ""


def test_a_second_start_follows_the_env_file_and_leaves_the_deployed_models_alone(root: Path) -> None:
    volumes.prepare(root, PASSWORD)
    config = root / "storage" / "serving" / "models.config"
    config.write_text("model_config_list {}")
    assert volumes.prepare(root, {"AIRFLOW_ADMIN_PASSWORD": "new"}) == [
        f"wrote {root / 'airflow-auth' / 'passwords.json'}"
    ]
    assert config.read_text() == "model_config_list {}"
    assert json.loads((root / "airflow-auth" / "passwords.json").read_text()) == {"admin": "new"}


def test_a_missing_password_or_volume_is_named(root: Path) -> None:
    with pytest.raises(volumes.NotPrepared, match="AIRFLOW_ADMIN_PASSWORD must not be empty"):
        volumes.prepare(root, {})
    (root / "minio").rmdir()
    with pytest.raises(volumes.NotPrepared, match="minio must be a folder"):
        volumes.prepare(root, PASSWORD)


def test_the_step_as_a_process_says_what_is_wrong(tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "deploy" / "compose" / "volumes.py"]
    environ = {**PASSWORD, "TRAINYARD_HOME": str(tmp_path)}
    done = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "storage must be a folder" in done.stderr
    for name in volumes.FOLDERS:
        (tmp_path / name).mkdir()
    done = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "s3cret" not in done.stdout


def test_compose_mounts_what_the_step_prepares() -> None:
    service = compose_file.services()["volumes"]
    assert sorted(service["volumes"]) == sorted(
        f"{name}:/var/lib/trainyard/{name}" for name in volumes.FOLDERS
    )
    dockerfile = (ROOT / "deploy" / "docker" / "airflow.Dockerfile").read_text()
    for name in volumes.FOLDERS:
        assert f"/var/lib/trainyard/{name}" in dockerfile, "a volume takes the owner of the image's folder"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = {"/health": 200, "/broken": 503}.get(self.path, 404)
        body = b"OK"
        if self.path == "/api/v2/monitor/health":
            status = 200
            body = json.dumps({"scheduler": {"status": "healthy"}, "triggerer": {"status": None}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["/health"], ""),
        (["/broken"], "answers 503"),
        (["/nothing"], "answers 404"),
        (["", "--airflow-component", "scheduler"], ""),
        (["", "--airflow-component", "triggerer"], "triggerer is None"),
        (["", "--airflow-component", "dag_processor"], "says nothing of dag_processor"),
    ],
)
def test_health_is_the_status_or_the_component_s_heartbeat(
    server: str, arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = healthcheck.main([server + arguments[0], *arguments[1:]])
    assert code == (1 if wrong else 0)
    assert wrong in capsys.readouterr().err


def test_nobody_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        url = f"http://127.0.0.1:{httpd.server_address[1]}/health"
    assert healthcheck.main([url, "--timeout", "2"]) == 1
    assert "does not answer" in capsys.readouterr().err
