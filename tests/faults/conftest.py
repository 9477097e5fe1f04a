"""Gangs of real processes on the digits."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainers.job.plan import Cluster, make_plan
from trainers.job.ports import free_ports
from trainers.job.spec import Budgets, Strategy, TrainingJob, standard_roles
from trainers.models.digits_raw import write_raw
from trainers.records.build import prepare
from trainers.runtime.local_gang import LocalGang


def quiet(_line: str) -> None:
    """No progress in tests."""


@pytest.fixture(scope="session")
def digits_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of the digits' records."""
    folder = tmp_path_factory.mktemp("digits")
    write_raw(folder / "raw", progress=quiet)
    return Path(
        prepare(folder / "raw", folder / "records", name="digits", label="label", progress=quiet).path
    )


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """The processes of a job, found by its folder in their environment."""

    folder: Path

    def pids(self, *, name: str = "") -> list[int]:
        """Those that run, of one replica ("worker-0") or of all; dead ones that nobody has looked at yet do not."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                env = dict(pair.partition("=")[::2] for pair in path.read_text().split("\0"))
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            replica = f"{env.get('TRAINYARD_ROLE')}-{env.get('TRAINYARD_INDEX')}"
            if env.get("TRAINYARD_JOB") == str(self.folder) and state != "Z" and name in ("", replica):
                found.append(int(path.parent.name))
        return sorted(found)


class Gang(LocalGang):
    """A gang with what tests ask of it."""

    def until(self, what: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Wait until something holds; the value. Fails with the logs when it does not, or the gang has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            if self.poll():
                break
            time.sleep(0.02)
        logs = "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.exit_codes)
        raise AssertionError(f"it did not happen; exit codes {self.exit_codes}\n{logs}")

    def until_step(self, step: int) -> int:
        """Wait until the chief has finished so many steps."""

        def reached() -> int:
            beat = self.record.heartbeat("chief", 0)
            return (
                beat.step if beat and beat.phase in ("training", "saving") and (beat.step or 0) >= step else 0
            )

        return int(self.until(reached))

    def trainer_pid(self, role: str, index: int = 0) -> int:
        """The process of a replica's present attempt."""
        return self.record.attempts(role, index)[-1].pid

    def kill_trainer(self, role: str, index: int = 0, number: int = 9) -> None:
        """SIGKILL a replica's trainer, as the kernel does when memory is short."""
        os.kill(self.trainer_pid(role, index), number)

    def leftovers(self) -> list[int]:
        """Processes of the job that still run, a moment after its end."""
        deadline = time.monotonic() + 5
        while (pids := Leftovers(self.record.folder).pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return pids


@pytest.fixture
def gang(tmp_path: Path, digits_manifest: Path) -> Iterator[Callable[..., Gang]]:
    """Makes gangs on the digits, and ends them."""
    made: list[Gang] = []

    def make(
        strategy: str = "parameter_server",
        *,
        workers: int = 0,
        ps: int = 0,
        trainer: str = "trainers.models.digits",
        budgets: Mapping[str, float] | None = None,
        retries: int = 0,
        env: Mapping[str, str] | None = None,
        manifest: Path | None = None,
        evaluator: bool = False,
        **args: Any,
    ) -> Gang:
        kind = Strategy.from_dict(strategy)
        job = TrainingJob(
            "digits",
            trainer,
            args={"batch_size": 64, "learning_rate": 0.003, **args},
            roles=standard_roles(kind, workers=workers, ps=ps, evaluator=evaluator),
            strategy=kind,
            budgets=Budgets(**{"start": 120.0, "stall": 60.0, **(budgets or {})}),
            inputs={"records": str(manifest or digits_manifest)},
            output=str(tmp_path / "job"),
        )
        plan = make_plan(
            job, Cluster.process(free_ports(1 + workers + ps + evaluator)), gang="digits-12345678"
        )
        made.append(Gang(plan, env=env, retries=retries))
        return made[-1]

    yield make
    for each in made:
        each.stop()
        assert each.leftovers() == []
