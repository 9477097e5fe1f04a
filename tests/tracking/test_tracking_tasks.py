"""Who tells MLflow what: launchers their system metrics, the gate, tasks after a failure, the command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainyard import cli
from trainyard.tracking import deliver_leftovers, deliver_soon, early_run, note_verdict

from tests.mlflow_server import MlflowServer
from trainers.job.files import read_json, read_json_lines
from trainers.job.record import JobRecord, JobState
from trainers.runtime.deliver import ENV_URI, deliver, undelivered
from trainers.runtime.tracker import connect
from trainers.runtime.tracking import RUN, Spool
from trainers.runtime.usage import ENV_EVERY, Usage


def run_of(server: MlflowServer, folder: Path) -> Any:
    """The job's run, as MLflow's own client sees it."""
    import mlflow

    return mlflow.MlflowClient(server.url).get_run(str((read_json(folder / RUN) or {})["run_id"]))


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of one who lets everybody in, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# ---- how runs end


@pytest.mark.parametrize(
    ("state", "status"),
    [(JobState.FAILED, "FAILED"), (JobState.CANCELLED, "KILLED"), (JobState.SUCCEEDED, "FINISHED")],
)
def test_a_run_ends_as_its_job(
    server: MlflowServer,
    make_job: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    state: JobState,
    status: str,
) -> None:
    monkeypatch.setenv(ENV_URI, server.url)
    folder = make_job(f"run-{state}")
    early_run(folder, server.url, experiment="digits", name="run-1", tags={"a": "b"})
    assert run_of(server, folder).info.status == "RUNNING"
    outcome = JobRecord.open(folder).finish(state)
    assert deliver_soon(folder)
    run = run_of(server, folder)
    assert run.info.status == status
    assert abs(run.info.end_time - outcome.at * 1000) < 2
    assert run.data.tags["a"] == "b"
    # Opened again, it runs again.
    if state is not JobState.SUCCEEDED:
        JobRecord.create(JobRecord.open(folder).plan())
        assert deliver_soon(folder)
        assert run_of(server, folder).info.status == "RUNNING"


def test_a_verdict_is_tagged_also_when_mlflow_was_away(
    server: MlflowServer, make_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    """What the gate said stays in the job's folder until the next run's verdict finds it there."""
    folder = make_job("run-refused")
    JobRecord.open(folder).finish(JobState.SUCCEEDED)
    monkeypatch.setenv(ENV_URI, hanging)
    verdict = {"outcome": "fail", "reasons": ["accuracy 0.5 is below 0.9", "slices"], "override": None}
    started = time.monotonic()
    note_verdict(folder, verdict)
    assert time.monotonic() - started < 60  # two seconds; a guard against waiting for ever
    assert undelivered(folder)
    monkeypatch.setenv(ENV_URI, server.url)
    later = make_job("run-later")
    assert deliver_leftovers(later.parent, but=later) == 1
    assert deliver_leftovers(later.parent, but=later) == 0
    run = run_of(server, folder)
    assert run.info.status == "FINISHED"
    assert run.data.tags["trainyard.gate"] == "fail"
    assert run.data.tags["trainyard.gate.reasons"] == "accuracy 0.5 is below 0.9; slices"
    note_verdict(
        folder, {"outcome": "pass", "reasons": ["x"], "override": {"author": "ada", "reason": "for the fair"}}
    )
    tags = run_of(server, folder).data.tags
    assert (tags["trainyard.gate"], tags["trainyard.gate.override"]) == ("pass", "ada: for the fair")


# ---- the command


def test_the_command_tells_what_waits_and_sends_it(
    server: MlflowServer,
    make_job: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRAINYARD_STORAGE", str(tmp_path))
    monkeypatch.delenv(ENV_URI, raising=False)
    first, second = make_job("a"), make_job("b")
    assert cli.main(["tracking", "status"]) == 0
    assert "told everything" in capsys.readouterr().out
    assert cli.main(["tracking", "deliver"]) == cli.EXIT_REFUSED
    capsys.readouterr()
    for step in range(3):
        Spool(first).metrics({"loss": 0.5}, step=step)
    JobRecord.open(second).finish(JobState.FAILED)
    (second / "tracking").mkdir(exist_ok=True)
    assert cli.main(["tracking", "status"]) == 0
    said = capsys.readouterr().out
    assert "digits_retrain/a: 3 lines wait" in said
    assert "digits_retrain/b: how it ended waits" in said
    assert cli.main(["tracking", "status", "--json"]) == 0
    assert [row["lines"] for row in json.loads(capsys.readouterr().out)] == [3, 0]

    monkeypatch.setenv(ENV_URI, "http://127.0.0.1:1")
    assert cli.main(["tracking", "deliver", "/a"]) == cli.EXIT_FAILED
    assert "does not answer" in capsys.readouterr().out
    monkeypatch.setenv(ENV_URI, server.url)
    assert cli.main(["tracking", "deliver"]) == 0
    said = capsys.readouterr().out
    assert "digits_retrain/a: 3 lines sent http" in said
    assert run_of(server, second).info.status == "FAILED"
    assert cli.main(["tracking", "deliver"]) == 0
    assert "nothing waits" in capsys.readouterr().out


# ---- system metrics


def test_what_a_replica_uses_reaches_mlflow(server: MlflowServer, make_job: Callable[..., Path]) -> None:
    """Of a process that burns a core in a child of its own."""
    folder = make_job()
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True)
    env = {ENV_URI: server.url, ENV_EVERY: "0.2"}
    try:
        usage = Usage(folder, "worker-0", env, began=time.time() - 100)
        for _ in range(600):
            usage.poll(child.pid)
            lines = read_json_lines(folder / "tracking" / "system-worker-0.jsonl")
            if sum("cpu" in line["metric"] and line["value"] > 0 for line in lines) >= 2:
                break
            time.sleep(0.05)
    finally:
        os.killpg(child.pid, 9)
        child.wait()
    usage.poll(child.pid)  # it is gone: nothing to say, and no error
    deliver(folder, environ=env)
    metrics = run_of(server, folder).data.metrics
    assert {name.removeprefix("system/worker-0/") for name in metrics} == {
        "cpu_utilization_percentage",
        "memory_usage_megabytes",
        "disk_read_megabytes",
        "disk_write_megabytes",
        "system_memory_usage_percentage",
        "disk_usage_percentage",
    }
    assert metrics["system/worker-0/memory_usage_megabytes"] > 5
    assert 0 < metrics["system/worker-0/system_memory_usage_percentage"] <= 100
    assert all(line["step"] >= 100 for line in lines)


@pytest.mark.parametrize("env", [{}, {ENV_URI: "http://x", ENV_EVERY: "0"}])
def test_no_system_metrics_where_nobody_wants_them(
    make_job: Callable[..., Path], env: dict[str, str]
) -> None:
    folder, now = make_job(), [0.0]
    usage = Usage(folder, "worker-0", env, clock=lambda: now[0])
    now[0] = 1e6
    usage.poll(os.getpid())
    assert not (folder / "tracking").exists()


# ---- MLflow that is slow


def test_a_step_never_waits_for_mlflow(make_job: Callable[..., Path], hanging: str) -> None:
    """A delivery hangs at an MLflow that lets it in and says nothing; who spools writes on, and so does the end."""
    folder = make_job()
    spool = Spool(folder)
    spool.metrics({"loss": 1.0}, step=0)
    env = {**os.environ, ENV_URI: hanging}
    command = [sys.executable, "-m", "trainers.runtime.deliver", "--job", str(folder), "--timeout", "200"]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as hung:
        try:
            deadline = time.monotonic() + 60
            while not (folder / "tracking" / "lock").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            for step in range(1, 2000):
                spool.metrics({"loss": 1.0}, step=step)
            JobRecord.open(folder).finish(JobState.SUCCEEDED)
            assert hung.poll() is None  # all of it was written while the delivery hung
        finally:
            hung.kill()
    assert len(read_json_lines(spool.path)) == 2000
    assert not (folder / RUN).exists()


def test_another_deployments_answer_is_no_mlflow(server: MlflowServer, make_job: Callable[..., Path]) -> None:
    """A run of a server that is gone is made anew at the one that is there, with all its lines."""
    folder = make_job()
    Spool(folder).metrics({"loss": 1.0}, step=1)
    deliver(folder, environ={ENV_URI: server.url})
    known = json.loads((folder / RUN).read_text())
    (folder / RUN).write_text(json.dumps({**known, "run_id": "0" * 32, "tracking_uri": "http://elsewhere:1"}))
    (folder / "tracking" / "key.json").unlink()  # it was the other server's as well
    Spool(folder).metrics({"loss": 0.5}, step=2)
    assert deliver(folder, environ={ENV_URI: server.url}) == 2
    run = run_of(server, folder)
    assert run.info.run_id not in ("0" * 32, known["run_id"])
    history = connect(server.url).history(run.info.run_id, "loss")
    assert sorted(step for _, _, step in history) == [1, 2]
