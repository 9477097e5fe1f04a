"""Pods on a cluster that is there already: what the platform starts then, what it tells whom, what it refuses."""

from __future__ import annotations

import http.server
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from trainyard.platform import Platform
from trainyard.platform.external import (
    ClusterRefused,
    ClusterUnknown,
    ExternalCluster,
    check_cluster,
)
from trainyard.platform.ports import HOST
from trainyard.platform.services import Service, client_environment, platform_services, platform_urls
from trainyard.platform.settings import Settings
from trainyard.settings import PipelineSettings

PORTS = {"airflow": 8081, "kubelet": 6444, "mlflow": 5001, "model-grpc": 8600, "model-rest": 8601}
ENVIRON = {
    "TRAINYARD_KUBECONFIG": "/etc/trainyard/kubeconfig",
    "TRAINYARD_NAMESPACE": "team-a",
    "TRAINYARD_IMAGE": "registry.example.org/trainer:2",
    "TRAINYARD_STORAGE_CLAIM": "trainyard-storage",
    "TRAINYARD_SERVICE_ACCOUNT": "trainyard-pods",
    "TRAINYARD_FS_GROUP": "10001",
    "TRAINYARD_DEFERRABLE": "true",
}


def settings_of(tmp_path: Path, **more: str) -> Settings:
    return Settings.from_environment({**ENVIRON, **more}, home=tmp_path / "home")


def services_of(settings: Settings) -> dict[str, Service]:
    return {
        s.name: s for s in platform_services(settings, PORTS, migrate=False, environ={"PATH": os.defpath})
    }


def test_the_triggerer_runs_and_no_process_kubelet(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert Settings.from_json(settings.to_json()) == settings
    services = services_of(settings)
    assert set(services) == {
        "api-server",
        "scheduler",
        "dag-processor",
        "triggerer",
        "mlflow",
        "model-server",
    }
    for name in ("scheduler", "triggerer"):
        connection = json.loads(services[name].environ["AIRFLOW_CONN_TRAINYARD_KUBERNETES"])
        assert connection["extra"] == {
            "kube_config_path": "/etc/trainyard/kubeconfig",
            "namespace": "team-a",
        }
    assert "triggerer" not in services_of(settings_of(tmp_path, TRAINYARD_DEFERRABLE="false"))
    assert "kubelet" not in platform_urls(PORTS, settings.cluster)


def test_tasks_are_told_what_pods_are_like(tmp_path: Path) -> None:
    """What `trainyard up` was told arrives where pipelines read it, though other TRAINYARD_* of a shell don't."""
    settings = settings_of(tmp_path)
    told = PipelineSettings.from_environment(services_of(settings)["scheduler"].environ)
    assert (told.namespace, told.image, told.storage_claim) == (
        "team-a",
        "registry.example.org/trainer:2",
        "trainyard-storage",
    )
    assert (told.service_account, told.fs_group, told.deferrable) == ("trainyard-pods", 10001, True)
    assert told.environ["TRAINYARD_FS_GROUP"] == "10001", "pods write for their group too"
    client = client_environment(settings, platform_urls(PORTS, settings.cluster))
    assert client["TRAINYARD_KUBECONFIG"] == "/etc/trainyard/kubeconfig", "`trainyard env` finds the cluster"


def test_without_a_cluster_only_deferrable_is_passed_on(tmp_path: Path) -> None:
    environ = {name: value for name, value in ENVIRON.items() if name != "TRAINYARD_KUBECONFIG"}
    settings = Settings.from_environment(environ, home=tmp_path / "home")
    services = services_of(settings)
    assert {"kubelet", "triggerer"} <= set(services)
    told = PipelineSettings.from_environment(services["scheduler"].environ)
    assert (told.deferrable, told.storage_claim, told.fs_group) == (True, "", None)
    assert services["scheduler"].umask == -1


def test_mlflow_listens_beyond_loopback_only_when_told(tmp_path: Path) -> None:
    def mlflow(**more: str) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
        settings = settings_of(tmp_path, **more)
        service = services_of(settings)["mlflow"]
        told = PipelineSettings.from_environment(services_of(settings)["scheduler"].environ)
        return service.command, dict(service.environ), {"tasks": told.mlflow, **told.environ}

    command, _, told = mlflow()
    assert f"--host={HOST}" in command
    assert told["MLFLOW_TRACKING_URI"] == told["tasks"] == "http://127.0.0.1:5001"

    command, environ, told = mlflow(TRAINYARD_MLFLOW_HOST="172.18.0.1")
    assert "--host=172.18.0.1" in command
    assert told["MLFLOW_TRACKING_URI"] == told["tasks"] == "http://172.18.0.1:5001"
    assert "172.18.0.1:*" in environ["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")

    command, environ, told = mlflow(
        TRAINYARD_MLFLOW_HOST="0.0.0.0", TRAINYARD_HOST_FOR_PODS="host.docker.internal"
    )
    assert "--host=0.0.0.0" in command
    assert told["tasks"] == "http://127.0.0.1:5001"
    assert told["MLFLOW_TRACKING_URI"] == "http://host.docker.internal:5001"
    assert "host.docker.internal:*" in environ["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")


def test_the_storage_root_is_its_groups(tmp_path: Path) -> None:
    group = os.getgid()
    settings = settings_of(tmp_path, TRAINYARD_FS_GROUP=str(group))
    settings.make_folders()
    for folder in (settings.storage, settings.model_config.parent):
        found = folder.stat()
        assert found.st_gid == group
        assert stat.S_IMODE(found.st_mode) == 0o2775, (
            "what is made in it is the group's too, and the group writes"
        )
    assert services_of(settings)["scheduler"].umask == 0o002


def test_a_group_that_folders_cannot_be_given_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refused)  # as for everybody but root and the group's members
    with pytest.raises(ValueError, match="can't be given to group 59999 of TRAINYARD_FS_GROUP"):
        settings_of(tmp_path, TRAINYARD_FS_GROUP="59999").make_folders()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TRAINYARD_FS_GROUP": "staff"}, "TRAINYARD_FS_GROUP must be a group's number, got 'staff'"),
        ({"TRAINYARD_MLFLOW_HOST": "gateway"}, "TRAINYARD_MLFLOW_HOST must be an address of this machine"),
        ({"TRAINYARD_DEFERRABLE": "perhaps"}, "TRAINYARD_DEFERRABLE must be true or false, got 'perhaps'"),
    ],
)
def test_refused(environ: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(tmp_path, **environ)


def test_warnings_say_what_will_not_work() -> None:
    bare = ExternalCluster(Path("/k"))
    assert [text.split(" ")[0] for text in bare.warnings()] == ["TRAINYARD_STORAGE_CLAIM", "MLflow"]
    assert [text.split(" ")[0] for text in bare.warnings(has_store=True)] == ["MLflow"]
    whole = ExternalCluster(Path("/k"), {"TRAINYARD_STORAGE_CLAIM": "c"}, mlflow_host="172.18.0.1")
    assert whole.warnings() == []


def test_a_kubeconfig_that_is_not_there(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, TRAINYARD_KUBECONFIG=str(tmp_path / "none"))
    with pytest.raises(ClusterUnknown, match=r"there is no kubeconfig .*none; set TRAINYARD_KUBECONFIG"):
        Platform(settings=settings).start()
    assert not settings.state_file.exists(), "nothing was begun"
    (tmp_path / "none").write_text("a word")
    with pytest.raises(ClusterUnknown, match="can't be used"):
        Platform(settings=settings).start()


def kubeconfig_of(path: Path, server: str) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return path


def test_a_cluster_that_is_away(tmp_path: Path) -> None:
    path = kubeconfig_of(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    cluster = ExternalCluster(path)
    assert cluster.describe() == {"kubeconfig": str(path), "server": "http://127.0.0.1:1"}
    with pytest.raises(ClusterRefused, match=r"\(http://127.0.0.1:1\) can't be reached: .*refused"):
        check_cluster(cluster, "team-a")


class _Answers(http.server.BaseHTTPRequestHandler):
    """An API server that refuses, or has no namespaces, by the path."""

    def do_GET(self) -> None:
        status = 401 if self.server.locked else 404 if self.path.split("?")[0].endswith("/none") else 200  # type: ignore[attr-defined]
        body = {"gitVersion": "v1.31.0", "items": [], "major": "1", "minor": "31"}
        text = json.dumps(
            body
            | {"buildDate": "", "compiler": "", "gitCommit": "", "goVersion": ""}
            | {"gitTreeState": "", "platform": ""}
        ).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def api_server() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer((HOST, 0), _Answers)
    server.locked = False  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_cluster_that_refuses_or_has_no_such_namespace(
    tmp_path: Path, api_server: http.server.HTTPServer
) -> None:
    url = f"http://{HOST}:{api_server.server_address[1]}"
    cluster = ExternalCluster(kubeconfig_of(tmp_path / "kubeconfig", url))
    assert check_cluster(cluster, "team-a") == "v1.31.0"
    with pytest.raises(ClusterUnknown, match="has no namespace none; make it by deploy/kubernetes"):
        check_cluster(cluster, "none")
    api_server.locked = True  # type: ignore[attr-defined]
    with pytest.raises(ClusterRefused, match="refuses: 401"):
        check_cluster(cluster, "team-a")
