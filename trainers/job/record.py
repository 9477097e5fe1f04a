"""The durable truth of one job: files under the job's folder, each written atomically.

    plan.json                      the plan (with the job)
    state.json                     where the job stands, while it runs
    outcome.json                   how it ended: written once, by whoever was first; nothing overrules it
    generations/0002.json          each restart of the gang, with who asked for it and why
    attempts/worker-1-0002.json    each process that a launcher started, and how it ended
    heartbeats/worker-1.json       the latest sign of life of each replica
    places/worker-1.json           the launcher that has the replica's place; one of before leaves
    times/0001.json                when each process of the chief came to what (`trainers.job.times`)
    checkpoints/                   TensorFlow checkpoints
    logs/worker-1.log              what each replica printed (`trainers.job.replica_log`)
    stacks/                        stack dumps of replicas that stood still
    workers.json                   what each worker of a parameter server has done, as the chief knows it
    evaluations.jsonl              what an evaluator found of each checkpoint (`trainers.job.observations`)
    warnings/worker-1.jsonl        what went wrong without ending the job
    given_up/worker-1.json         a worker whose restarts are used up (`trainers.runtime.success`)
    history/0001/                  what was there before the job was opened again

Success is read from here first, and from pods or processes only where the record is silent.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import MissingRecord, RecordConflict
from trainers.job.failures import Failure
from trainers.job.files import create_json, read_json, write_json
from trainers.job.plan import Plan
from trainers.job.plan_file import plan_from_file, plan_to_file
from trainers.job.spec import RoleKind

__all__ = ["TRANSITIONS", "Attempt", "Generation", "Heartbeat", "JobRecord", "JobState", "Outcome"]


class JobState(str, enum.Enum):
    """Where a job stands: PLANNED -> STARTING -> RUNNING <-> RESTARTING -> SUCCEEDED | FAILED | CANCELLED."""

    PLANNED = "PLANNED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether the job is over."""
        return not TRANSITIONS[self]

    def __str__(self) -> str:
        return self.value


_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.PLANNED: frozenset({JobState.STARTING, *_ENDS}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.RESTARTING, *_ENDS}),
    JobState.RUNNING: frozenset({JobState.RESTARTING, *_ENDS}),
    JobState.RESTARTING: frozenset({JobState.STARTING, JobState.RUNNING, *_ENDS}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A replica's sign of life.

    `step` and `target` count finished and asked steps; `examples_per_s` is of the whole job; `loss` the latest
    mean; `input_wait` the share of time spent waiting for data, 0 to 1; `eta_s` seconds; `gradients_dropped` those
    that came too late for a synchronous step; `at` epoch seconds.
    """

    role: str
    index: int
    phase: str = "starting"
    generation: int = 1
    attempt: int = 1
    pid: int = 0
    step: int | None = None
    target: int | None = None
    examples_per_s: float | None = None
    loss: float | None = None
    input_wait: float | None = None
    eta_s: float | None = None
    gradients_dropped: int | None = None
    at: float = 0.0

    @property
    def replica(self) -> str:
        """The replica's name, "worker-1"."""
        return f"{self.role}-{self.index}"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process that a launcher started; `ended` is None while it lives. Times are epoch seconds."""

    role: str
    index: int
    number: int
    generation: int
    pid: int
    started: float
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    failure_class: str | None = None
    last_step: int | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One life of the gang; the first has no reason, each later one says who asked for it and why.

    `blamed` names the replica whose pod has to be replaced for it ("worker-1"), where there is one.
    """

    number: int
    by: str
    reason: str
    at: float
    blamed: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the job ended. `seconds` splits its time, as `trainers.job.times` says."""

    state: JobState
    at: float
    step: int | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "state": self.state.value,
            "at": self.at,
            "step": self.step,
            "metrics": dict(self.metrics),
            "seconds": dict(self.seconds),
            "failure": self.failure.to_dict() if self.failure else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome of `to_dict`."""
        failure = Failure.from_dict(data["failure"]) if data.get("failure") else None
        outcome: Outcome = _read_as(cls, {**data, "state": JobState(data["state"]), "failure": failure})
        return outcome


def _read_as(cls: type[Any], data: Mapping[str, Any]) -> Any:
    # A newer Trainyard may write more fields than this one knows; the record of a running job outlives upgrades.
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in data.items() if key in known})


class JobRecord:
    """A job's record in `folder`; safe to use from several processes at once."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = Path(folder)
        self._clock = clock

    # ---- life of the record

    @classmethod
    def create(cls, plan: Plan, *, clock: Callable[[], float] = time.time) -> JobRecord:
        """The record of `plan` in the job's output folder; creating it again is harmless.

        An unfinished record of the same job goes on (its addresses are renewed). A failed or cancelled one is
        opened again: its outcome moves to history/ and training resumes from the last checkpoint. A finished
        one stays finished. A record of another job moves to history/ as a whole.
        """
        record = cls(plan.job.output, clock=clock)
        record.folder.mkdir(parents=True, exist_ok=True)
        old = record.plan() if (record.folder / "plan.json").exists() else None
        if old is not None and old.job != plan.job:
            record._archive(everything=True)
            old = None
        outcome = record.outcome()
        if outcome is not None and outcome.state is not JobState.SUCCEEDED:
            record._archive(everything=False)
            outcome = None
        if outcome is None:
            write_json(record.folder / "plan.json", plan_to_file(plan))
            if old is None:
                write_json(record.folder / "state.json", {"state": JobState.PLANNED.value, "at": clock()})
            record.next_generation(0, by="plan", reason="")
        return record

    @classmethod
    def open(cls, folder: str | Path, *, clock: Callable[[], float] = time.time) -> JobRecord:
        """The record in `folder`; MissingRecord when there is none."""
        record = cls(folder, clock=clock)
        if not (record.folder / "plan.json").exists():
            raise MissingRecord(
                f"no job in {record.folder}",
                hint="check the job's name; `trainyard jobs list` shows all jobs",
            )
        return record

    def _archive(self, *, everything: bool) -> None:
        history = self.folder / "history"
        history.mkdir(exist_ok=True)
        number = 1 + max((int(p.name) for p in history.iterdir() if p.name.isdigit()), default=0)
        target = history / f"{number:04d}"
        target.mkdir()
        names = {
            "outcome.json",
            "state.json",
            "warnings",
            "workers.json",
            "attempts",
            "generations",
            "given_up",
            "heartbeats",
            "places",
            "times",
        }
        # What calls for the move goes last: should this be cut short, the next `create` moves the rest.
        last = ("", "outcome.json", "plan.json")
        for path in sorted(self.folder.iterdir(), key=lambda p: last.index(p.name) if p.name in last else 0):
            if path.name != "history" and (everything or path.name in names):
                path.rename(target / path.name)

    # ---- plan and state

    def plan(self) -> Plan:
        """The job's plan."""
        return plan_from_file(self._must_read("plan.json"))

    def _must_read(self, name: str) -> Any:
        data = read_json(self.folder / name)
        if data is None:
            raise MissingRecord(
                f"{self.folder / name} is not there", hint="was the job's folder removed while it ran?"
            )
        return data

    @property
    def state(self) -> JobState:
        """Where the job stands; an outcome overrules everything."""
        outcome = self.outcome()
        if outcome is not None:
            return outcome.state
        data = read_json(self.folder / "state.json")
        return JobState(data["state"]) if data else JobState.PLANNED

    def set_state(self, state: JobState) -> None:
        """Move to a state that is no end (for those see `finish`); RecordConflict when the table forbids it."""
        now = self.state
        if state is now:
            return
        if state not in TRANSITIONS[now] or state.is_terminal:
            raise RecordConflict(f"job in {self.folder} can't go from {now} to {state}")
        write_json(self.folder / "state.json", {"state": state.value, "at": self._clock()})

    def outcome(self) -> Outcome | None:
        """How the job ended, or None while it has not."""
        data = read_json(self.folder / "outcome.json")
        return Outcome.from_dict(data) if data else None

    def finish(
        self,
        state: JobState,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        seconds: Mapping[str, float] | None = None,
        failure: Failure | None = None,
    ) -> Outcome:
        """End the job; the first to say so wins, and the outcome that holds is returned."""
        if not state.is_terminal:
            raise RecordConflict(f"{state} is not an end of a job")
        mine = Outcome(state, self._clock(), step, metrics or {}, seconds or {}, failure)
        create_json(self.folder / "outcome.json", mine.to_dict())
        outcome = self.outcome()
        assert outcome is not None
        return outcome

    # ---- generations

    def generation(self) -> Generation:
        """The gang's present life."""
        files = sorted((self.folder / "generations").glob("[0-9]*.json"))
        if not files:
            return Generation(1, "plan", "", 0.0)
        data = read_json(files[-1])
        assert data is not None
        generation: Generation = _read_as(Generation, data)
        return generation

    @property
    def began(self) -> float | None:
        """When the job was planned, or opened again after a failure, in epoch seconds."""
        data = read_json(self.folder / "generations" / "0001.json")
        return float(data["at"]) if data else None

    def next_generation(self, after: int, *, by: str, reason: str, blamed: str = "") -> Generation:
        """Ask for the life after number `after`; when a peer has asked already, that one holds."""
        folder = self.folder / "generations"
        folder.mkdir(exist_ok=True)
        value = Generation(after + 1, by, reason, self._clock(), blamed)
        create_json(folder / f"{after + 1:04d}.json", dataclasses.asdict(value))
        return self.generation()

    # ---- heartbeats and attempts

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write a replica's sign of life; its time is set here unless given."""
        folder = self.folder / "heartbeats"
        folder.mkdir(exist_ok=True)
        data = dataclasses.asdict(heartbeat)
        data["at"] = heartbeat.at or self._clock()
        write_json(folder / f"{heartbeat.replica}.json", data)

    def heartbeat(self, role: RoleKind | str, index: int) -> Heartbeat | None:
        """The latest sign of life of one replica, or None when there was none."""
        data = read_json(self.folder / "heartbeats" / f"{role}-{index}.json")
        heartbeat: Heartbeat | None = _read_as(Heartbeat, data) if data else None
        return heartbeat

    def touch_heartbeat(self, role: RoleKind | str, index: int) -> None:
        """Give a sign of life where none can be written: the time of the last one's file, which needs no space."""
        os.utime(self.folder / "heartbeats" / f"{role}-{index}.json")

    def heartbeat_touched(self, role: RoleKind | str, index: int) -> float | None:
        """When a replica's sign of life was written or touched, by the file system's clock."""
        try:
            return (self.folder / "heartbeats" / f"{role}-{index}.json").stat().st_mtime
        except FileNotFoundError:
            return None

    def heartbeats(self) -> list[Heartbeat]:
        """The latest sign of life of every replica that gave one, by name."""
        files = sorted((self.folder / "heartbeats").glob("*.json"))
        return [_read_as(Heartbeat, data) for data in map(read_json, files) if data]

    def take_place(self, role: RoleKind | str, index: int, launcher: str) -> None:
        """Write that a replica's place is this launcher's now, whoever had it before."""
        path = self._place_file(role, index)
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"launcher": launcher, "at": self._clock()})

    def place_of(self, role: RoleKind | str, index: int) -> str:
        """The launcher that has taken a replica's place last, "" when none has."""
        data = read_json(self._place_file(role, index))
        return str(data["launcher"]) if data else ""

    def _place_file(self, role: RoleKind | str, index: int) -> Path:
        return self.folder / "places" / f"{RoleKind(role).value}-{index}.json"

    def write_attempt(self, attempt: Attempt) -> None:
        """Write how one process of a replica started, or ended."""
        folder = self.folder / "attempts"
        folder.mkdir(exist_ok=True)
        write_json(
            folder / f"{attempt.role}-{attempt.index}-{attempt.number:04d}.json", dataclasses.asdict(attempt)
        )

    def attempts(self, role: RoleKind | str | None = None, index: int | None = None) -> list[Attempt]:
        """All processes of all replicas, or of one, oldest first."""
        files = (self.folder / "attempts").glob("*.json")
        found: list[Attempt] = [_read_as(Attempt, data) for data in map(read_json, files) if data]
        if role is not None:
            found = [a for a in found if a.role == str(role) and (index is None or a.index == index)]
        return sorted(found, key=lambda a: (a.started, a.role, a.index, a.number))
