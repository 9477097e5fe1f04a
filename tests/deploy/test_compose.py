"""docker-compose.yaml: valid, hardened, without a working default password, nothing beyond loopback.

compose-spec.json beside this file is the Compose Specification's schema (Apache-2.0, Docker, Inc.), as the PyPI
package check-jsonschema 0.39.0 ships it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.deploy import compose_file
from tests.deploy.compose_file import COMPOSE, ROOT, VARIABLE, is_one_shot

SERVICES = compose_file.services()
EACH = pytest.mark.parametrize("name", sorted(SERVICES))
SECRET_NAME = re.compile(r"PASSWORD(?!S_FILE)|SECRET|_KEY|TOKEN")
OURS = {"trainyard-airflow", "trainyard-mlflow", "trainyard-trainer"}


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    else:
        yield str(value)


def variables() -> dict[str, list[re.Match[str]]]:
    found: dict[str, list[re.Match[str]]] = {}
    for text in texts(SERVICES):
        for match in VARIABLE.finditer(text):
            found.setdefault(match["name"], []).append(match)
    return found


def test_the_file_follows_the_compose_specification() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    example = {name: value or "x" for name, value in compose_file.env_example().items()}
    document = compose_file.interpolated(compose_file.raw(), example)
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [f"{e.json_path}: {e.message}" for e in validator.iter_errors(document)] == []


def docker_compose() -> list[str] | None:
    """The command of Docker Compose 2, where there is one; it needs no engine to check a file."""
    for candidate in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(candidate[0]) is None:
            continue
        asked = subprocess.run([*candidate, "version"], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and re.search(r"\bv?[2-9]\d*\.\d+", asked.stdout):
            return candidate
    return None


@pytest.mark.skipif(
    docker_compose() is None, reason="no Docker Compose 2 on this machine: the schema test stands alone"
)
def test_docker_compose_accepts_the_file_with_made_secrets_and_refuses_it_without(tmp_path: Path) -> None:
    made = tmp_path / "env"
    subprocess.run([ROOT / "deploy/compose/make-env", "--output", made], check=True, capture_output=True)
    config = [*(docker_compose() or []), "--file", str(COMPOSE), "--env-file"]
    accepted = subprocess.run(
        [*config, made, "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert (accepted.returncode, accepted.stderr) == (0, "")
    refused = subprocess.run(
        [*config, ROOT / ".env.example", "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0
    assert "run deploy/compose/make-env" in refused.stderr


@EACH
def test_a_service_is_a_step_that_ends_or_says_how_it_is(name: str) -> None:
    service = SERVICES[name]
    if is_one_shot(service):
        assert "healthcheck" not in service
        assert "ports" not in service
    else:
        assert service["restart"] == "unless-stopped"
        check = service["healthcheck"]
        assert check["test"][0] == "CMD"
        assert {"interval", "timeout", "retries", "start_period"} <= set(check)


@EACH
def test_images_have_exact_tags(name: str) -> None:
    repository, _, tag = SERVICES[name]["image"].rpartition(":")
    assert re.search(r"\d+[.-]\d+[.-]\d+|\d+\.\d+", tag), f"{tag} must be an exact release"
    if repository in OURS:
        version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
        assert version is not None
        assert tag == version[1]
        assert (ROOT / SERVICES[name]["build"]["dockerfile"]).is_file()
    else:
        assert "build" not in SERVICES[name]


@EACH
def test_secrets_come_from_the_env_file_and_have_no_default(name: str) -> None:
    for key, value in SERVICES[name].get("environment", {}).items():
        if SECRET_NAME.search(key):
            assert re.fullmatch(r"\$\{\w+:\?.+\}", value), f"{key} must be ${{NAME:?message}}, got {value}"
        for user, password in re.findall(r"//([^/:@]+):([^@]+)@", value):
            assert password.startswith("${"), f"{key} has a literal password of {user}"
            assert ":?" in password, f"the password in {key} must have no default"


@EACH
def test_no_secret_is_on_a_command_line(name: str) -> None:
    used = {
        match["name"] for text in compose_file.command(SERVICES[name]) for match in VARIABLE.finditer(text)
    }
    assert not [variable for variable in used if SECRET_NAME.search(variable)]


@EACH
def test_only_loopback_ports_are_published(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{TRAINYARD_\w+_PORT:-\d+\}:\d+", port), port


def test_what_holds_data_or_runs_pods_publishes_nothing() -> None:
    assert {name for name, service in SERVICES.items() if "ports" in service} == {
        "airflow-api-server",
        "mlflow",
        "model-server",
    }


@EACH
def test_containers_have_no_privileges_to_lose(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["init"] is True
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode"} & set(service)
    assert service.get("network_mode", "none") == "none"
    limits = service["deploy"]["resources"]["limits"]
    assert {"memory", "pids"} <= set(limits)
    if service["image"].rpartition(":")[0] not in OURS:  # ours say USER themselves
        assert service["user"] in ("postgres", "10001:10001")


@EACH
def test_mounts_are_declared_volumes_or_read_only_files_of_the_repo(name: str) -> None:
    declared = set(compose_file.raw()["volumes"])
    for mount in SERVICES[name].get("volumes", []):
        source, target, *options = mount.split(":")
        assert target.startswith("/")
        if source.startswith("."):
            assert (ROOT / source).exists()
            assert options == ["ro"]
        else:
            assert source in declared


def test_every_volume_and_network_is_used() -> None:
    raw = compose_file.raw()
    mounted = {mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])}
    joined = {network for service in SERVICES.values() for network in service.get("networks", [])}
    assert set(raw["volumes"]) == {source for source in mounted if not source.startswith(".")}
    assert set(raw["networks"]) == joined


@EACH
def test_a_service_waits_for_what_it_needs(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        wanted = "service_completed_successfully" if is_one_shot(SERVICES[needed]) else "service_healthy"
        assert how == {"condition": wanted}, f"{name} -> {needed}"


def test_no_service_waits_for_itself() -> None:
    def needs(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        for needed in SERVICES[name].get("depends_on", {}):
            needs(needed, (*path, name))

    for name in SERVICES:
        needs(name, ())


def test_pods_reach_neither_the_database_nor_the_artifact_store() -> None:
    networks = compose_file.raw()["networks"]
    assert networks["database"]["internal"] is networks["artifacts"]["internal"] is True
    on = {name: set(service.get("networks", [])) for name, service in SERVICES.items()}
    assert on["kubelet"] == on["model-server"] == {"platform"}
    assert {name for name, joined in on.items() if "artifacts" in joined} == {"minio", "minio-init", "mlflow"}
    assert on["postgres"] == {"database"}


def test_the_env_example_names_every_variable_and_no_other() -> None:
    example = compose_file.env_example()
    assert set(variables()) == set(example)
    for name, matches in variables().items():
        for match in matches:
            if match["how"] == "?":
                assert example[name] == "", f"{name} is required: .env.example must leave it empty"
            else:
                assert (match["how"], match["rest"]) == ("-", example[name])


def test_the_databases_script_makes_a_user_each_and_no_literal_password() -> None:
    script = (ROOT / "deploy/compose/postgres/10-databases.sql").read_text()
    environ = SERVICES["postgres"]["environment"]
    for user in ("airflow", "mlflow"):
        variable = f"{user.upper()}_DB_PASSWORD"
        assert f"\\getenv {user}_password {variable}" in script
        assert variable in environ
        assert f"CREATE DATABASE {user} OWNER {user}" in script
        assert f"REVOKE ALL ON DATABASE {user} FROM PUBLIC" in script
    assert set(re.findall(r"PASSWORD (\S+);", script)) == {":'airflow_password'", ":'mlflow_password'"}


def test_the_artifact_user_may_use_one_bucket_and_administer_nothing() -> None:
    policy = json.loads((ROOT / "deploy/compose/minio/mlflow-artifacts.json").read_text())
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        assert all(re.fullmatch(r"s3:[A-Za-z]+", action) for action in statement["Action"])
        assert all(re.fullmatch(r"arn:aws:s3:::mlflow(/\*)?", resource) for resource in statement["Resource"])
    assert SERVICES["mlflow"]["environment"]["MLFLOW_ARTIFACTS_DESTINATION"] == "s3://mlflow"
    script = ROOT / "deploy/compose/minio/init.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    # `docker exec ... ps` shows command lines: no line of mc's may carry the secret.
    lines = script.read_text().splitlines()
    assert not [
        line for line in lines if re.search(r"\bmc\b[^|]*(SECRET|PASSWORD)", line) and "export" not in line
    ]
