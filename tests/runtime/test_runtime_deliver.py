"""Delivery of the spool to MLflow: in order, once, and never in the way."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainers.job.files import read_json, read_json_lines, write_json
from trainers.job.observations import Evaluation, add_evaluation, evaluations_path
from trainers.job.record import JobRecord, JobState
from trainers.runtime import deliver as deliver_module
from trainers.runtime.deliver import ENV_URI, Undelivered, deliver, main
from trainers.runtime.delivery import Delivery
from trainers.runtime.tracker import Refused, TrackerAway
from trainers.runtime.tracking import Spool


class FakeTracker:
    """MLflow as far as delivery uses it; `down` makes it raise, `bad` names a metric that it refuses."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.requests: list[int] = []
        self.statuses: list[str] = []
        self.down = False
        self.bad = ""
        self.deleted = False

    def log(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        if self.down:
            raise TrackerAway("connection refused")
        if any(m["key"] == self.bad for m in metrics):
            raise Refused("invalid metric name")
        assert run_id == "run-7"
        assert len(metrics) + len(params) + len(tags) <= 1000
        assert len(params) <= 100
        self.metrics += [(m["key"], m["value"], m["step"]) for m in metrics]
        for key, value in params.items():
            assert key not in self.params, "MLflow refuses another value of a param"
            self.params[key] = value
        self.tags.update(tags)
        self.requests.append(len(metrics))

    def run(self, run_id: str) -> Any:
        return {
            "status": "RUNNING",
            "deleted": self.deleted,
            "experiment_id": "1",
            "params": dict(self.params),
        }

    def history(self, run_id: str, key: str) -> Any:
        return set()

    def set_status(self, run_id: str, status: str, at: float | None) -> None:
        self.statuses.append(status)


@pytest.fixture
def job(jobs: Any) -> Path:
    """A job's folder with a known run."""
    folder = Path(jobs.plan().job.output)
    Spool(folder)
    write_json(folder / "tracking" / "run.json", {"run_id": "run-7", "experiment_id": "1"})
    return folder


ENV = {ENV_URI: "http://mlflow"}


def test_evaluations_arrive_through_the_spool_with_their_steps(job: Path) -> None:
    client, spool = FakeTracker(), Spool(job)
    assert deliver(job, tracker=client, environ=ENV) == 0
    spool.metrics({"loss": 0.5}, step=100)
    add_evaluation(job, Evaluation(100, {"accuracy": 0.9, "loss": 0.4}, 364, 0.1))
    with evaluations_path(job).open("a") as f:
        f.write('{"step": 150, "metri')  # its writer was killed
    assert deliver(job, tracker=client, environ=ENV) == 2
    add_evaluation(job, Evaluation(200, {"accuracy": 0.95}, 364, 0.1))  # after the end of the chief
    client.down = True
    with pytest.raises(Undelivered):
        deliver(job, tracker=client, environ=ENV)
    client.down = False
    assert deliver(job, tracker=client, environ=ENV) == 2  # with the half line, which says nothing
    assert deliver(job, tracker=client, environ=ENV) == 0
    assert client.metrics == [
        ("loss", 0.5, 100),
        ("eval_accuracy", 0.9, 100),
        ("eval_loss", 0.4, 100),
        ("eval_accuracy", 0.95, 200),
    ]


def test_the_run_ends_as_the_job_does_and_goes_on_with_it(job: Path) -> None:
    """FAILED when it failed; RUNNING when it is opened again; FINISHED; each said once, without lines too."""
    client, record = FakeTracker(), JobRecord.open(job)
    plan = record.plan()
    assert deliver(job, tracker=client, environ=ENV) == 0
    assert client.statuses == []
    record.finish(JobState.FAILED)
    for _ in range(2):
        deliver(job, tracker=client, environ=ENV)
    assert client.statuses == ["FAILED"]
    JobRecord.create(plan).finish(JobState.CANCELLED)
    deliver(job, tracker=client, environ=ENV)
    record = JobRecord.create(plan)
    deliver(job, tracker=client, environ=ENV)
    record.finish(JobState.SUCCEEDED)
    deliver(job, tracker=client, environ=ENV)
    assert client.statuses == ["FAILED", "KILLED", "RUNNING", "FINISHED"]


def test_a_line_that_mlflow_will_never_take_is_put_aside(job: Path) -> None:
    client, spool = FakeTracker(), Spool(job)
    client.bad = "what?"
    for step in range(20):
        spool.metrics({"loss": 0.5, **({"what?": 1.0} if step == 7 else {})}, step=step)
    assert deliver(job, tracker=client, environ=ENV) == 21
    assert [step for _, _, step in client.metrics] == list(range(20))
    aside = read_json_lines(job / "tracking" / "refused.jsonl")
    assert [(line["key"], line["step"], line["why"]) for line in aside] == [
        ("what?", 7, "invalid metric name")
    ]
    assert deliver(job, tracker=client, environ=ENV) == 0


def test_a_run_that_was_deleted_is_not_told_any_more(job: Path) -> None:
    client = FakeTracker()
    client.deleted = True
    Spool(job).metrics({"loss": 0.5}, step=1)
    with pytest.raises(Undelivered, match="run run-7 is deleted"):
        deliver(job, tracker=client, environ=ENV)
    assert client.metrics == []


def test_the_note_of_an_earlier_version_is_understood(job: Path) -> None:
    client, spool = FakeTracker(), Spool(job)
    spool.metrics({"loss": 0.5}, step=1)
    done = spool.path.stat().st_size
    write_json(job / "tracking" / "position.json", {"bytes": done, "evaluations": 0})
    spool.metrics({"loss": 0.25}, step=2)
    assert deliver(job, tracker=client, environ=ENV) == 1
    assert client.metrics == [("loss", 0.25, 2)]


def test_another_delivery_at_work_is_not_waited_for_for_ever(job: Path) -> None:
    Spool(job).metrics({"loss": 0.5}, step=1)
    with (job / "tracking" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Undelivered, match="another delivery"):
            deliver(job, tracker=FakeTracker(), environ=ENV, timeout=0.1)


def test_lines_arrive_in_order_and_once(job: Path) -> None:
    client, spool = FakeTracker(), Spool(job)
    spool.params({"steps": 10})
    spool.tags({"folder": job})
    for step in range(1, 2301):
        spool.metrics({"loss": 1 / step}, step=step)
    assert deliver(job, tracker=client, environ=ENV) == 2302
    assert [step for _, _, step in client.metrics] == list(range(1, 2301))
    assert client.requests == [998, 1000, 302]
    assert client.params == {"steps": "10"}
    assert client.tags == {"folder": str(job)}
    assert deliver(job, tracker=client, environ=ENV) == 0
    spool.metrics({"loss": 0.0}, step=2301)
    spool.params({"steps": 20, "more": 1})
    assert deliver(job, tracker=client, environ=ENV) == 3
    assert client.metrics[-1] == ("loss", 0.0, 2301)
    assert client.params == {"steps": "10", "more": "1"}


def test_mlflow_that_is_away_gets_everything_later(job: Path) -> None:
    client, spool = FakeTracker(), Spool(job)
    for step in range(1500):
        spool.metrics({"loss": 0.5}, step=step)
    client.down = True
    with pytest.raises(Undelivered, match=r"MLflow at http://mlflow did not take.*connection refused"):
        deliver(job, tracker=client, environ=ENV)
    client.down = False
    assert deliver(job, tracker=client, environ=ENV) == 1500
    assert len(client.metrics) == 1500


def test_a_line_that_is_half_written_waits_and_a_broken_one_is_passed_over(job: Path) -> None:
    client, spool = FakeTracker(), Spool(job)
    spool.metrics({"loss": 0.5}, step=1)
    with spool.path.open("a") as f:
        f.write('{"metric": "loss", "value"')
    assert deliver(job, tracker=client, environ=ENV) == 1
    Spool(job).metrics({"loss": 0.25}, step=2)
    assert deliver(job, tracker=client, environ=ENV) == 2
    assert [step for _, _, step in client.metrics] == [1, 2]


def test_without_a_tracking_uri_nothing_is_sent(job: Path, tmp_path: Path) -> None:
    Spool(job).metrics({"loss": 0.5}, step=1)
    assert deliver(job, tracker=FakeTracker(), environ={}) == 0
    assert deliver(tmp_path / "no job", tracker=FakeTracker(), environ=ENV) == 0


# MLflow 3.17 asks SQLAlchemy 2.1 for a loader by its old name.
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning")
def test_the_real_client_makes_the_run(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a tracking store of MLflow's own, on a database file."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    (job / "tracking" / "run.json").unlink()
    spool = Spool(job)
    spool.params({"steps": 10})
    spool.tags({"trainyard.job": "job"})
    for step in (1, 2, 3):
        spool.metrics({"loss": 1.0 / step, "rate": 10.0}, step=step)
    assert deliver(job, environ={ENV_URI: uri}) == 8
    known = read_json(job / "tracking" / "run.json")
    assert known is not None
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(known["run_id"])
    assert run.data.params == {"steps": "10"}
    assert run.data.tags["trainyard.job"] == "job"
    assert [m.value for m in client.get_metric_history(known["run_id"], "loss")] == [1.0, 0.5, 1.0 / 3]
    experiment = client.get_experiment_by_name("job")
    assert experiment is not None
    assert run.info.experiment_id == experiment.experiment_id
    assert known["tracking_uri"] == uri
    assert known["url"] == ""  # a database has no page


@pytest.fixture
def nobody() -> Iterator[str]:
    """A server that answers every request with 503."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        do_POST = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_refuses_is_a_warning(
    job: Path, nobody: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV_URI, nobody)
    monkeypatch.setattr(deliver_module.os, "nice", lambda _: 0)
    Spool(job).metrics({"loss": 0.5}, step=1)
    assert main(["--job", str(job), "--once"]) == 1
    assert "did not take the metrics" in caplog.text
    JobRecord.open(job).finish(JobState.SUCCEEDED)
    assert main(["--job", str(job), "--every", "0.1"]) == 1


def test_delivery_ends_when_the_job_is_over_and_all_is_sent(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, spool, record = FakeTracker(), Spool(job), JobRecord.open(job)
    monkeypatch.setattr(deliver_module, "connect", lambda uri, environ, timeout: client)
    monkeypatch.setattr(deliver_module.os, "nice", lambda _: 0)
    monkeypatch.setenv(ENV_URI, "http://mlflow")
    spool.metrics({"loss": 0.5}, step=1)

    def finish_later() -> None:
        while not client.metrics:
            time.sleep(0.01)
        spool.metrics({"loss": 0.25}, step=2)
        record.finish(JobState.SUCCEEDED)

    thread = threading.Thread(target=finish_later)
    thread.start()
    assert main(["--job", str(job), "--every", "30"]) == 0
    thread.join()
    assert [step for _, _, step in client.metrics] == [1, 2]


def test_the_launcher_begins_delivery_once_training_has_run_for_a_while(job: Path, nobody: str) -> None:
    now = [0.0]
    env = {**os.environ, ENV_URI: nobody}
    delivery = Delivery(job, env, after=10.0, patience=0.1, clock=lambda: now[0])
    delivery.progressed("building")
    delivery.poll()
    delivery.progressed("training")
    now[0] = 9.0
    delivery.poll()
    assert delivery._process is None
    now[0] = 10.0
    delivery.poll()
    process = delivery._process
    assert process is not None
    assert sys.executable in process.args  # type: ignore[operator]
    delivery.poll()
    delivery.finish()
    assert process.poll() is None
    delivery.stop()
    assert process.poll() == -9
    quiet = Delivery(job, {}, after=0.0)
    quiet.progressed("training")
    quiet.poll()
    quiet.finish()
    quiet.stop()
    assert quiet._process is None
