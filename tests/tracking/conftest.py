"""Jobs with spools, and a real MLflow server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mlflow_server import MlflowServer
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import JobRecord
from trainers.job.spec import TrainingJob


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A tracking server on SQLite that every test may use and none may stop."""
    running = MlflowServer(tmp_path_factory.mktemp("mlflow")).start()
    yield running
    running.stop()


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of a job."""

    def make(run: str = "run-1", name: str = "digits") -> Path:
        folder = tmp_path / "jobs" / f"{name}_retrain" / run
        job = TrainingJob(name, "trainers.models.digits", inputs={"records": "r"}, output=str(folder))
        JobRecord.create(make_plan(job, Cluster.process([1]), gang=name))
        return folder

    return make
