"""Which workers were given up, and whether those that are left are enough for the job's success rule.

    <job>/given_up/worker-1.json    the failure it was given up with; there until its launcher comes again

A worker writes its marker first and counts after: of two that are given up at once, the later one to count sees both.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.job.failures import Failure
from trainers.job.files import read_json, write_json
from trainers.job.observations import add_warning
from trainers.job.shared import settle
from trainers.job.spec import RoleKind, TrainingJob

if TYPE_CHECKING:
    from trainers.runtime.replica import Replica

__all__ = ["given_up", "lose_worker", "needed_workers", "step_waits", "steppable_workers", "take_back"]

_MARKER = re.compile(r"worker-(\d+)\.json")


def steppable_workers(job: TrainingJob) -> int:
    """The fewest passive workers with which the job goes on making steps, whatever its success rule."""
    role = job.role(RoleKind.WORKER)
    if role is None:
        return 0
    least = role.min_replicas or 1
    # A synchronous step waits for so many gradients, however long.
    return max(least, role.replicas - job.strategy.backup_workers) if job.strategy.sync else least


def needed_workers(job: TrainingJob) -> int:
    """The fewest passive workers that must not be given up for the job to succeed."""
    workers, rule = job.replicas(RoleKind.WORKER), job.success.rule
    # Of 0.55 * 20 floats make a little more than 11.
    share = math.ceil(job.success.fraction * workers - 1e-9)
    asked = {"chief": 0, "fraction": share, "all_workers": workers}[rule]
    return max(asked, steppable_workers(job))


def given_up(folder: Path | str) -> Mapping[int, Failure]:
    """The workers that are given up, by index, each with its failure."""
    found = {}
    for path in (Path(folder) / "given_up").glob("worker-*.json"):
        name = _MARKER.fullmatch(path.name)
        data = read_json(path) if name else None  # None: its launcher has just come again
        if name and data is not None:
            found[int(name[1])] = Failure.from_dict(data)
    return dict(sorted(found.items()))


def take_back(folder: Path | str, index: int) -> bool:
    """Say that a worker is there again; whether it was given up."""
    try:
        _marker(folder, index).unlink()
    except FileNotFoundError:
        return False
    return True


def _marker(folder: Path | str, index: int) -> Path:
    return Path(folder) / "given_up" / f"worker-{index}.json"


def lose_worker(replica: Replica, failure: Failure) -> Failure | None:
    """Give this worker up: None when enough are left, else the failure that ends the job.

    On a full disk there is no marker: then only this worker itself counts it.
    """
    folder, index = replica.record.folder, replica.me.index
    marker = _marker(folder, index)

    def mark() -> None:
        marker.parent.mkdir(exist_ok=True)
        write_json(marker, failure.to_dict())

    replica.tolerating("that it was given up", mark)
    settle(folder)
    text = f"it was given up: {failure.failure_class}: {failure.reason}"
    replica.tolerating("a warning", lambda: add_warning(folder, replica.name, text))
    lost = {**given_up(folder), index: failure}
    job = replica.job
    left, needed = job.replicas(RoleKind.WORKER) - len(lost), needed_workers(job)
    if left >= needed:
        replica.say(f"{text}; the job goes on with {left} workers, {needed} are needed")
        return None
    return _too_few(job, failure, lost, left, needed)


def step_waits(replica: Replica, generation: int) -> bool:
    """Whether a synchronous step waits for this worker: more are lost in this generation than are spare.

    One that is spare comes back with the next generation: until then the others step without it. Those that were
    given up come back with none.
    """
    strategy = replica.job.strategy
    if not (strategy.sync and replica.is_passive_worker):
        return False
    attempts = replica.record.attempts(RoleKind.WORKER)
    lost = {a.index for a in attempts if a.generation == generation and a.ended is not None}
    return len(lost | set(given_up(replica.record.folder))) > strategy.backup_workers


def _too_few(job: TrainingJob, last: Failure, lost: Mapping[int, Failure], left: int, needed: int) -> Failure:
    """The job's failure: of the class of the last worker's, naming the rule and who was given up and why."""
    rule = job.success.rule
    if rule == "fraction":
        rule += f" {job.success.fraction:g}"
    why = "; ".join(
        f"worker-{i} was given up ({f.failure_class}: {f.reason})" for i, f in sorted(lost.items())
    )
    hint = "look at the logs of these workers, then clear the train group to go on from the last checkpoint"
    if needed > steppable_workers(job):
        hint += '; success rule "chief" goes on with fewer workers'
    elif not job.strategy.sync and needed > 1:
        hint += "; a lower min_replicas of the workers goes on with fewer"
    elif job.strategy.sync:
        hint += "; more backup_workers go on with fewer"
    return dataclasses.replace(
        last,
        code="runtime.too_few_workers",
        reason=f"success rule {rule} needs {needed} of {job.replicas(RoleKind.WORKER)} workers, "
        f"{left} {'is' if left == 1 else 'are'} left: {why}",
        hint=hint,
    )
