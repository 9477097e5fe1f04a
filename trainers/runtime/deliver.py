"""Brings the spool of a job to MLflow: in order, each line once, without ever holding up a step.

    python -m trainers.runtime.deliver --job FOLDER      until the job is over and all is delivered
    deliver(FOLDER)                                      what is there now; the step "register" calls it

The launcher of the chief starts the first as a process of low priority once training has run for a while; MLflow
that is away is a warning, and tried again. The position in the spool is kept in a file beside it, written after
each batch: a delivery that is killed between the two sends that batch again, which for params, tags and metrics
at a step and time changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import InfraError
from trainers.job.files import append_json_line, read_json, write_json
from trainers.job.observations import evaluations_path
from trainers.job.record import JobRecord
from trainers.runtime.tracking import spool_path

__all__ = ["Delivery", "Undelivered", "deliver", "main", "run_of"]

log = logging.getLogger("trainyard.tracking")

ENV_URI = "MLFLOW_TRACKING_URI"

_BATCH = {"metric": 1000, "param": 100, "tag": 100}  # what one request of MLflow takes
_RUN, _POSITION, _LOCK = "run.json", "position.json", "lock"


class Undelivered(InfraError):
    """MLflow could not be reached, or refused; the spool keeps what it has not got."""

    code = "runtime.undelivered"


def deliver(job_folder: Path | str, *, client: Any = None, environ: Mapping[str, str] | None = None) -> int:
    """Send what the spool holds beyond what MLflow has got; the number of lines sent.

    The job's run is that of tracking/run.json, or a new one in the experiment named after the job. Nothing is
    sent when MLFLOW_TRACKING_URI is not set. Raises Undelivered; what was sent before that stays sent.
    """
    folder = Path(job_folder)
    uri = (os.environ if environ is None else environ).get(ENV_URI, "")
    spool = spool_path(folder)
    if not uri or not spool.exists():
        return 0
    with _alone(spool.parent):
        position_file = spool.parent / _POSITION
        reached = {"bytes": 0, "evaluations": 0, **(read_json(position_file) or {})}
        if _spool_evaluations(folder, spool, reached):
            write_json(position_file, reached)
        position = int(reached["bytes"])
        with spool.open("rb") as f:
            f.seek(position)
            data = f.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)  # the last may be half written
        if not lines:
            return 0
        with _reaching(uri, folder):
            client = client or _client(uri)
            run_id = run_of(client, folder, uri)
        for batch in _batches(lines):
            with _reaching(uri, folder):
                _send(client, run_id, batch)
            position += sum(map(len, batch))
            write_json(position_file, {**reached, "bytes": position})
        return len(lines)


def _spool_evaluations(folder: Path, spool: Path, reached: dict[str, int]) -> bool:
    """Bring what an evaluator has found since into the spool, as metrics named eval_...; whether there was any.

    Its own process does not: a spool has one writer at a time, and an evaluator may outlive the chief.
    """
    path = evaluations_path(folder)
    if not path.exists():
        return False
    with path.open("rb") as f:
        f.seek(reached["evaluations"])
        data = f.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        with contextlib.suppress(
            ValueError, KeyError, TypeError, AttributeError
        ):  # half a line of a killed writer
            found = json.loads(line)
            place = {"step": int(found["step"]), "at": int(found["at"] * 1000)}
            for name, value in found["metrics"].items():
                append_json_line(spool, {"metric": f"eval_{name}", "value": float(value), **place})
    reached["evaluations"] += len(whole)
    return bool(whole)


@contextlib.contextmanager
def _reaching(uri: str, folder: Path) -> Iterator[None]:
    """Around calls of the client, which raises errors of many families."""
    try:
        yield
    except Exception as e:
        raise Undelivered(
            f"MLflow at {uri} did not take the metrics of {folder.name}: {type(e).__name__}: {e}",
            hint="they stay in the job's folder; register, or `python -m trainers.runtime.deliver`, sends them",
        ) from e


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One delivery of a job at a time, or lines would be sent twice."""
    with (folder / _LOCK).open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _client(uri: str) -> Any:
    # MLflow's own defaults would keep a request of a server that is away waiting for many minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def run_of(client: Any, folder: Path, uri: str) -> str:
    """The id of the job's run: that of tracking/run.json, or of a new one in the experiment named after the job."""
    path = folder / "tracking" / _RUN
    known = read_json(path)
    if known:
        return str(known["run_id"])
    job = JobRecord.open(folder).plan().job
    experiment = client.get_experiment_by_name(job.name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(job.name)
    run_id = client.create_run(experiment_id, run_name=folder.name).info.run_id
    path.parent.mkdir(parents=True, exist_ok=True)
    url = f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    write_json(path, {"run_id": run_id, "experiment_id": experiment_id, "tracking_uri": uri, "url": url})
    return str(run_id)


def _batches(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Runs of lines that fit one request."""
    batch: list[bytes] = []
    counts = dict.fromkeys(_BATCH, 0)
    for line in lines:
        kind = _kind(line)
        if kind and counts[kind] == _BATCH[kind]:
            yield batch
            batch, counts = [], dict.fromkeys(_BATCH, 0)
        if kind:
            counts[kind] += 1
        batch.append(line)
    yield batch


def _kind(line: bytes) -> str | None:
    """What a line holds; None for one that a killed writer left half written."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return next((kind for kind in _BATCH if isinstance(value, dict) and kind in value), None)


def _send(client: Any, run_id: str, batch: list[bytes]) -> None:
    from mlflow.entities import Metric, Param, RunTag

    metrics, params, tags = [], {}, {}
    for line in batch:
        kind = _kind(line)
        value = json.loads(line) if kind else {}
        if kind == "metric":
            metrics.append(Metric(value["metric"], value["value"], value["at"], value["step"]))
        elif kind == "param":
            params[value["param"]] = value["value"]
        elif kind == "tag":
            tags[value["tag"]] = value["value"]
    if params:
        # A param can't change in MLflow; a job that goes on under another setting keeps what it began with.
        known = client.get_run(run_id).data.params
        params = {key: value for key, value in params.items() if key not in known}
    client.log_batch(
        run_id,
        metrics=metrics,
        params=[Param(key, value) for key, value in params.items()],
        tags=[RunTag(key, value) for key, value in tags.items()],
    )


class Delivery:
    """The launcher's hand on the delivering process: begun once training has run for `after` seconds.

    A short job is not worth it: importing MLflow costs 2 CPU-seconds, and `register` delivers anyway.
    """

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        *,
        after: float = 10.0,
        patience: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._environ = environ
        self._after = after
        self._patience = patience
        self._clock = clock
        self._training_since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> list[int]:
        """The processes of its own."""
        return [] if self._process is None else [self._process.pid]

    def progressed(self, phase: str) -> None:
        """Note what the trainer does."""
        if phase == "training" and self._training_since is None:
            self._training_since = self._clock()

    def poll(self) -> None:
        """Start the process when it is due."""
        since = self._training_since
        due = since is not None and self._clock() - since >= self._after
        if not due or self._process is not None or not self._environ.get(ENV_URI):
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainers.runtime.deliver", "--job", str(self._folder)],
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Give it a moment to send the rest."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience)

    def stop(self) -> None:
        """End it; what is not sent stays in the spool."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def main(argv: list[str] | None = None) -> int:
    """Deliver until the job is over and all is sent, or once with --once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", type=Path, required=True, help="the job's folder")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between deliveries (default: 5)")
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
            deliver(options.job)
            pause = options.every
            if over:
                return 0
        except Undelivered as e:
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
