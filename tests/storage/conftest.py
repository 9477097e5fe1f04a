"""Gangs whose replicas share nothing but a real S3 server."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import Door, credentials, make_bucket, running_moto
from trainers.job import labels
from trainers.job.plan import Cluster, Plan, ReplicaPlan, make_plan
from trainers.job.ports import free_ports
from trainers.job.record import JobRecord
from trainers.job.spec import Budgets, Strategy, TrainingJob, standard_roles
from trainers.models.digits_raw import write_raw
from trainers.records.build import prepare
from trainers.runtime.local_gang import GangResult, LocalGang
from trainers.storage.mirror import Mirror
from trainers.storage.objects import ObjectStore
from trainers.storage.places import on_the_way

LIMIT = 800.0  # seconds; a guard against hanging


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running S3 server."""
    with running_moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture
def door(moto: int) -> Iterator[Door]:
    """The way to the S3 server, of this test alone."""
    door = Door(moto)
    yield door
    door.shut()


@pytest.fixture
def bucket(door: Door, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place in the store; this process and its children have its credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in credentials(door.port).items():
        monkeypatch.setenv(name, value)
    return make_bucket()


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    """The store at `bucket`."""
    return ObjectStore(bucket)


@pytest.fixture(scope="session")
def digits_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage root that holds the digits' records alone; they are at records/digits."""
    root = tmp_path_factory.mktemp("digits")
    write_raw(root / "raw", progress=lambda _: None)
    prepare(root / "raw", root / "records" / "digits", name="digits", label="label", progress=lambda _: None)
    return root


class StoreGang(LocalGang):
    """A gang whose replicas have each a storage root of their own, and nothing in common but the store."""

    def __init__(self, plan: Plan, mirror: Mirror, folder: Path, **options: Any) -> None:
        super().__init__(plan, **options)
        self.mirror = mirror
        self.folder = folder
        mirror.push("", lambda _: True)

    def root(self, name: str) -> Path:
        """The storage root of a replica's pod."""
        return self.folder / "pods" / name

    def _start(self, replica: ReplicaPlan) -> None:
        root = self.root(replica.replica)
        command = [sys.executable, "-m", "trainers.storage.pod", *replica.command]
        job = root / self.record.folder.relative_to(self.mirror.root)
        env = {
            **self._env,
            **replica.env,
            "TRAINYARD_STORE": self.mirror.store.url,
            "TRAINYARD_STORAGE": str(root),
            labels.ENV_JOB: str(job),
            labels.ENV_TERMINATION_LOG: str(self.termination_file(replica.replica)),
        }
        self.launchers[replica.replica] = self._launch(command, env, self.logs / f"{replica.replica}.log")

    def look(self) -> JobRecord:
        """The job's record as the store has it."""
        key = self.mirror.key(self.record.folder)
        self.mirror.pull(key, lambda k: not k.startswith(f"{key}/checkpoints/"))
        return self.record

    def wait(self, seconds: float = LIMIT) -> GangResult:
        """Until all have ended; the outcome is the store's."""
        result = super().wait(seconds)
        self.look()
        return GangResult(self.record.outcome(), result.exit_codes, result.seconds)


@pytest.fixture
def make_gang(store: ObjectStore, tmp_path: Path, digits_records: Path) -> Iterator[Callable[..., StoreGang]]:
    """Makes a gang on the digits: `make_gang(steps=..., workers=..., ps=...)`."""
    made: list[StoreGang] = []

    def make(
        name: str = "job",
        *,
        strategy: str = "parameter_server",
        workers: int = 1,
        ps: int = 1,
        evaluator: bool = False,
        budgets: Budgets | None = None,
        retries: int = 0,
        trainer: str = "trainers.models.digits",
        **args: Any,
    ) -> StoreGang:
        root = tmp_path / "airflow"
        if not root.exists():
            shutil.copytree(digits_records / "records", root / "records")
        mirror = Mirror(store, root, rewrite=on_the_way(root))
        (manifest,) = (root / "records" / "digits").glob("*/manifest.json")
        kind = Strategy.from_dict(strategy)
        count = 1 + workers + ps + evaluator
        job = TrainingJob(
            name,
            trainer,
            args={"batch_size": 64, "seed": 1, **args},
            roles=standard_roles(kind, workers=workers, ps=ps, evaluator=evaluator),
            strategy=kind,
            budgets=budgets or Budgets(start=120.0, stall=120.0),
            inputs={"records": str(manifest)},
            output=str(root / "jobs" / "p" / name),
        )
        plan = make_plan(job, Cluster.process(free_ports(count)), gang="gang-12345678")
        gang = StoreGang(plan, mirror, tmp_path, retries=retries)
        made.append(gang)
        return gang

    yield make
    for gang in made:
        gang.stop()
