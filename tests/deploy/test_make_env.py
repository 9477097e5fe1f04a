"""deploy/compose/make-env: complete, private, repeatable."""

from __future__ import annotations

import importlib.util
import re
import stat
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.compose_file import ROOT, env_example

SCRIPT = ROOT / "deploy" / "compose" / "make-env"


@pytest.fixture(scope="module")
def make_env() -> ModuleType:
    loader = SourceFileLoader("make_env", str(SCRIPT))
    spec = importlib.util.spec_from_loader("make_env", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run(output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, "--output", output], capture_output=True, text=True, check=False)


def test_it_fills_every_secret_and_shows_none(make_env: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / ".env"
    done = run(output)
    assert (done.returncode, done.stderr) == (0, "")
    values = make_env.assignments(output.read_text())
    assert set(values) == set(env_example())
    assert all(values.values())
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    made = {name for name, value in env_example().items() if not value}
    assert not [name for name in made if values[name] in done.stdout]
    assert len({values[name] for name in made}) == len(made)


def test_run_again_it_keeps_what_is_there_and_fills_in_what_is_missing(
    make_env: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / ".env"
    output.write_text("AIRFLOW_ADMIN_PASSWORD=chosen-by-hand\nTRAINYARD_AIRFLOW_PORT=9090\nMY_OWN=1\n")
    output.chmod(0o644)
    assert run(output).returncode == 0
    first = make_env.assignments(output.read_text())
    assert first["AIRFLOW_ADMIN_PASSWORD"] == "chosen-by-hand"
    assert first["TRAINYARD_AIRFLOW_PORT"] == "9090"
    assert first["MY_OWN"] == "1"
    assert first["POSTGRES_PASSWORD"]
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert run(output).returncode == 0
    assert make_env.assignments(output.read_text()) == first
    assert [path.name for path in tmp_path.iterdir()] == [".env"]


def test_there_is_a_generator_for_every_empty_value(make_env: ModuleType) -> None:
    assert set(make_env.GENERATORS) == {name for name, value in env_example().items() if not value}


def test_secrets_are_long_and_safe_in_urls_shells_and_env_files(make_env: ModuleType) -> None:
    for name, generate in make_env.GENERATORS.items():
        value = generate()
        assert re.fullmatch(r"[A-Za-z0-9_=-]+", value), name
        assert value != generate(), name
        if not name.endswith(("_USER", "ACCESS_KEY")):
            assert len(value) >= 20, name
    # MinIO refuses longer ones.
    assert 3 <= len(make_env.GENERATORS["MLFLOW_S3_ACCESS_KEY"]()) <= 20
    assert 8 <= len(make_env.GENERATORS["MLFLOW_S3_SECRET_KEY"]()) <= 40


def test_the_fernet_key_is_one(make_env: ModuleType) -> None:
    from cryptography.fernet import Fernet

    key = Fernet(make_env.GENERATORS["AIRFLOW_FERNET_KEY"]())
    assert key.decrypt(key.encrypt(b"x")) == b"x"


def test_a_place_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "missing" / ".env")
    assert done.returncode == 1
    assert "could not write" in done.stderr
    assert "missing/.env" in done.stderr


def test_a_made_env_is_never_committed() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
