"""Jobs on the digits' records, for tests of the runtime."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainers.job import labels
from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.record import JobRecord
from trainers.job.spec import Budgets, RestartPolicy, Strategy, Success, TrainingJob, standard_roles
from trainers.lean import import_tensorflow
from trainers.models.digits_raw import write_raw
from trainers.records.build import prepare

# What any replica has in its environment before TensorFlow is loaded, and what the launcher loads it with.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import_tensorflow()


@pytest.fixture(scope="session")
def digits_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of the digits' records."""
    folder = tmp_path_factory.mktemp("digits")
    write_raw(folder / "raw", progress=lambda _: None)
    manifest = prepare(
        folder / "raw", folder / "records", name="digits", label="label", progress=lambda _: None
    )
    return Path(manifest.path)


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Makes recorded jobs below a folder."""

    folder: Path
    manifest: Path | None

    def plan(
        self,
        name: str = "job",
        *,
        strategy: str = "local",
        workers: int = 0,
        ps: int = 0,
        trainer: str = "trainers.models.digits",
        budgets: Mapping[str, float] | None = None,
        caps: Mapping[str, int] | None = None,
        evaluator: bool = False,
        success: Success | None = None,
        **args: Any,
    ) -> Plan:
        """The plan of a new job, recorded."""
        kind = Strategy.from_dict(strategy)
        job = TrainingJob(
            name,
            trainer,
            args={"batch_size": 64, "seed": 1, **args},
            roles=standard_roles(kind, workers=workers, ps=ps, evaluator=evaluator),
            strategy=kind,
            budgets=Budgets(**(budgets or {})),
            restart=RestartPolicy(caps or {}),
            success=success or Success(),
            inputs={"records": str(self.manifest)} if self.manifest else {},
            output=str(self.folder / name),
        )
        ports = range(20001, 20001 + 1 + workers + ps + evaluator)
        plan = make_plan(job, Cluster.process(ports), gang="gang-12345678")
        JobRecord.create(plan)
        return plan


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """Jobs without records."""
    return Jobs(tmp_path, None)


@pytest.fixture
def digits_jobs(tmp_path: Path, digits_manifest: Path) -> Jobs:
    """Jobs on the digits."""
    return Jobs(tmp_path, digits_manifest)


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where termination messages of this process go."""
    path = tmp_path / "termination.json"
    monkeypatch.setenv(labels.ENV_TERMINATION_LOG, str(path))
    return path


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a trainer module that can be imported by its name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    written: list[str] = []

    def write(name: str, text: str) -> str:
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
