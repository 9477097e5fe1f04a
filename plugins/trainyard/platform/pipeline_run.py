"""One run of a pipeline from outside: check the input, trigger it, follow it to its end, end it early."""

from __future__ import annotations

import contextlib
import difflib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from trainers.job.errors import ConfigError
from trainers.job.labels import run_slug
from trainers.job.record import Heartbeat, JobRecord
from trainyard.platform.airflow_api import (
    AirflowClient,
    AirflowRefused,
    AirflowUnreachable,
    DagRun,
    TaskInstance,
)

__all__ = [
    "FormRefused",
    "Snapshot",
    "end_early",
    "follow",
    "job_folders",
    "pause_leftovers",
    "start_run",
    "unpaused",
]

_POLL_SECONDS = 1.0


class FormRefused(ConfigError):
    """The run's input was refused before anything started; `field` is the form's name of it, "" if unknown."""

    code = "form.refused"

    def __init__(self, field: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {problem}" if field else problem, hint=hint)
        self.field = field
        self.problem = problem

    def card(self) -> str:
        """What a person reads."""
        rows = [
            ("field", self.field),
            ("what", self.problem),
            ("what to do", self.hint or "give another value"),
        ]
        lines = [f"REFUSED ({self.code}): nothing was started"]
        return "\n".join([*lines, *(f"  {name + ':':<12}{value}" for name, value in rows if value)])


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; `elapsed` seconds since it was triggered, `beat` the training's latest, if any."""

    run: DagRun
    tasks: tuple[TaskInstance, ...]
    beat: Heartbeat | None
    elapsed: float
    now: float


def start_run(client: AirflowClient, dag: Mapping[str, Any], conf: Mapping[str, Any]) -> DagRun:
    """Trigger a run of a DAG (its details from the API) that may be paused.

    A paused DAG whose schedule is due would start a scheduled run beside ours as soon as it is unpaused. So a
    due run's date is given to ours: to the scheduler that run then exists, and it goes on to the next date.

    Raises:
        FormRefused: the input names a field that the form hasn't, or a value that it doesn't take.
    """
    _check_names(dag, conf)
    # Airflow's own ids hold colons and a plus: ugly in addresses, and not to be had in names of folders.
    run_id = f"manual__{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime())}"
    try:
        if due := _due_date(dag):
            try:
                return client.trigger(dag["dag_id"], conf, run_id=run_id, logical_date=due)
            except AirflowRefused as refused:
                if refused.status != 409:  # the due run has been had already
                    raise
        return client.trigger(dag["dag_id"], conf, run_id=run_id)
    except AirflowRefused as refused:
        if refused.status not in (400, 422):
            raise
        raise _form_refused(refused.detail) from refused


@contextlib.contextmanager
def unpaused(client: AirflowClient, dag: Mapping[str, Any], notes: Path) -> Iterator[None]:
    """Let the scheduler work on this DAG during the block; one that was paused is paused again after it.

    A note in the folder `notes` outlives a block that could not do so (see `pause_leftovers`).
    """
    dag_id = dag["dag_id"]
    note = notes / quote(dag_id, safe="")
    if not dag["is_paused"] and not note.exists():
        yield
        return
    notes.mkdir(parents=True, exist_ok=True)
    note.touch()
    client.set_paused(dag_id, False)
    try:
        yield
    finally:
        # An Airflow that has gone down can't be told; the error that ended the block says so already.
        with contextlib.suppress(AirflowUnreachable):
            client.set_paused(dag_id, True)
            note.unlink()


def pause_leftovers(client: AirflowClient, notes: Path) -> list[str]:
    """Pause the DAGs that a run which was killed left unpaused; their ids. Nothing else may run them now."""
    paused = []
    for note in sorted(notes.glob("*")):
        dag_id = unquote(note.name)
        try:
            client.set_paused(dag_id, True)
            paused.append(dag_id)
        except AirflowRefused as refused:
            if refused.status != 404:  # its file is gone, so there is nothing to pause
                raise
        note.unlink()
    return paused


def follow(
    client: AirflowClient,
    run: DagRun,
    storage: Path,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Snapshot]:
    """The run about once a second, the last time when it is over."""
    begun = clock() if run.queued is None else run.queued
    while True:
        now = client.run(run.dag_id, run.run_id)
        tasks = tuple(client.tasks(run.dag_id, run.run_id))
        yield Snapshot(now, tasks, _beat(storage, run), clock() - begun, clock())
        if now.is_over:
            return
        sleep(_POLL_SECONDS)


def end_early(
    client: AirflowClient,
    run: DagRun,
    *,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Have Airflow fail the run and wait until its tasks have let go, so that no pod stays behind."""
    client.fail_run(run.dag_id, run.run_id)
    deadline = clock() + seconds
    while clock() < deadline:
        if not any(task.state == "running" for task in client.tasks(run.dag_id, run.run_id)):
            return
        sleep(0.5)


def job_folders(storage: Path, dag_id: str, run_id: str) -> list[Path]:
    """The folders of a run's training jobs, one a training group."""
    slug = run_slug(run_id)
    parent = storage / "jobs" / dag_id
    return [folder for folder in (parent / slug, *sorted(parent.glob(f"{slug}--*"))) if folder.is_dir()]


def _beat(storage: Path, run: DagRun) -> Heartbeat | None:
    """The heartbeat that knows the most: the chief's, else that of whoever has done the most steps."""
    beats = [
        b for folder in job_folders(storage, run.dag_id, run.run_id) for b in JobRecord(folder).heartbeats()
    ]
    return max(beats, key=lambda b: (b.step is not None, b.role == "chief", b.step or 0, b.at), default=None)


def _check_names(dag: Mapping[str, Any], conf: Mapping[str, Any]) -> None:
    """Airflow takes fields that the form hasn't, in silence: a misspelt one would be lost."""
    known = list(dag.get("params") or ())
    for name in conf:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the form has: {', '.join(known) or 'no fields'}"
            raise FormRefused(name, f"{dag['dag_id']} has no such field", hint=hint)


def _due_date(dag: Mapping[str, Any]) -> str | None:
    """The date of the scheduled run that would start at once if this paused DAG were unpaused."""
    after, date = dag.get("next_dagrun_run_after"), dag.get("next_dagrun_logical_date")
    if not dag["is_paused"] or not after or not date:
        return None
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    return date if after[:19] <= now else None


def _form_refused(detail: str) -> FormRefused:
    """Airflow's words about a refused input, without the schema that follows them."""
    match = re.search(r"[Ii]nvalid input for param (\w+):\s*(.*)", detail)
    if match:
        return FormRefused(match[1], match[2].strip())
    return FormRefused("", detail.partition("\n\n")[0].strip())
