"""Where pipelines run, from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainyard import storage_path
from trainyard.settings import PipelineSettings

from trainers.job.errors import ConfigError, InvalidSpec

FULL = {
    "TRAINYARD_STORAGE": "/data",
    "TRAINYARD_NAMESPACE": "ml",
    "TRAINYARD_IMAGE": "image:1",
    "TRAINYARD_STORAGE_CLAIM": "claim",
    "TRAINYARD_DEFERRABLE": "true",
    "TRAINYARD_MODEL_SERVER": "a:8500, b:8500",
    "TRAINYARD_MODEL_CONFIG": "/data/models.config",
    "MLFLOW_TRACKING_URI": "http://mlflow/",
    "MLFLOW_TRACKING_PASSWORD": "secret",
}


def test_all_settings() -> None:
    settings = PipelineSettings.from_environment(FULL)
    assert settings.serving() == (("a:8500", "b:8500"), "/data/models.config")
    assert (settings.namespace, settings.image, settings.deferrable, settings.mlflow) == (
        "ml",
        "image:1",
        True,
        "http://mlflow",
    )
    assert "secret" not in str(settings.environ)
    assert settings.job_folder("dag", "run") == Path("/data/jobs/dag/run")
    assert settings.job_folder("dag", "run", "second") == Path("/data/jobs/dag/run--second")


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "TRAINYARD_STORAGE"),
        ({"TRAINYARD_STORAGE": "relative"}, "TRAINYARD_STORAGE"),
        ({"TRAINYARD_STORAGE": "/data", "TRAINYARD_DEFERRABLE": "maybe"}, "TRAINYARD_DEFERRABLE"),
    ],
)
def test_a_setting_that_can_not_be_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PipelineSettings.from_environment(environ)


@pytest.mark.parametrize("missing", ["TRAINYARD_MODEL_SERVER", "TRAINYARD_MODEL_CONFIG"])
def test_a_release_needs_a_server(missing: str) -> None:
    environ = {name: value for name, value in FULL.items() if name != missing}
    with pytest.raises(ConfigError, match=missing):
        PipelineSettings.from_environment(environ).serving()


def test_storage_uris_become_paths_within_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PipelineSettings.from_environment(FULL)
    given = {"a": "storage://raw/x", "b": ["storage:///y", 1], "c": "s3://other", "d": None}
    assert settings.resolve(given) == {"a": "/data/raw/x", "b": ["/data/y", 1], "c": "s3://other", "d": None}
    with pytest.raises(InvalidSpec, match="stay within"):
        settings.resolve("storage://../etc/passwd")
    monkeypatch.setenv("TRAINYARD_STORAGE", "/data")
    assert storage_path("raw/x") == storage_path("storage://raw/x") == Path("/data/raw/x")
