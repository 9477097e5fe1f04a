"""What a person sees while things go on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainers.job.record import Heartbeat
from trainyard.platform.airflow_api import TaskInstance
from trainyard.platform.pipeline_run import Snapshot

__all__ = [
    "LiveProgress",
    "PlainProgress",
    "Progress",
    "StartProgress",
    "duration",
    "make_progress",
    "training_line",
]

_MARKS: Mapping[str, tuple[str, str]] = {
    "success": ("✓", "green"),
    "running": ("▶", "cyan"),
    "failed": ("✗", "red"),
    "upstream_failed": ("✗", "red"),
    "up_for_retry": ("↻", "yellow"),
    "up_for_reschedule": ("↻", "yellow"),
    "restarting": ("↻", "yellow"),
    "queued": ("·", "blue"),
    "scheduled": ("·", "blue"),
    "deferred": ("◇", "magenta"),
    "awaiting_input": ("?", "magenta"),
    "skipped": ("-", "dim"),
}
_UNSEEN = ("none", "removed")
_UNTOLD = (*_UNSEEN, "scheduled", "queued", "upstream_failed")
_PLAIN_TRAINING_SECONDS = 5.0


class Progress(Protocol):
    """Shows a run: `update` as often as there is news, `close` at the end."""

    def update(self, snapshot: Snapshot) -> None:
        """Show the run as it is now."""

    def close(self) -> None:
        """Leave the terminal as it should be."""


def make_progress(console: Console) -> Progress:
    """The kind of progress that suits this console."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


def duration(seconds: float) -> str:
    """Seconds for people: "4.2 s", "3 min 05 s", "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def training_line(beat: Heartbeat) -> str:
    """The training in one line: step and target, loss, examples a second, time to go."""
    if beat.step is None:
        return f"training: {beat.replica} {beat.phase}"
    parts = [f"step {beat.step}" + (f"/{beat.target}" if beat.target else "")]
    if beat.loss is not None:
        parts.append(f"loss {beat.loss:.4f}")
    if beat.examples_per_s:
        parts.append(f"{beat.examples_per_s:,.0f} examples/s")
    if beat.eta_s is not None and beat.eta_s >= 1:
        parts.append(f"{duration(beat.eta_s)} to go")
    return "training: " + ", ".join(parts)


class PlainProgress:
    """A line when a task changes its state, and one every few seconds while training goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[tuple[str, int], tuple[str, int]] = {}
        self._trained: tuple[float, int] = (0.0, -1)

    def update(self, snapshot: Snapshot) -> None:
        """Print what is new."""
        for task in snapshot.tasks:
            key, state = (task.task_id, task.map_index), (task.state, task.try_number)
            if task.state in _UNTOLD or self._states.get(key) == state:
                continue
            if task.state == "running" and task.map_index >= 0 and not task.label:
                continue  # a moment later it has its name
            self._states[key] = state
            took = (
                f" in {duration(task.seconds)}"
                if task.state in ("success", "failed") and task.seconds
                else ""
            )
            tries = f" (try {task.try_number})" if task.try_number > 1 else ""
            self._print(snapshot, f"{task.name}: {task.state.replace('_', ' ')}{took}{tries}")
        beat = snapshot.beat
        if beat is None or beat.step is None or beat.step == self._trained[1]:
            return
        if snapshot.now - self._trained[0] >= _PLAIN_TRAINING_SECONDS or beat.step == beat.target:
            self._trained = (snapshot.now, beat.step)
            self._print(snapshot, training_line(beat))

    def close(self) -> None:
        """Nothing is left to do."""

    def _print(self, snapshot: Snapshot, text: str) -> None:
        self._console.print(
            f"[{snapshot.elapsed:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )


class LiveProgress:
    """A table of tasks that is drawn again and again, with the training's line below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        """Draw the run as it is now."""
        self._live.update(self.render(snapshot), refresh=True)

    def close(self) -> None:
        """Take the table away: the report follows."""
        self._live.stop()

    def render(self, snapshot: Snapshot) -> Group:
        """The table and the training's line."""
        seen = [task for task in snapshot.tasks if task.state not in _UNSEEN]
        seen.sort(key=lambda task: (task.started is None, task.started or 0.0, task.name))
        room = max(5, self._console.size.height - 5)
        hidden, shown = _fold(seen, room)
        table = Table.grid(padding=(0, 2))
        if hidden:
            table.add_row(Text("✓", "green"), Text(f"{hidden} tasks done", "dim"), "", "")
        for task in shown:
            mark, style = _MARKS.get(task.state, ("?", ""))
            seconds = task.seconds if task.ended else snapshot.now - task.started if task.started else None
            tries = f"try {task.try_number}" if task.try_number > 1 else ""
            table.add_row(
                Text(mark, style),
                Text(task.name),
                Text(task.state.replace("_", " "), style),
                _seconds(seconds),
                tries,
            )
        head = Text(f"{snapshot.run.dag_id}  {snapshot.run.state}  {duration(snapshot.elapsed)}", "bold")
        line = Text(training_line(snapshot.beat), "cyan") if snapshot.beat else Text("")
        return Group(head, table, line)


class StartProgress:
    """The start of the platform: a line for each component that answers, and for each port walked round."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._begun = clock()
        self._clock = clock
        self._told: set[str] = set()

    def __call__(self, state: Mapping[str, Any]) -> None:
        """Print what is new in platform.json."""
        for name, wanted in (state.get("walked") or {}).items():
            self._tell(f"port {wanted} is in use, {name} takes {state['ports'][name]}")
        for service in state.get("services", ()):
            if service["state"] in ("ready", "done"):
                where = f" at {service['url']}" if service["url"] else ""
                self._tell(f"{service['title']} is up{where}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            elapsed = self._clock() - self._begun
            self._console.print(f"[{elapsed:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)


def _fold(tasks: Sequence[TaskInstance], room: int) -> tuple[int, list[TaskInstance]]:
    """How many finished tasks to leave out, and the tasks to show, so that they fit."""
    surplus = len(tasks) - room
    if surplus <= 0:
        return 0, list(tasks)
    done = [task for task in tasks if task.state == "success"][: surplus + 1]
    shown = [task for task in tasks if task not in done]
    return len(done), shown[-room:]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
