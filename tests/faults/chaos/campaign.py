"""Jobs back to back, and blows to them."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.chaos.blows import Blow, Kind, Watcher, kinds_for, restarts_chief, stall_of, strike
from tests.faults.repeats import repeated_steps
from trainers.job.errors import TrainyardError
from trainers.job.plan import Cluster, make_plan
from trainers.job.ports import free_ports
from trainers.job.record import JobState
from trainers.job.spec import Budgets, Strategy, TrainingJob, standard_roles
from trainers.models.digits_raw import write_raw
from trainers.records.build import prepare
from trainers.runtime.local_gang import LocalGang, leftovers
from trainers.runtime.strategies import check_supported

__all__ = ["STRATEGIES", "Campaign", "JobReport", "runnable"]

HOPELESS = 240.0  # seconds without a step after a blow: the job is lost
STALL = 12.0  # the jobs' stall budget, which a stopped process is found by
EVERY = 500  # steps between checkpoints


@dataclasses.dataclass(frozen=True)
class Shape:
    """A strategy with its replicas; `steps` keep a job busy for about a minute on 2 cores."""

    strategy: Strategy
    workers: int
    ps: int
    steps: int

    def job(self, name: str, manifest: Path, output: Path, steps: int | None) -> TrainingJob:
        return TrainingJob(
            name,
            "trainers.models.digits",
            args={
                "batch_size": 64,
                "learning_rate": 0.001,
                "steps": steps or self.steps,
                "checkpoint_every": EVERY,
            },
            roles=standard_roles(self.strategy, workers=self.workers, ps=self.ps),
            strategy=self.strategy,
            budgets=Budgets(start=120.0, stall=STALL),
            inputs={"records": str(manifest)},
            output=str(output),
        )


STRATEGIES = {
    "parameter_server": Shape(Strategy.from_dict("parameter_server"), 2, 2, 20_000),
    "parameter_server_sync": Shape(
        Strategy.from_dict({"kind": "parameter_server", "sync": True, "backup_workers": 1}), 3, 1, 6_000
    ),
    "multi_worker": Shape(Strategy.from_dict("multi_worker"), 1, 0, 20_000),
}
MEASURED = {
    "parameter_server": (Kind("worker"), Kind("ps"), Kind("chief")),
    "parameter_server_sync": (Kind("worker"), Kind("ps"), Kind("chief")),
    "multi_worker": (Kind("worker"), Kind("chief")),
}


def runnable(name: str) -> bool:
    """Whether this version can run a strategy."""
    try:
        check_supported(STRATEGIES[name].job(name, Path("manifest.json"), Path("job"), 1))
    except TrainyardError:
        return False
    return True


@dataclasses.dataclass
class JobReport:
    """One job: whether it arrived at exactly its steps, what it repeated at each restart, the time, who was left."""

    name: str
    arrived: bool
    repeated: list[int]
    seconds: float
    left_over: int
    why: str = ""


class Campaign:
    """Blows and jobs, and what came of them."""

    def __init__(self, folder: Path, *, seed: int, steps: int | None = None) -> None:
        self.folder = folder
        self.seed = seed
        self.blows: list[Blow] = []
        self.jobs: list[JobReport] = []
        self.first_steps: list[str] = []
        self._rng = random.Random(seed)
        self._steps = steps
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        write_raw(folder / "raw", progress=lambda _: None)
        self._manifest = Path(
            prepare(
                folder / "raw", folder / "records", name="digits", label="label", progress=lambda _: None
            ).path
        )

    @property
    def lost(self) -> int:
        """Jobs that did not arrive."""
        return sum(not job.arrived for job in self.jobs)

    @property
    def left_over(self) -> int:
        """Processes that outlived their job."""
        return sum(job.left_over for job in self.jobs)

    def run(self, strategies: Sequence[str], *, minutes: float) -> None:
        """Random blows for so long; the job that runs at the end is let finish."""
        until = time.monotonic() + 60 * minutes
        number = 0
        while time.monotonic() < until:
            self._job(strategies[number % len(strategies)], number, until=until)
            number += 1

    def measure(self, strategies: Sequence[str], n: int) -> None:
        """`n` blows of each kind that has a target, in turn."""
        for number, name in enumerate(strategies):
            self._job(name, number, plan=[kind for _ in range(n) for kind in MEASURED[name]])

    # ---- one job

    def _job(self, name: str, number: int, *, until: float = 0.0, plan: Sequence[Kind] | None = None) -> None:
        shape = STRATEGIES[name]
        steps = self._steps or (shape.steps if plan is None else 10_000_000)
        output = self.folder / f"{number:03d}-{name}"
        job = shape.job(name, self._manifest, output, steps)
        ports = free_ports(1 + shape.workers + shape.ps)
        began = time.monotonic()
        self._say(f"{output.name}: {steps} steps")
        why = ""
        with LocalGang(
            make_plan(job, Cluster.process(ports), gang=f"chaos-{number:08d}"), retries=99
        ) as gang:
            gang.start()
            try:
                self._strike_on(gang, name, until, list(plan) if plan is not None else None)
            except Lost as e:
                why = str(e)
            outcome = gang.record.outcome()
            if plan is None and not why:
                outcome = gang.wait(HOPELESS).outcome
        arrived = outcome is not None and (outcome.state, outcome.step) == (JobState.SUCCEEDED, steps)
        if plan is not None and not why and (outcome is None or outcome.state is JobState.SUCCEEDED):
            arrived = True  # measured enough, and ended by us
        elif not arrived and not why:
            why = (
                outcome.failure.card()
                if outcome and outcome.failure
                else f"ended without arriving: {outcome}"
            )
        logs = {path.stem: path.read_text(errors="replace") for path in gang.logs.glob("*.log")}
        self.first_steps += re.findall(
            r"^chief-0 has made its first step: .*", logs.get("chief-0", ""), re.MULTILINE
        )
        report = JobReport(
            output.name,
            arrived,
            repeated_steps(gang.record, logs.get("chief-0", "")),
            time.monotonic() - began,
            len(leftovers(output, patience=5.0)),
            why,
        )
        self.jobs.append(report)
        self._say(f"{output.name}: {'arrived' if arrived else 'LOST: ' + why}, {report.left_over} left over")

    def _strike_on(self, gang: LocalGang, name: str, until: float, plan: list[Kind] | None) -> None:
        watcher = Watcher(gang)
        kinds = kinds_for(gang)
        while True:
            if not self._wait(gang, watcher, watcher.moving):
                return
            calm = self._rng.uniform(1.0, 6.0) if plan is None else 5.0
            end_of_calm = time.monotonic() + calm
            if not self._wait(gang, watcher, lambda e=end_of_calm: time.monotonic() > e):
                return
            if plan is None and time.monotonic() > until:
                return
            if plan is not None and not plan:
                return
            kind = plan.pop(0) if plan is not None else self._rng.choice(kinds)
            self._one(gang, watcher, name, kind)

    def _one(self, gang: LocalGang, watcher: Watcher, name: str, kind: Kind) -> None:
        beat = watcher.look()
        assert beat is not None
        blow = Blow(name, kind, time.time(), beat.step or 0)
        if gang.record.outcome() is not None or not strike(gang, kind, self._rng):
            return
        self.blows.append(blow)
        anew = restarts_chief(gang, kind)

        def over() -> bool:
            blow.stall = stall_of(watcher, blow, beat.attempt, anew)
            return blow.stall is not None

        still = self._wait(gang, watcher, over)
        blow.recovered = True
        what = f"{blow.stall:.1f} s" if still else "the job ended first"
        self._say(f"  {kind} at step {blow.step}: {what}")

    def _wait(self, gang: LocalGang, watcher: Watcher, what: object) -> bool:
        """Until something holds; False when the job is over before. Raises Lost when that takes too long."""
        deadline = time.monotonic() + HOPELESS
        while True:
            watcher.look()
            if gang.poll() or gang.record.outcome() is not None:
                return False
            if what():  # type: ignore[operator]
                return True
            if time.monotonic() > deadline:
                raise Lost(
                    f"no step within {HOPELESS:g} s of a blow: {self.blows[-1].kind if self.blows else ''}"
                )
            time.sleep(0.02)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


class Lost(Exception):
    """A job stands still."""
