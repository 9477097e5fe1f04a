"""Settings, keys, Airflow's configuration, services: what is started, with what, and where secrets go."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trainyard.platform import services as services_module
from trainyard.platform.airflow_config import airflow_options, write_airflow_config
from trainyard.platform.keys import Keys, make_keys
from trainyard.platform.ports import HOST
from trainyard.platform.services import (
    Service,
    base_environment,
    client_environment,
    platform_services,
    platform_urls,
)
from trainyard.platform.settings import REPO, Settings
from trainyard.settings import PipelineSettings

PORTS = {"airflow": 8081, "kubelet": 6444, "mlflow": 5001, "model-grpc": 8600, "model-rest": 8601}


def installed(package: str, path: str) -> str:
    """A file of an installed package; importing that would cost seconds."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / path).read_text()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment({}, home=tmp_path / "home")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "secrets")


def test_defaults_are_a_checkouts() -> None:
    settings = Settings.from_environment({})
    assert settings.home == REPO / ".trainyard"
    assert settings.storage == REPO / ".trainyard" / "storage"
    assert settings.dags == REPO / "dags"
    assert (REPO / "pyproject.toml").exists()


def test_variables_win(tmp_path: Path) -> None:
    settings = Settings.from_environment(
        {
            "TRAINYARD_HOME": str(tmp_path),
            "TRAINYARD_STORAGE": str(tmp_path / "big disk"),
            "TRAINYARD_DAGS": str(tmp_path / "dags"),
            "TRAINYARD_NAMESPACE": "other",
            "TRAINYARD_PARALLELISM": "16",
            "TRAINYARD_TRIGGERER": "yes",
            "TRAINYARD_WITHOUT": "mlflow,model-server",
        }
    )
    assert settings.home == tmp_path
    assert settings.model_config == tmp_path / "big disk" / "serving" / "models.config"
    assert (settings.namespace, settings.parallelism, settings.triggerer) == ("other", 16, True)
    assert settings.without == ("mlflow", "model-server")
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TRAINYARD_PARALLELISM": "many"}, "TRAINYARD_PARALLELISM must be a whole number, got 'many'"),
        (
            {"TRAINYARD_REQUEST_LOG_RATE": "all"},
            "TRAINYARD_REQUEST_LOG_RATE must be a number from 0 to 1, got 'all'",
        ),
        ({"TRAINYARD_REQUEST_LOG_RATE": "2"}, "request_log_rate must be from 0 to 1, got 2.0"),
        ({"TRAINYARD_PARALLELISM": "0"}, "parallelism must be at least 1, got 0"),
        ({"TRAINYARD_STORE": "ftp://a/b"}, "TRAINYARD_STORE must be s3://bucket/prefix or gs://"),
        ({"TRAINYARD_STORE": "s3://key:word@a/b"}, "be a bucket and a prefix alone, got 'a URL with more"),
        (
            {"TRAINYARD_STORE": "s3://a/b", "TRAINYARD_STORE_PATIENCE": "long"},
            "TRAINYARD_STORE_PATIENCE must be a number of seconds, got 'long'",
        ),
        (
            {
                "TRAINYARD_STORE": "s3://a/b",
                "TRAINYARD_KUBECONFIG": "/a",
                "TRAINYARD_STORAGE_CLAIM": "c",
            },
            "TRAINYARD_STORAGE_CLAIM must not be set beside TRAINYARD_STORE",
        ),
        ({"TRAINYARD_TRIGGERER": "maybe"}, "TRAINYARD_TRIGGERER must be yes or no, got 'maybe'"),
        (
            {"TRAINYARD_WITHOUT": "airflow"},
            "without must name some of kubelet, mlflow, model-server, got airflow",
        ),
    ],
)
def test_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.from_environment(environ)


def test_relative_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="home must be an absolute path, got 'here'"):
        Settings(home=Path("here"), storage=Path("/there"))


def test_keys_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    keys = make_keys(folder)
    assert make_keys(folder) == keys
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert json.loads(keys.passwords_file.read_text()) == {"admin": keys.airflow_password}
    assert len(keys.jwt_secret) >= 64
    assert len(make_keys(tmp_path / "other").airflow_password) >= 12
    assert make_keys(tmp_path / "other").airflow_password != keys.airflow_password
    for secret in (keys.fernet_key, keys.jwt_secret, keys.api_secret_key, keys.airflow_password):
        assert secret not in repr(keys)


def test_a_secret_that_others_could_read_is_closed(tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    keys.passwords_file.chmod(0o644)
    make_keys(tmp_path)
    assert stat.S_IMODE(keys.passwords_file.stat().st_mode) == 0o600


def test_airflow_reads_what_was_written(tmp_path: Path, settings: Settings, keys: Keys) -> None:
    options = airflow_options(settings, keys, 8081)
    path = tmp_path / "airflow.cfg"
    path.write_text("an old one")
    path.chmod(0o644)
    write_airflow_config(path, {**options, "extra": {"percent": "100%"}})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config = configparser.ConfigParser()
    config.read(path)
    assert config["api"]["host"] == config["scheduler"]["scheduler_health_check_server_host"] == HOST
    assert config["core"]["execution_api_server_url"] == "http://127.0.0.1:8081/execution/"
    assert config["core"]["load_examples"] == "False"
    assert config["database"]["sql_alchemy_conn"].endswith("airflow.db?timeout=60")
    assert config["core"]["fernet_key"] == keys.fernet_key
    assert config["extra"]["percent"] == "100%"


def test_airflow_knows_every_option(settings: Settings, keys: Keys) -> None:
    """A misspelt or removed option would be ignored in silence."""
    import yaml

    known = yaml.safe_load(installed("airflow", "config_templates/config.yml"))
    options = airflow_options(settings, keys, 8081)
    assert [f"{s}.{o}" for s, values in options.items() for o in values if o not in known[s]["options"]] == []


def test_services(settings: Settings, keys: Keys) -> None:
    services = {s.name: s for s in platform_services(settings, PORTS, migrate=True, environ={"PATH": "/bin"})}
    assert list(services) == [
        "airflow-db",
        "api-server",
        "scheduler",
        "dag-processor",
        "kubelet",
        "mlflow",
        "model-server",
    ]
    assert services["scheduler"].needs == ("airflow-db",)
    assert services["scheduler"].stop_wave < services["api-server"].stop_wave, (
        "tasks end before what they need"
    )
    everything = " ".join(part for service in services.values() for part in service.command)
    assert "0.0.0.0" not in everything
    for secret in (keys.fernet_key, keys.jwt_secret, keys.api_secret_key, keys.airflow_password):
        assert secret not in everything
        assert all(secret not in str(service.environ) for service in services.values())


def test_services_without_some(settings: Settings) -> None:
    import dataclasses

    lean = dataclasses.replace(settings, without=("mlflow", "kubelet", "model-server"), triggerer=True)
    names = [s.name for s in platform_services(lean, PORTS, migrate=False, environ={})]
    assert names == ["api-server", "scheduler", "dag-processor", "triggerer"]


def test_only_airflows_tasks_know_the_way_to_kubernetes(settings: Settings) -> None:
    services = {s.name: s for s in platform_services(settings, PORTS, migrate=False, environ={})}
    having = {name for name, s in services.items() if "AIRFLOW_CONN_TRAINYARD_KUBERNETES" in s.environ}
    assert having == {"scheduler", "dag-processor"}
    connection = json.loads(services["scheduler"].environ["AIRFLOW_CONN_TRAINYARD_KUBERNETES"])
    assert connection["extra"]["kube_config_path"] == str(settings.kubeconfig)
    assert services["scheduler"].environ["PYTHONPATH"].split(os.pathsep)[0] == str(REPO / "config")


def test_mlflow_is_told_by_the_names_it_reads(settings: Settings) -> None:
    mlflow = next(
        s for s in platform_services(settings, PORTS, migrate=False, environ={}) if s.name == "mlflow"
    )
    source = installed("mlflow", "server/constants.py")
    names = dict(re.findall(r'^(\w+_ENV_VAR) = "(\w+)"$', source, re.MULTILINE))
    wanted = (
        "BACKEND_STORE_URI",
        "REGISTRY_STORE_URI",
        "ARTIFACT_ROOT",
        "ARTIFACTS_DESTINATION",
        "SERVE_ARTIFACTS",
    )
    assert {names[f"{name}_ENV_VAR"] for name in wanted} <= set(mlflow.environ)
    started = installed("mlflow", "server/__init__.py")
    assert '"mlflow.server.fastapi_app:app" if using_uvicorn' in started, (
        "what `mlflow server` starts in the end"
    )


def test_the_environment_of_components_is_clean() -> None:
    dirty = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "AIRFLOW__CORE__FERNET_KEY": "another Airflow's",
        "AIRFLOW_CONN_TRAINYARD_KUBERNETES": "x",
        "MLFLOW_TRACKING_URI": "http://elsewhere",
        "_MLFLOW_SERVER_FILE_STORE": "x",
        "TRAINYARD_HOME": "x",
        "PYTHONDONTWRITEBYTECODE": "1",
        "http_proxy": "http://proxy:3128",
        "no_proxy": "intranet",
    }
    clean = base_environment(dirty)
    assert clean["HOME"] == "/home/me"
    assert clean["no_proxy"] == "intranet,127.0.0.1,localhost"
    assert clean["NO_PROXY"] == "127.0.0.1,localhost"
    assert clean["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    kept = set(clean) & set(dirty)
    assert kept == {"PATH", "HOME", "http_proxy", "no_proxy"}


def test_what_clients_are_told(settings: Settings) -> None:
    told = client_environment(settings, platform_urls(PORTS))
    assert told["TRAINYARD_MODEL_SERVER"] == "127.0.0.1:8600"
    assert told["TRAINYARD_MODEL_SERVER_REST"] == "http://127.0.0.1:8601"
    assert told["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5001"
    assert told["TRAINYARD_MODEL_CONFIG"] == str(settings.model_config)


def test_an_object_store_is_told_to_tasks_and_pods(tmp_path: Path) -> None:
    environ = {"TRAINYARD_STORE": "s3://yard/team-a", "TRAINYARD_STORE_PATIENCE": "30"}
    settings = Settings.from_environment(environ, home=tmp_path)
    assert Settings.from_json(settings.to_json()) == settings
    told = client_environment(settings, platform_urls(PORTS))
    assert {name: told[name] for name in environ} == environ
    pods = PipelineSettings.from_environment(told)
    assert (pods.store, pods.model_store) == ("s3://yard/team-a", "s3://yard/team-a")
    assert {name: pods.environ[name] for name in environ} == environ
    alone = client_environment(replace(settings, store_patience=""), platform_urls(PORTS))
    assert "TRAINYARD_STORE_PATIENCE" not in alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ()}, "command of 'x' must not be empty"),
        ({"command": ("a",)}, "must either be one_shot or have a probe"),
        (
            {"command": ("a",), "one_shot": True, "probe": lambda _: True},
            "must either be one_shot or have a probe",
        ),
    ],
)
def test_services_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Service("x", "x", **options)  # type: ignore[arg-type]


def test_the_template_is_copied_when_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainyard.platform import template

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    target = tmp_path / "airflow.db"
    assert not template.copy_airflow_database(target)
    template.template_path().parent.mkdir(parents=True)
    template.template_path().write_bytes(b"a database")
    assert template.copy_airflow_database(target)
    assert target.read_bytes() == b"a database"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert template.main() == 0, "there is nothing to do"


def test_the_template_is_made_by_airflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    from trainyard.platform import template

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert template.main() == 0
    connection = sqlite3.connect(template.template_path())
    tables = {row[0] for row in connection.execute("select name from sqlite_master")}
    connection.close()
    assert {"dag", "task_instance", "alembic_version"} <= tables


def test_services_of_this_installation_exist(settings: Settings) -> None:
    for service in platform_services(settings, PORTS, migrate=True):
        assert Path(service.command[0]).exists(), service.command[0]
    assert services_module.HOST == "127.0.0.1"


def test_requests_are_logged_only_when_it_is_asked_for(settings: Settings) -> None:
    import dataclasses

    def command(chosen: Settings) -> tuple[str, ...]:
        services = platform_services(chosen, PORTS, migrate=False)
        return next(service.command for service in services if service.name == "model-server")

    settings.make_folders()
    assert not [flag for flag in command(settings) if "request_log" in flag]
    logged = command(dataclasses.replace(settings, request_log_rate=0.25))
    assert f"--request_log_dir={settings.storage / 'requests'}" in logged
    assert "--request_log_sample_rate=0.25" in logged
