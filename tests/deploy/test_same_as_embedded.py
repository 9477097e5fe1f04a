"""docker-compose.yaml starts what the embedded platform starts: same commands, same settings, but for a few.

Each difference is in a table here with its reason, so that a new one has to be decided and not just happen.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from trainyard.kubelet import __main__ as kubelet_main
from trainyard.platform.airflow_config import airflow_options
from trainyard.platform.keys import Keys
from trainyard.platform.ports import PREFERRED
from trainyard.platform.services import Service, platform_services
from trainyard.platform.settings import Settings

from serving.server import flags as model_server_flags
from tests.deploy import compose_file

COMPOSE = compose_file.services()
PORTS = dict(PREFERRED)
DATA = Path("/var/lib/trainyard")
SETTINGS = Settings(home=DATA, storage=DATA / "storage", triggerer=True)
KEYS = Keys("fernet", "api", "jwt", "password", DATA / "secrets" / "passwords.json")
ENVIRON = {name: value for name, value in compose_file.env_example().items() if value}


def embedded() -> dict[str, Service]:
    services = platform_services(SETTINGS, PORTS, migrate=True, environ={"PATH": os.defpath})
    return {service.name: service for service in services}


def flags(command: list[str]) -> dict[str, str]:
    """--name=value arguments; those without a value as "true"."""
    pairs = (argument[2:].partition("=") for argument in command if argument.startswith("--"))
    return {name.replace("-", "_"): value or "true" for name, _, value in pairs}


def in_compose(name: str) -> list[str]:
    return compose_file.interpolated(compose_file.command(COMPOSE[name]), ENVIRON)


def environment(name: str) -> dict[str, Any]:
    return compose_file.interpolated(COMPOSE[name]["environment"], ENVIRON)


@pytest.mark.parametrize(
    ("compose", "platform"),
    [
        ("airflow-init", "airflow-db"),
        ("airflow-api-server", "api-server"),
        ("airflow-scheduler", "scheduler"),
        ("airflow-dag-processor", "dag-processor"),
        ("airflow-triggerer", "triggerer"),
    ],
)
def test_airflow_s_commands_are_the_same(compose: str, platform: str) -> None:
    command = list(embedded()[platform].command)
    assert in_compose(compose) == [Path(command[0]).name, *command[1:]]


# Airflow's settings that differ, and why.
DIFFERENT_OPTIONS = {
    "core.dags_folder": "in the image",
    "core.plugins_folder": "in the image",
    "core.parallelism": "PostgreSQL bears more tasks at once than SQLite",
    "core.max_active_tasks_per_dag": "as core.parallelism",
    "core.execution_api_server_url": "the api-server's name on the compose network",
    "core.fernet_key": "from .env",
    "core.simple_auth_manager_passwords_file": "a volume",
    "api.host": "the container's own network; the port is published on loopback",
    "api.base_url": "the published port",
    "api.secret_key": "from .env",
    "api_auth.jwt_secret": "from .env",
    "database.sql_alchemy_conn": "PostgreSQL",
    "scheduler.enable_health_check": "compose asks the scheduler itself",
    "logging.base_log_folder": "a volume",
    "logging.dag_processor_child_process_log_directory": "a volume",
}


def test_airflow_s_settings_are_the_same_but_for_those_named_here() -> None:
    options = {
        f"{section}.{key}": value
        for section, values in airflow_options(SETTINGS, KEYS, PORTS["airflow"]).items()
        for key, value in values.items()
    }
    dockerfile = (compose_file.ROOT / "deploy/docker/airflow.Dockerfile").read_text()
    given = {
        ".".join(name.removeprefix("AIRFLOW__").lower().split("__")): value
        for name, value in environment("airflow-scheduler").items()
        if name.startswith("AIRFLOW__")
    }
    for option in ("core.dags_folder", "core.plugins_folder"):
        section, key = option.upper().split(".")
        assert f"AIRFLOW__{section}__{key}=" in dockerfile
        given[option] = "in the image"
    assert set(given) == set(options)
    assert {name for name in options if options[name] != given[name]} <= set(DIFFERENT_OPTIONS)
    assert set(DIFFERENT_OPTIONS) <= set(options)


def test_all_of_airflow_runs_with_one_environment() -> None:
    airflow = {name for name in COMPOSE if name.startswith("airflow-")}
    assert len(airflow) == 5
    assert all(environment(name) == environment("airflow-scheduler") for name in airflow)


def test_pipelines_find_the_same_things() -> None:
    platform, compose = embedded()["scheduler"].environ, environment("airflow-scheduler")
    names = {name for name in platform if name.startswith(("TRAINYARD_", "MLFLOW_"))}
    # The image is the embedded platform's own interpreter; MLflow's URI and the servers' are host names here.
    assert names == {name for name in compose if name.startswith(("TRAINYARD_", "MLFLOW_"))} - {
        "TRAINYARD_IMAGE"
    }
    for name in (
        "TRAINYARD_STORAGE",
        "TRAINYARD_NAMESPACE",
        "TRAINYARD_MODEL_CONFIG",
        "MLFLOW_DISABLE_TELEMETRY",
    ):
        assert compose[name] == platform[name], name


def test_the_model_server_has_flags_that_the_embedded_one_knows_too() -> None:
    command = in_compose("model-server")
    own = [
        argument for argument in command[1:] if not argument.startswith("--enable_grpc_healthcheck_service")
    ]
    options = model_server_flags.parse(own)
    assert str(options.model_config_file) == environment("airflow-scheduler")["TRAINYARD_MODEL_CONFIG"]
    assert options.port == PORTS["model-grpc"]
    assert options.rest_api_port == PORTS["model-rest"]
    theirs, ours = flags(list(embedded()["model-server"].command)), flags(command)
    # TF Serving waits for its file by polling it; the embedded server tells when it is ready by a file.
    for name in set(theirs) - {"ready_file"}:
        assert ours[name] == theirs[name], name


def test_mlflow_serves_artifacts_with_one_worker_and_no_jobs() -> None:
    theirs, ours = embedded()["mlflow"], flags(in_compose("mlflow"))
    assert ours["workers"] == flags(list(theirs.command))["workers"] == "1"
    assert ours["port"] == flags(list(theirs.command))["port"]
    assert ours["serve_artifacts"] == "true"
    job_execution = "MLFLOW_SERVER_ENABLE_JOB_EXECUTION"
    assert environment("mlflow")[job_execution] == theirs.environ[job_execution] == "false"
    # Clients in containers and people's browsers, nobody else: a page of another name is refused.
    hosts = ours["allowed_hosts"].split(",")
    assert environment("airflow-scheduler")["MLFLOW_TRACKING_URI"].removeprefix("http://") in hosts
    assert "*" not in hosts


def test_the_kubelet_has_flags_that_it_knows_and_the_connection_points_at_its_kubeconfig() -> None:
    command = in_compose("kubelet")
    assert command[:3] == ["python", "-m", "trainyard.kubelet"]
    given = kubelet_main._parser().parse_args(command[3:])
    connection = environment("airflow-scheduler")["AIRFLOW_CONN_TRAINYARD_KUBERNETES"]
    assert f'"kube_config_path": "{given.kubeconfig}"' in connection
    theirs, ours = flags(list(embedded()["kubelet"].command)), flags(command)
    # Loopback is the container's own here, so it listens on the compose network, under its service's name.
    assert set(ours) - set(theirs) <= {"host", "advertise"}
    for name in ("port", "namespace", "preload"):
        assert ours[name] == theirs[name], name
    assert ours["advertise"] in COMPOSE
    assert set(theirs) <= set(ours)
