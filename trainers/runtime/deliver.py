"""Brings the spools of a job to MLflow: in order, each line once, without ever holding up a step.

    python -m trainers.runtime.deliver --job FOLDER      until the job is over and all is delivered
    deliver(FOLDER)                                      what is there now, and how the run ended

The launcher of the chief starts the first as a process of low priority once training has run for a while. MLflow
that is away is a warning, and tried again; what is left when the job ends is sent by the pipeline's tasks `verdict`,
`gate` and `register`, by the verdict of the next run, or by `trainyard tracking deliver`.

Once: the note of how far MLflow has got is written before and after each batch (see runtime.spooled). A delivery
that is killed between a call and its note leaves a batch in doubt; the next one reads back what the run holds of it
and sends the rest. MLflow's SQL stores take a metric of the same step, time and value only once in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainers.job.errors import InfraError, MissingRecord
from trainers.job.files import append_json_line, read_json, write_json
from trainers.job.record import JobRecord, JobState
from trainers.runtime.spooled import Batch, Line, Position, batches, pending
from trainers.runtime.tracker import KEY_TAG, Refused, Tracker, TrackerAway, connect, shown
from trainers.runtime.tracking import REFUSED, RUN, run_key

__all__ = ["ENV_URI", "Undelivered", "deliver", "main", "run_of", "undelivered"]

log = logging.getLogger("trainyard.tracking")

ENV_URI = "MLFLOW_TRACKING_URI"

STATUS = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}
"""How a run ends in MLflow, by how its job did; it is RUNNING otherwise."""


class Undelivered(InfraError):
    """MLflow could not be reached, or refused; the spools keep what it has not got."""

    code = "runtime.undelivered"


def deliver(
    job_folder: Path | str,
    *,
    tracker: Tracker | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = 10.0,
) -> int:
    """Send what the spools hold beyond what MLflow has got, and the run's end; the number of lines sent.

    The job's run is that of tracking/run.json, or a new one in the experiment named after the job. Nothing is
    sent, and nobody asked, when all is delivered or MLFLOW_TRACKING_URI is not set. `timeout` seconds is how long
    MLflow may be silent, and another delivery of this job at work. Raises Undelivered; what was sent before that
    stays sent.
    """
    folder = Path(job_folder)
    environ = os.environ if environ is None else environ
    uri = environ.get(ENV_URI, "")
    if not uri or not undelivered(folder):
        return 0
    with _alone(folder, timeout), _reaching(uri, folder):
        tracker = tracker or connect(uri, environ, timeout=timeout)
        position = Position.load(folder)
        run_id = run_of(folder, uri, tracker)
        if position.run_id != run_id:
            # Another run than the one that the note is of: it begins with the first line. A note of an earlier
            # version names none.
            kept = position.reached if not position.run_id else {}
            position = Position(position.path, run_id, kept)
        sent = 0
        for batch in batches(folder, position):
            doubtful = position.begin(batch)
            _send(tracker, run_id, batch, folder, doubtful=doubtful)
            position.done(batch)
            sent += batch.spooled
        status, at = _wanted_status(folder)
        if status != position.status:
            tracker.set_status(run_id, status, at)
            position.status = status
            position.save()
        return sent


def undelivered(folder: Path | str) -> bool:
    """Whether there is something of a job that MLflow has not been told; asks nobody."""
    folder = Path(folder)
    if not (folder / "tracking").is_dir():
        return False
    position = Position.load(folder)
    return pending(folder, position) or _wanted_status(folder)[0] != position.status


def _wanted_status(folder: Path) -> tuple[str, float | None]:
    """How the run stands, by the job's record, and since when."""
    try:
        outcome = JobRecord.open(folder).outcome()
    except MissingRecord:
        outcome = None
    return (STATUS[outcome.state], outcome.at) if outcome else ("RUNNING", None)


@contextlib.contextmanager
def _reaching(uri: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except (TrackerAway, Refused) as e:
        raise Undelivered(
            f"MLflow at {shown(uri)} did not take the metrics of {folder.name}: {e.message}",
            hint="they stay in the job's folder; the next step or `trainyard tracking deliver` sends them",
        ) from e


@contextlib.contextmanager
def _alone(folder: Path, patience: float) -> Iterator[None]:
    """One delivery of a job at a time, or lines would be sent twice; Undelivered when another takes too long."""
    deadline = time.monotonic() + patience
    with (folder / "tracking" / "lock").open("w") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as e:
                if time.monotonic() > deadline:
                    raise Undelivered(f"another delivery of {folder.name} is at work") from e
                time.sleep(0.05)
        yield


def run_of(
    folder: Path,
    uri: str,
    tracker: Tracker,
    *,
    experiment: str = "",
    name: str = "",
    tags: Mapping[str, str] | None = None,
) -> str:
    """The id of the job's run: that of tracking/run.json where MLflow knows it, or of a new one.

    A new one is in `experiment`, by default the one named after the job, and found again by its key when its maker
    dies before it has noted the id. Refused when the run was deleted: then nobody wants it told.
    """
    path = folder / RUN
    known = read_json(path) or {}
    if known:
        run = tracker.run(str(known["run_id"]))
        if run is not None and run["deleted"]:
            raise Refused(
                f"run {known['run_id']} is deleted",
                hint=f"restore it in MLflow, or remove {path} for a new one",
            )
        if run is not None:
            if known.get("tracking_uri") != shown(uri):
                write_json(path, _run_file(str(known["run_id"]), str(run["experiment_id"]), uri))
            return str(known["run_id"])
        log.warning("run %s is not known at %s: %s gets a new one", known["run_id"], shown(uri), folder.name)
    record = JobRecord(folder)
    key, first = run_key(folder)
    experiment_id = tracker.experiment(experiment or record.plan().job.name)
    run_id = None if first else tracker.find_run(experiment_id, key)
    if run_id is None:
        run_id = tracker.create_run(
            experiment_id, name or folder.name, {KEY_TAG: key, **(tags or {})}, record.began or time.time()
        )
    write_json(path, _run_file(run_id, experiment_id, uri))
    return run_id


def _run_file(run_id: str, experiment_id: str, uri: str) -> dict[str, str]:
    address = shown(uri).rstrip("/")
    url = f"{address}/#/experiments/{experiment_id}/runs/{run_id}" if address.startswith("http") else ""
    return {"run_id": run_id, "experiment_id": experiment_id, "tracking_uri": address, "url": url}


def _send(tracker: Tracker, run_id: str, batch: Batch, folder: Path, *, doubtful: bool) -> None:
    lines = list(batch.lines)
    if doubtful:
        held = {
            key: tracker.history(run_id, key)
            for key in {line.value["key"] for line in lines if line.kind == "metric"}
        }
        lines = [
            line
            for line in lines
            if line.kind != "metric" or line.identity not in held[str(line.value["key"])]
        ]
    if any(line.kind == "param" for line in lines):
        # A param can't change in MLflow; a job that goes on under another setting keeps what it began with.
        known = set((tracker.run(run_id) or {"params": {}})["params"])
        kept = []
        for line in lines:
            if line.kind == "param":
                if line.value["key"] in known:
                    continue
                known.add(line.value["key"])
            kept.append(line)
        lines = kept
    _log(tracker, run_id, lines, folder)


def _log(tracker: Tracker, run_id: str, lines: list[Line], folder: Path) -> None:
    """Send lines; one that MLflow will never take is put aside, so that it does not hold up the others."""
    if not lines:
        return
    params = {line.value["key"]: line.value["value"] for line in lines if line.kind == "param"}
    tags = {line.value["key"]: line.value["value"] for line in lines if line.kind == "tag"}
    try:
        tracker.log(run_id, [line.value for line in lines if line.kind == "metric"], params, tags)
    except Refused as e:
        if len(lines) > 1:
            middle = len(lines) // 2
            _log(tracker, run_id, lines[:middle], folder)
            _log(tracker, run_id, lines[middle:], folder)
            return
        log.warning("MLflow will not take %s %s: %s", lines[0].kind, lines[0].value, e.message)
        aside = {"kind": lines[0].kind, **lines[0].value, "why": e.message}
        append_json_line(folder / "tracking" / REFUSED, aside)


def main(argv: list[str] | None = None) -> int:
    """Deliver until the job is over and all is sent, or once with --once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", type=Path, required=True, help="the job's folder")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between deliveries (default: 5)")
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="seconds MLflow may be silent (default: 10)"
    )
    parser.add_argument("--once", action="store_true", help="send what is there, then end")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.nice(10)  # training goes first
    record = JobRecord.open(options.job)
    launcher = os.getppid()
    pause = options.every
    while True:
        over = options.once or record.outcome() is not None
        try:
            deliver(options.job, timeout=options.timeout)
            pause = options.every
            if over:
                return 0
        except (Undelivered, OSError) as e:
            log.warning("%s", e)
            if over:
                return 1
            pause = min(2 * pause, 60.0)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and record.outcome() is None:
            if os.getppid() != launcher:
                return 1  # the launcher is gone, and who comes after it delivers
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
