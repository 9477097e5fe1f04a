"""Where the time of a job went, from marks that its chief leaves: every second under one name.

    queue        from the plan until the chief's launcher has started its first trainer
    start        until TensorFlow and the trainer module are imported
    init         until the first step is done: peers met, model built, checkpoint restored, step traced
    train        steps that counted
    checkpoint   writing checkpoints
    restarts     what ends of the chief cost: steps since the last checkpoint, and the way back to the next one
    export       making the SavedModel, after the job

All but "export" add up to the time from the plan to the outcome.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainers.job.files import read_json, write_json
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind

__all__ = ["EXPORT", "Life", "Marks", "asked_at", "note_export", "split_seconds", "time_split"]

log = logging.getLogger(__name__)

EXPORT = "export"
_FOLDER = "times"


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of the chief, in epoch seconds; None for what it did not come to.

    `stepped` is when its first step was done, `kept` when its latest checkpoint was; `checkpoint` the seconds that
    its checkpoints took until then.
    """

    started: float
    imported: float | None = None
    stepped: float | None = None
    kept: float | None = None
    checkpoint: float = 0.0


class Marks:
    """What the chief's process number `number` leaves for the split, written at each mark.

    A mark that can't be written (a full disk) is a warning: the split is less exact then, and training goes on.
    """

    def __init__(self, folder: Path | str, number: int, *, now: Callable[[], float] = time.time) -> None:
        self._path = Path(folder) / _FOLDER / f"{number:04d}.json"
        self._now = now
        self._life = Life(now())
        self._write()

    def imported(self) -> None:
        """Everything is imported."""
        self._mark(imported=self._now())

    def stepped(self) -> None:
        """The first step is done."""
        self._mark(stepped=self._now())

    def kept(self, checkpoint_seconds: float) -> None:
        """A checkpoint is written; all of this life took so many seconds."""
        self._mark(kept=self._now(), checkpoint=round(checkpoint_seconds, 3))

    def _mark(self, **values: float) -> None:
        self._life = dataclasses.replace(self._life, **values)
        self._write()

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, dataclasses.asdict(self._life))
        except OSError as e:
            log.warning("could not note where the time goes: %s", e)


def note_export(folder: Path | str, seconds: float) -> None:
    """Note how long the export of the job took."""
    (Path(folder) / _FOLDER).mkdir(exist_ok=True)
    write_json(Path(folder) / _FOLDER / "export.json", {"seconds": round(seconds, 3)})


def asked_at(record: JobRecord) -> float | None:
    """When the job was planned, or opened again after a failure, in epoch seconds."""
    first = read_json(record.folder / "generations" / "0001.json")
    return None if first is None else float(first["at"])


def time_split(record: JobRecord, *, end: float | None = None) -> dict[str, float]:
    """Seconds of a job by name; until `end`, its outcome or now. {} for a job that left no marks."""
    outcome = record.outcome()
    if end is None:
        end = outcome.at if outcome else time.time()
    begun = {attempt.number: attempt.started for attempt in record.attempts(RoleKind.CHIEF, 0)}
    lives = []
    for path in sorted((record.folder / _FOLDER).glob("[0-9]*.json")):
        data = read_json(path) or {}
        known = {field.name: data[field.name] for field in dataclasses.fields(Life) if field.name in data}
        life = Life(**known)
        # By the launcher's own word, where there was one: the process has read its files before it leaves a mark.
        lives.append(dataclasses.replace(life, started=begun.get(int(path.stem), life.started)))
    asked = asked_at(record)
    if not lives or asked is None:
        return {}
    failed = outcome is not None and outcome.failure is not None
    split = split_seconds(asked, lives, end, kept_all=not failed)
    export: Any = read_json(record.folder / _FOLDER / "export.json")
    if export:
        split[EXPORT] = float(export["seconds"])
    return {name: round(value, 3) for name, value in split.items()}


def split_seconds(
    asked: float, lives: Sequence[Life], end: float, *, kept_all: bool = True
) -> dict[str, float]:
    """The split of the time from `asked` to `end` over the chief's lives, oldest first.

    With `kept_all` what the last life did after its last checkpoint counts too: it goes on, or the job succeeded.
    """
    seconds = dict.fromkeys(("queue", "start", "init", "train", "checkpoint", "restarts"), 0.0)
    seconds["queue"] = lives[0].started - asked
    came_to_steps = False
    for number, life in enumerate(lives):
        is_last = number == len(lives) - 1
        over = end if is_last else lives[number + 1].started
        if life.stepped is None and not is_last:
            seconds["restarts"] += over - life.started
            continue
        stepped = over if life.stepped is None else life.stepped
        imported = stepped if life.imported is None else life.imported
        if came_to_steps:
            seconds["restarts"] += stepped - life.started
        else:
            seconds["start"] += imported - life.started
            seconds["init"] += stepped - imported
        came_to_steps = True
        counted = over if is_last and kept_all else max(stepped, life.kept or stepped)
        checkpoint = min(life.checkpoint, counted - stepped)
        seconds["checkpoint"] += checkpoint
        seconds["train"] += counted - stepped - checkpoint
        seconds["restarts"] += over - counted
    # Clocks of several machines may differ by more than a short phase took.
    return {name: max(0.0, value) for name, value in seconds.items()}
