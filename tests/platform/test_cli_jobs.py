"""jobs list, show, plan and watch, on recorded folders; the table on a terminal of its own."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trainyard import cli
from trainyard.commands import jobs
from trainyard.platform.job_view import JobNow, job_table

from trainers.job.failures import Failure, FailureClass
from trainers.job.observations import Evaluation, add_evaluation, add_warning
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import Attempt, Heartbeat, JobRecord, JobState
from trainers.job.replica_log import ReplicaLog
from trainers.job.spec import Strategy, TrainingJob, standard_roles
from trainers.job.times import Marks, note_export, time_split


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TRAINYARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return tmp_path / "home"


def job(storage: Path, name: str, *, strategy: str = "local", evaluator: bool = False) -> JobRecord:
    """A recorded job of 10 steps, of which 7 are done."""
    kind = Strategy.from_dict(strategy)
    spec = TrainingJob(
        name="digits",
        trainer="trainers.models.digits",
        args={"steps": 10},
        roles=standard_roles(kind, workers=2, ps=1, evaluator=evaluator),
        strategy=kind,
        inputs={"records": "/x/manifest.json"},
        output=str(storage / "jobs" / name),
    )
    record = JobRecord.create(make_plan(spec, Cluster.process(range(5000, 5010)), gang="g"))
    record.beat(Heartbeat("chief", 0, phase="training", step=7, target=10))
    return record


def fail(record: JobRecord) -> None:
    failure = Failure(FailureClass.USER, "loss is nan", code="user.nan", role="chief", index=0)
    record.finish(JobState.FAILED, step=3, failure=failure)


def test_list_and_show(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["jobs", "list"]) == 0
    assert "no jobs yet" in capsys.readouterr().out
    assert cli.main(["jobs", "watch"]) == cli.EXIT_REFUSED
    assert "there are no jobs yet" in capsys.readouterr().err
    storage = home / "storage"
    job(storage, "d/run-1").finish(JobState.SUCCEEDED, step=10, metrics={"loss": 0.1})
    os.utime(storage / "jobs" / "d" / "run-1" / "plan.json", (0, 0))
    job(storage, "d/run-2")
    assert cli.main(["jobs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["d/run-2", "PLANNED", "7"]
    assert lines[2].split()[:3] == ["d/run-1", "SUCCEEDED", "10"]
    assert cli.main(["jobs", "show", "run-1"]) == 0
    shown = capsys.readouterr().out
    assert "d/run-1: SUCCEEDED" in shown
    assert "10 steps; loss 0.1000" in shown
    assert cli.main(["jobs", "show", "latest"]) == 0
    assert "chief-0: training: step 7/10" in capsys.readouterr().out
    assert cli.main(["jobs", "show", "run"]) == cli.EXIT_REFUSED
    assert "could be 2 jobs" in capsys.readouterr().err
    assert cli.main(["jobs", "show", "zzz"]) == cli.EXIT_REFUSED
    assert "jobs list" in capsys.readouterr().err


def test_show_says_where_the_time_went_and_what_was_seen(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = job(home / "storage", "d/run-1")
    begun = record.generation().at
    now = [begun + 4.0]
    marks = Marks(record.folder, 1, now=lambda: now[0])
    now[0] += 6.0
    marks.imported()
    now[0] += 2.0
    marks.stepped()
    now[0] += 60.0
    marks.kept(5.0)
    record.finish(JobState.SUCCEEDED, step=10, seconds=time_split(record, end=now[0]))
    note_export(record.folder, 2.5)
    add_evaluation(record.folder, Evaluation(10, {"accuracy": 0.97}, 364, 0.4))
    add_warning(record.folder, "evaluator-0", "it was given up: INFRA: it was killed")
    outcome = json.loads((record.folder / "outcome.json").read_text())
    (record.folder / "outcome.json").write_text(json.dumps({**outcome, "at": now[0]}))
    assert cli.main(["jobs", "show", "d/run-1"]) == 0
    shown = capsys.readouterr().out
    assert "time: queue 4.0 s, start 6.0 s, init 2.0 s, train 55.0 s, checkpoint 5.0 s, export 2.5 s" in shown
    assert "evaluation of step 10: accuracy 0.9700 on 364 examples" in shown
    assert "warning: evaluator-0: it was given up" in shown


def test_a_failed_job_shows_its_card_and_attempts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = job(home / "storage", "d/run-1")
    record.write_attempt(
        Attempt("chief", 0, 1, 1, 1, 1.0, 4.0, exit_code=81, failure_class="USER", reason="loss is nan")
    )
    fail(record)
    assert cli.main(["jobs", "show", "d/run-1"]) == 0
    shown = capsys.readouterr().out
    assert "chief-0 process 1: after 3.0 s, exit code 81, USER: loss is nan" in shown
    assert "FAILED USER (user.nan): d/run-1" in shown
    assert cli.main(["jobs", "watch", "d/run-1"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED after 3 steps" in shown
    assert "what:       loss is nan" in shown


def test_a_plan(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = job(home / "storage", "d/run-1", strategy="parameter_server", evaluator=True)
    assert cli.main(["jobs", "plan", "run-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job digits: parameter_server, gang g in namespace trainyard (process)"
    assert [line.split()[0] for line in lines[2:]] == [
        "ps-0",
        "worker-0",
        "worker-1",
        "chief-0",
        "evaluator-0",
    ]
    assert cli.main(["jobs", "plan", "run-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record.plan().to_dict()


def test_watching_to_the_end_in_lines(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = job(home / "storage", "d/run-1", evaluator=True)

    def finish(_: float) -> None:
        add_evaluation(record.folder, Evaluation(10, {"accuracy": 0.97}, 364, 0.4))
        add_warning(record.folder, "worker-1", "it is slow")
        record.finish(JobState.SUCCEEDED, step=10)

    monkeypatch.setattr(jobs.time, "sleep", finish)
    assert cli.main(["jobs", "watch"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "training: step 7/10",
        "evaluation of step 10: accuracy 0.9700 on 364 examples",
        "warning: worker-1: it is slow",
        "SUCCEEDED after 10 steps",
    ]


def test_watching_several(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (job(home / "storage", f"d/run-{number}") for number in (1, 2))
    ends = [lambda: one.finish(JobState.SUCCEEDED, step=10), lambda: fail(two)]
    monkeypatch.setattr(jobs.time, "sleep", lambda _: ends.pop(0)())
    assert cli.main(["jobs", "watch", "run-1", "run-2", "run-1"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("d/run-1: training: step 7/10\nd/run-2: training: step 7/10\n")
    assert "d/run-1: SUCCEEDED after 10 steps\nd/run-2: FAILED after 3 steps" in shown
    assert "FAILED USER (user.nan): d/run-2" in shown


def test_a_look_at_how_a_gang_stands(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = job(home / "storage", "d/run-1", strategy="parameter_server", evaluator=True)
    now = time.time()
    figures: dict[str, Any] = {"examples_per_s": 12345.6, "loss": 0.25, "input_wait": 0.034, "eta_s": 95.0}
    record.beat(Heartbeat("chief", 0, phase="training", step=7, target=10, at=now, **figures))
    record.beat(Heartbeat("worker", 0, phase="serving", at=now - 100))
    record.beat(Heartbeat("evaluator", 0, phase="waiting", step=5, target=10, loss=0.3, at=now))
    for number in (1, 2):
        record.write_attempt(Attempt("worker", 0, number, 1, 4711, started=now + number))
    add_evaluation(record.folder, Evaluation(5, {"accuracy": 0.97, "loss": 0.3}, 364, 0.4))
    (record.folder / "stragglers.json").write_text('{"worker-0": {"since": 1.0, "reason": "silent"}}')
    (record.folder / "workers.json").write_text('{"worker-0": {"steps": 6, "examples_per_s": 4321.0}}')
    record.next_generation(1, by="chief-0", reason="STALLED: no step")
    assert cli.main(["jobs", "watch", "run-1", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"d/run-1  PLANNED  parameter_server  [0-9.]+ s  generation 2", lines[0].rstrip())
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in lines[1:]}
    titles = ["replica", "phase", "step", "examples/s", "loss", "to go", "input wait", "try", "last beat"]
    assert rows["replica"] == titles
    assert rows["chief-0"][:8] == [
        "chief-0",
        "training",
        "7/10",
        "12,346",
        "0.2500",
        "1 min 35 s",
        "3.4%",
        "1",
    ]
    assert rows["chief-0"][8].endswith("s ago")
    assert rows["ps-0"] == ["ps-0", "not there yet"]
    assert rows["worker-0"][:3] == ["worker-0", "serving", "6"]
    assert rows["worker-0"][3:5] == ["4,321", "2"]
    assert 100 <= int(rows["worker-0"][5].split()[0]) < 160
    assert rows["worker-0"][6] == "straggler: silent"
    assert rows["evaluator-0"][:4] == ["evaluator-0", "waiting", "5/10", "0.3000"]
    assert lines[-1].startswith("evaluation of step 5: accuracy 0.9700, loss 0.3000 on 364 examples")
    fail(record)
    assert cli.main(["jobs", "watch", "run-1", "--once"]) == 1
    assert "ago" not in capsys.readouterr().out


def test_a_narrow_terminal_shows_what_matters_most(home: Path) -> None:
    record = job(home / "storage", "d/run-1", strategy="parameter_server", evaluator=True)
    figures: dict[str, Any] = {"examples_per_s": 12345.6, "loss": 0.25, "input_wait": 0.034, "eta_s": 95.0}
    record.beat(Heartbeat("chief", 0, phase="training", step=123456, target=2000000, **figures))
    for width, there in ((80, False), (140, True)):
        out = io.StringIO()
        Console(file=out, width=width).print(job_table(JobNow.of("d/run-1", record), width))
        shown = out.getvalue()
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= width
        assert "123456/2000000" in shown
        assert ("input wait" in shown) is there


def test_the_table_on_a_terminal_refreshes_and_ends_with_the_job(tmp_path: Path) -> None:
    record = job(tmp_path / "home" / "storage", "d/run-1", strategy="parameter_server", evaluator=True)
    leader, follower = pty.openpty()
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_")}
    env |= {
        "TRAINYARD_HOME": str(tmp_path / "home"),
        "TERM": "xterm-256color",
        "COLUMNS": "130",
        "LINES": "40",
    }
    watching = subprocess.Popen(
        [sys.executable, "-m", "trainyard.cli", "jobs", "watch"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=env,
        start_new_session=True,
    )
    os.close(follower)
    shown = bytearray()

    def until(text: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while text.encode() not in shown:
            assert time.monotonic() < deadline, shown.decode(errors="replace")
            if select.select([leader], [], [], 0.1)[0]:
                shown.extend(os.read(leader, 65536))

    try:
        until("7/10")
        assert b"\x1b[" in shown  # drawn, with colours
        record.beat(Heartbeat("chief", 0, phase="training", step=9, target=10, loss=0.125))
        until("9/10")
        until("0.1250")
        assert b"\x1b[1A" in shown  # over what was there before
        add_evaluation(record.folder, Evaluation(9, {"accuracy": 0.97}, 364, 0.4))
        until("evaluation of step 9: accuracy 0.9700")
        fail(record)
        until("FAILED after 3 steps")
        until("what to do")
        closer = threading.Timer(30.0, watching.kill)
        closer.start()
        assert watching.wait() == 1
        closer.cancel()
    finally:
        watching.kill()
        watching.wait()
        os.close(leader)


def test_logs_of_all_replicas_and_of_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = job(home / "storage", "d/run-1", strategy="parameter_server")
    assert cli.main(["jobs", "logs", "run-1"]) == 0
    assert "nothing was printed yet" in capsys.readouterr().out
    now = [0.0]
    for replica, text in (
        ("ps-0", "up [0]"),
        ("worker-1", "step 1"),
        ("ps-0", "step 2"),
        ("chief-0", "done"),
    ):
        now[0] += 1
        ReplicaLog(record.folder, replica, now=lambda: now[0]).write(f"{text}\n".encode())
    assert cli.main(["jobs", "logs", "run-1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[ps-0] up [0]",
        "[worker-1] step 1",
        "[ps-0] step 2",
        "[chief-0] done",
    ]
    assert cli.main(["jobs", "logs", "run-1", "-r", "ps-0", "--tail", "1", "--timestamps"]) == 0
    assert capsys.readouterr().out == "1970-01-01T00:00:03.000Z [ps-0] step 2\n"
    assert cli.main(["jobs", "logs", "run-1", "-r", "ps-7"]) == cli.EXIT_REFUSED
    assert "d/run-1 has no replica ps-7" in capsys.readouterr().err
    later = threading.Timer(0.3, lambda: record.finish(JobState.SUCCEEDED, step=10))
    later.start()
    assert cli.main(["jobs", "logs", "run-1", "--follow", "-n", "0"]) == 0
    later.join()
    assert capsys.readouterr().out == ""
