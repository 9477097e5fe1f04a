"""The report at the end of a run: what came out, where the time went, where to look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainers.job.record import JobRecord
from trainers.job.times import time_split
from trainyard.platform.airflow_api import AirflowClient, TaskInstance
from trainyard.platform.digits_view import Answer, read_answers, side_by_side
from trainyard.platform.job_view import time_line
from trainyard.platform.pipeline_run import Snapshot, job_folders
from trainyard.platform.progress import duration
from trainyard.tracking import run_url

if TYPE_CHECKING:
    import numpy as np

    from trainyard.platform.embedded import Platform

__all__ = ["OVERHEAD", "Report", "Served", "Stage", "make_report", "print_report", "split_time"]

OVERHEAD = "Airflow: queue, schedule, start"
_SHOWN = 5


@dataclass(frozen=True)
class Stage:
    """A share of the run's wall time."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Served:
    """Held-out pictures and what the running server says they are."""

    pictures: Sequence[np.ndarray]
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Report:
    """What a run came to. `verdict` and `release` are the gate's and the promotion's values, {} without.

    `training` says where the time of the training job went.
    """

    snapshot: Snapshot
    stages: tuple[Stage, ...]
    verdict: Mapping[str, Any] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    served: Served | None = None
    notes: tuple[str, ...] = ()
    training: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence, as far as the pipeline has such a result."""
        numbers = self.verdict.get("numbers") or {}
        value = numbers.get("value")
        if value is None:
            return ""
        text = f"{numbers.get('metric', 'accuracy')} {value:.4f} on {numbers.get('examples', '?')} held-out examples"
        before, version = numbers.get("champion_value"), numbers.get("champion_version")
        if before is None:
            return f"{text}, the first model of its name"
        better = ", smaller is better" if numbers.get("better") == "smaller" else ""
        return f"{text}, {value - before:+.4f} against version {version} ({before:.4f}){better}"

    @property
    def outcome(self) -> str:
        """What became of the model, in one sentence."""
        if self.release:
            previous = self.release.get("previous")
            instead = f" instead of version {previous}" if previous else ""
            return f"{self.release['name']} version {self.release['version']} is served{instead}"
        if self.verdict:
            return (
                f"not released, the gate says {self.verdict['outcome']}: {'; '.join(self.verdict['reasons'])}"
            )
        return ""


def split_time(tasks: Iterable[TaskInstance], begin: float, end: float) -> tuple[Stage, ...]:
    """Every second between `begin` and `end` under one name: the stage that was at work, or `OVERHEAD`.

    A stage is a task or a top-level task group. Of stages that run at the same time, the one that started
    first has the second, and one that never had a second is left out. Times are Unix seconds.
    """
    spans = [
        (max(task.started, begin), min(task.ended, end), task.task_id.split(".")[0])
        for task in tasks
        if task.state not in ("upstream_failed", "skipped", "removed")
        and task.started is not None
        and task.ended is not None
        and task.ended > begin
        and task.started < end
    ]
    spans.sort()
    seconds: dict[str, float] = {}
    reached = begin
    for started, ended, name in spans:
        seconds.setdefault(name, 0.0)
        seconds[OVERHEAD] = seconds.get(OVERHEAD, 0.0) + max(0.0, started - reached)
        seconds[name] += max(0.0, ended - max(started, reached))
        reached = max(reached, ended)
    seconds[OVERHEAD] = seconds.pop(OVERHEAD, 0.0) + max(0.0, end - reached)
    return tuple(Stage(name, value) for name, value in seconds.items() if value >= 0.05 or name == OVERHEAD)


def make_report(platform: Platform, snapshot: Snapshot) -> Report:
    """Read what a run that is over has left: Airflow's values, the job's folder, the server's answers."""
    client, run = platform.airflow, snapshot.run
    values = _values(client, snapshot)
    verdict = next((v for v in values if {"outcome", "reasons", "numbers"} <= set(v)), {})
    # "labels" tells what was promoted by this run from the champion before it, which is handed over alike.
    release = next((v for v in values if {"name", "version", "promoted", "labels"} <= set(v)), {})
    urls = platform.urls
    user, password = platform.credentials
    links = {"Airflow": f"{client.page(run.dag_id, run.run_id)}  user {user}, password {password}"}
    runs = [
        url for folder in job_folders(platform.storage, run.dag_id, run.run_id) if (url := run_url(folder))
    ]
    links |= (
        {"MLflow": runs[0] if runs else urls["mlflow"]} if "mlflow" not in platform.settings.without else {}
    )
    served, notes = None, []
    if release:
        endpoint = f"{urls['model-rest']}/v1/models/{release['name']}"
        links["Model"] = f"{endpoint}:predict (REST), {urls['model-grpc']} (gRPC)"
        served, note = _ask_server(platform, release["name"], release["version"])
        notes += [note] if note else []
        notes += list(release.get("warnings") or ())
    begin = next(t for t in (run.queued, run.started, snapshot.now) if t is not None)
    stages = split_time(snapshot.tasks, begin, snapshot.now if run.ended is None else run.ended)
    training = "; ".join(
        filter(
            None,
            (
                time_line(time_split(JobRecord(f)))
                for f in job_folders(platform.storage, run.dag_id, run.run_id)
            ),
        )
    )
    return Report(snapshot, stages, verdict, release, links, served, tuple(notes), training)


def print_report(report: Report, console: Console) -> None:
    """Print the report."""
    run = report.snapshot.run
    good = run.state == "success"
    total = sum(stage.seconds for stage in report.stages)
    console.print()
    head = f"{run.dag_id} {'succeeded' if good else run.state} in {duration(total)}"
    console.print(Text(head, "bold green" if good else "bold red"))
    for line in (report.headline, report.outcome):
        if line:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if report.served and report.served.pictures:
        console.print("\n  what the server says of held-out examples:", highlight=False)
        drawn = side_by_side(
            report.served.pictures,
            report.served.answers,
            colour=console.is_terminal and not console.no_color,
            width=console.width - 2,
        )
        for line in drawn.splitlines():
            console.print(Text.assemble("  ", Text.from_ansi(line)), soft_wrap=True)
    elif report.served and report.served.answers:
        console.print("\n  what the server says of held-out examples:", highlight=False)
        for answer in report.served.answers:
            console.print(f"    {answer.caption}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    table = Table.grid(padding=(0, 2))
    for stage in report.stages:
        share = stage.seconds / total if total else 0.0
        style = "dim" if stage.name == OVERHEAD else ""
        table.add_row(
            Text(f"  {stage.name}", style), Text(f"{stage.seconds:.1f} s", style), Text(f"{share:.0%}", style)
        )
    table.columns[1].justify = table.columns[2].justify = "right"
    console.print(table)
    if report.training:
        console.print(f"  the training job: {report.training}", style="dim", markup=False, soft_wrap=True)
    console.print()
    for name, text in report.links.items():
        console.print(f"  {name + ':':<9}{text}", markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"  note: {note}", markup=False, highlight=False, soft_wrap=True)


def _values(client: AirflowClient, snapshot: Snapshot) -> list[dict[str, Any]]:
    """All dicts that the run's tasks have handed over."""
    run = snapshot.run
    done = {task.task_id for task in snapshot.tasks if task.state == "success"}
    wanted = [
        (task, key)
        for task, map_index, key in client.xcom_keys(run.dag_id, run.run_id)
        if task in done and map_index < 0 and key in ("return_value", "decision")
    ]
    values = (client.xcom(run.dag_id, run.run_id, task, key) for task, key in wanted)
    return [value for value in values if isinstance(value, dict)]


def _ask_server(platform: Platform, name: str, version: int) -> tuple[Served | None, str]:
    """The server's answers to held-out examples of a release, and what stood in the way."""
    import numpy as np

    from serving.errors import ServingError
    from serving.release.exported import Export
    from serving.rest_client import RestPredictClient

    folder: Path = platform.storage / "models" / name / str(version)
    try:
        golden = Export.load(folder).golden()
        inputs = {key: np.asarray(tensor.values)[:_SHOWN] for key, tensor in golden.inputs.items()}
        client = RestPredictClient(platform.urls["model-rest"], name, signature=golden.signature)
        answers = read_answers(client.predict(inputs), golden.labels[:_SHOWN])
    except ServingError as error:
        return None, f"the server could not be asked: {error}"
    pictures = next((list(v) for v in inputs.values() if v.ndim in (3, 4) and v.dtype.kind in "iuf"), [])
    return Served(pictures, answers), ""
