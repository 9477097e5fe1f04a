"""The whole platform, started once: Airflow's scheduler, the process kubelet, MLflow and the model server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from trainyard.platform import Platform, Settings

from tests.pipeline_runs import Run, runner

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("platform") / "home"
    dags = tmp_path_factory.mktemp("dags")
    examples = REPO / "docs" / "examples"
    for name in ("wine_checked.py", "flights_on_new_records.py", "line_weekly.py"):
        (dags / name).symlink_to(examples / name)
    for file in (*(REPO / "dags").glob("*.py"), *(REPO / "tests" / "pipeline" / "dags").glob("*.py")):
        (dags / file.name).symlink_to(file)
    settings = replace(Settings.from_environment({}, home=home), dags=dags)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(examples)  # where the example's trainer module is, for its pods
    try:
        with Platform(settings=settings).running() as running:
            yield running
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def run_dag(platform: Platform) -> Callable[..., Run]:
    """Triggers a DAG, waits for its end and gives the run; `meanwhile` is called with its id again and again."""
    return runner(platform)
