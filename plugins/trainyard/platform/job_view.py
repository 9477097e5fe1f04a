"""A running job on a terminal: a table of its replicas that is drawn again, or lines where nobody draws."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainers.job.files import read_json
from trainers.job.observations import Evaluation, Remark, evaluations, warnings
from trainers.job.record import Heartbeat, JobRecord, JobState, Outcome
from trainers.job.times import asked_at
from trainyard.platform.progress import duration, training_line

__all__ = [
    "JobNow",
    "LiveJobs",
    "PlainJobs",
    "Row",
    "evaluation_line",
    "job_table",
    "time_line",
    "watch",
]

_QUIET = (
    10.0  # seconds without a sign of life after which its age is drawn in red; launchers give one every 2 s
)
_STYLES: Mapping[JobState, str] = {
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "bold red",
    JobState.RESTARTING: "bold yellow",
}
_SPINES = {
    "training": "green",
    "running": "green",
    "saving": "green",
    "evaluating": "green",
    "ended": "dim",
    "left": "dim",
}


_COLUMNS: Sequence[tuple[str, Literal["left", "right"]]] = (
    ("replica", "left"),
    ("phase", "left"),
    ("step", "right"),
    ("examples/s", "right"),
    ("loss", "right"),
    ("to go", "right"),
    ("input wait", "right"),
    ("try", "right"),
    ("last beat", "right"),
    ("", "left"),
)
_WIDE, _SPARE = 110, ("to go", "input wait", "try")  # narrower terminals do without these


@dataclasses.dataclass(frozen=True)
class Row:
    """A replica as it stands; `beat` is None before its first sign of life, `age` of that in seconds.

    `straggler` says why the chief takes it for one ("silent", "slow"), "" when it does not.
    """

    name: str
    beat: Heartbeat | None
    attempts: int
    age: float | None
    straggler: str = ""


@dataclasses.dataclass(frozen=True)
class JobNow:
    """A job as its record tells it at one moment."""

    name: str
    state: JobState
    strategy: str
    generation: int
    rows: tuple[Row, ...]
    evaluation: Evaluation | None
    warnings: tuple[Remark, ...]
    outcome: Outcome | None
    elapsed: float

    @classmethod
    def of(cls, name: str, record: JobRecord, *, now: Callable[[], float] = time.time) -> JobNow:
        """The job in a record."""
        plan = record.plan()
        at = now()
        outcome = record.outcome()
        beats = {beat.replica: beat for beat in record.heartbeats()}
        attempts: dict[str, int] = {}
        for attempt in record.attempts():
            attempts[f"{attempt.role}-{attempt.index}"] = attempt.number
        slow = _stragglers(record)
        workers = read_json(record.folder / "workers.json") or {}
        rows = []
        for replica in plan.replicas:
            beat = _with_share(beats.get(replica.replica), workers.get(replica.replica))
            age = None if beat is None else max(0.0, at - beat.at)
            rows.append(
                Row(
                    replica.replica,
                    beat,
                    attempts.get(replica.replica, 0),
                    age,
                    slow.get(replica.replica, ""),
                )
            )
        found = evaluations(record.folder)
        generation = record.generation()
        end = outcome.at if outcome else at
        asked = asked_at(record)
        return cls(
            name=name,
            state=outcome.state if outcome else record.state,
            strategy=plan.job.strategy.kind.value,
            generation=generation.number,
            rows=tuple(rows),
            evaluation=found[-1] if found else None,
            warnings=tuple(warnings(record.folder)),
            outcome=outcome,
            elapsed=max(0.0, end - (end if asked is None else asked)),
        )

    @property
    def leader(self) -> Heartbeat | None:
        """The sign of life that says how far training is: the chief's, before it has one the furthest peer's."""
        beats = [row.beat for row in self.rows if row.beat is not None and row.beat.step is not None]
        beats = [beat for beat in beats if beat.role != "evaluator" and beat.target is not None]
        return max(beats, key=lambda beat: (beat.role == "chief", beat.step or 0), default=None)


def _with_share(beat: Heartbeat | None, share: Mapping[str, Any] | None) -> Heartbeat | None:
    """A passive worker's sign of life with what its chief knows of it."""
    if beat is None or share is None or beat.role != "worker":
        return beat
    return dataclasses.replace(beat, step=share["steps"], target=None, examples_per_s=share["examples_per_s"])


def _stragglers(record: JobRecord) -> Mapping[str, str]:
    """Why the workers that the chief names as stragglers now are such, by replica: "silent" or "slow"."""
    named = read_json(record.folder / "stragglers.json") or {}
    return {name: str(said.get("reason", "")) for name, said in named.items()}


def job_table(job: JobNow, width: int = 120) -> Group:
    """The job's head, a line a replica, the newest evaluation and the warnings; for a terminal of `width` columns."""
    head = Text.assemble(
        (job.name, "bold"),
        "  ",
        (str(job.state), _STYLES.get(job.state, "bold cyan")),
        f"  {job.strategy}  {duration(job.elapsed)}",
        f"  generation {job.generation}" if job.generation > 1 else "",
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    hidden = _SPARE if width < _WIDE else ()
    shown = [number for number, (title, _) in enumerate(_COLUMNS) if title not in hidden]
    for number in shown:
        title, justify = _COLUMNS[number]
        table.add_column(title, justify=justify, no_wrap=True)
    for row in job.rows:
        cells = _cells(row, over=job.outcome is not None)
        table.add_row(*(cells[number] for number in shown))
    lines: list[Text | Table] = [head, table]
    if job.evaluation is not None:
        lines.append(Text(evaluation_line(job.evaluation), "cyan"))
    lines += [Text(f"warning: {w.by}: {w.text}", "yellow") for w in job.warnings[-3:]]
    return Group(*lines)


def _cells(row: Row, *, over: bool) -> list[Text]:
    beat = row.beat
    if beat is None:
        return [Text(row.name), Text("not there yet", "dim"), *[Text("")] * 8]
    step = "" if beat.step is None else f"{beat.step}/{beat.target}" if beat.target else str(beat.step)
    moving = beat.phase in ("training", "saving", "evaluating")
    quiet = row.age is not None and row.age > _QUIET and not over and beat.phase not in ("left", "ended")
    return [
        Text(row.name),
        Text(beat.phase, _SPINES.get(beat.phase, "yellow")),
        Text(step),
        Text(f"{beat.examples_per_s:,.0f}" if beat.examples_per_s is not None and not over else ""),
        Text(f"{beat.loss:.4f}" if beat.loss is not None else ""),
        Text(duration(beat.eta_s) if beat.eta_s is not None and moving and not over else ""),
        Text(f"{beat.input_wait:.1%}" if beat.input_wait is not None else ""),
        Text(str(max(row.attempts, 1)), "yellow" if row.attempts > 1 else ""),
        Text("" if row.age is None or over else f"{row.age:.0f} s ago", "bold red" if quiet else "dim"),
        Text(f"straggler: {row.straggler}" if row.straggler and not over else "", "bold yellow"),
    ]


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation for people: "evaluation of step 400: accuracy 0.9700, loss 0.1000 on 364 examples"."""
    figures = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items())
    return f"evaluation of step {evaluation.step}: {figures} on {evaluation.examples:,} examples"


def time_line(seconds: Mapping[str, float]) -> str:
    """A split of time for people: "queue 1.2 s, start 7.0 s, train 40.1 s"; what took no time is left out."""
    return ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value >= 0.05)


class Watcher(Protocol):
    """Shows jobs: `update` again and again, `close` at the end."""

    def update(self, jobs: Sequence[JobNow]) -> None:
        """Show them as they are now."""

    def close(self) -> None:
        """Leave the terminal as it should be."""


class LiveJobs:
    """A table a job, drawn again and again; the last drawing stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Without soft wrap: what is wider than the terminal is cut, or the drawing would not be drawn over.
        console.soft_wrap = False
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def update(self, jobs: Sequence[JobNow]) -> None:
        """Draw them."""
        self._live.update(Group(*_spaced(job_table(job, self._console.width) for job in jobs)), refresh=True)

    def close(self) -> None:
        """The last drawing stays."""
        self._live.stop()


def _spaced(tables: Iterable[Group]) -> Iterable[Group | Text]:
    for number, table in enumerate(tables):
        if number:
            yield Text("")
        yield table


class PlainJobs:
    """A line when there is news: a state, progress, an evaluation, a warning."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[tuple[str, str], str] = {}

    def update(self, jobs: Sequence[JobNow]) -> None:
        """Print what is new."""
        for job in jobs:
            prefix = f"{job.name}: " if len(jobs) > 1 else ""
            leader = job.leader
            self._tell(job, "training", prefix, training_line(leader) if leader else str(job.state))
            if job.evaluation is not None:
                self._tell(job, "evaluation", prefix, evaluation_line(job.evaluation))
            for warning in job.warnings:
                self._tell(job, f"warning {warning}", prefix, f"warning: {warning.by}: {warning.text}")

    def close(self) -> None:
        """Nothing is left to do."""

    def _tell(self, job: JobNow, kind: str, prefix: str, line: str) -> None:
        if self._told.get((job.name, kind)) != line:
            self._told[job.name, kind] = line
            self._console.print(prefix + line, markup=False, highlight=False, soft_wrap=True)


def watch(
    records: Mapping[str, JobRecord],
    watcher: Watcher,
    *,
    sleep: Callable[[float], None] = time.sleep,
    every: float = 1.0,
) -> Sequence[Outcome]:
    """Show jobs until all are over; their outcomes, in order."""
    try:
        while True:
            jobs = [JobNow.of(name, record) for name, record in records.items()]
            watcher.update(jobs)
            outcomes = [job.outcome for job in jobs]
            over = [outcome for outcome in outcomes if outcome is not None]
            if len(over) == len(outcomes):
                return over
            sleep(every)
    finally:
        watcher.close()
