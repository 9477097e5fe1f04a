"""The durable truth: transitions, who wins, what a reader sees while others write, what is kept."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainers.job.errors import MissingRecord, RecordConflict
from trainers.job.failures import Failure, FailureClass
from trainers.job.files import create_json, read_json, write_bytes, write_json
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import TRANSITIONS, Attempt, Heartbeat, JobRecord, JobState, Outcome
from trainers.job.spec import RoleKind, Strategy, TrainingJob, standard_roles

PS = Strategy("parameter_server")
BOOM = Failure(FailureClass.USER, "boom")


def plan_of(folder, ports=(1, 2, 3), **args):
    roles = standard_roles(PS, workers=1, ps=1)
    job = TrainingJob("digits", "module", args=args, strategy=PS, roles=roles, output=str(folder))
    return make_plan(job, Cluster.process(ports), gang="digits")


@pytest.fixture
def record(tmp_path):
    ticks = itertools.count(100.0)
    return JobRecord.create(plan_of(tmp_path / "job"), clock=lambda: next(ticks))


def test_a_new_record(record):
    assert record.state is JobState.PLANNED
    assert record.plan() == plan_of(record.folder)
    assert record.outcome() is None
    assert record.generation().number == 1
    assert record.heartbeats() == []
    assert record.attempts() == []


# The table of TRANSITIONS said again, so that a change there is a change here.
ALLOWED = {
    ("PLANNED", "STARTING"),
    ("STARTING", "RUNNING"),
    ("STARTING", "RESTARTING"),
    ("RUNNING", "RESTARTING"),
    ("RESTARTING", "STARTING"),
    ("RESTARTING", "RUNNING"),
}
LIVE = [s for s in JobState if not s.is_terminal]
ENDS = [s for s in JobState if s.is_terminal]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LIVE, LIVE)), ids=str)
def test_transition_between_live_states(record, before, after):
    write_json(record.folder / "state.json", {"state": before.value, "at": 0})
    if before is after or (before.value, after.value) in ALLOWED:
        record.set_state(after)
        assert record.state is after
    else:
        with pytest.raises(RecordConflict, match=f"from {before} to {after}"):
            record.set_state(after)
        assert record.state is before


@pytest.mark.parametrize(("before", "end"), list(itertools.product(LIVE, ENDS)), ids=str)
def test_every_live_state_may_end_but_only_by_finish(record, before, end):
    assert end in TRANSITIONS[before]
    write_json(record.folder / "state.json", {"state": before.value, "at": 0})
    with pytest.raises(RecordConflict):
        record.set_state(end)
    record.finish(end)
    assert record.state is end


@pytest.mark.parametrize(("end", "after"), list(itertools.product(ENDS, LIVE)), ids=str)
def test_nothing_overrules_an_end(record, end, after):
    record.finish(end)
    with pytest.raises(RecordConflict):
        record.set_state(after)
    assert record.finish(JobState.CANCELLED).state is end


def test_finish_refuses_a_live_state(record):
    with pytest.raises(RecordConflict, match="RUNNING is not an end"):
        record.finish(JobState.RUNNING)


def test_the_first_outcome_holds(record):
    first = record.finish(JobState.SUCCEEDED, step=500, metrics={"loss": 0.1}, seconds={"steps": 9.5})
    second = record.finish(JobState.FAILED, failure=BOOM)
    assert second == first == record.outcome()
    assert first.metrics == {"loss": 0.1}
    assert first.seconds == {"steps": 9.5}


def test_outcome_json_changes_nothing_and_newer_fields_are_left_out():
    outcome = Outcome(JobState.FAILED, 1.0, 5, {"loss": 1.0}, {"steps": 2.0}, BOOM)
    data = json.loads(json.dumps(outcome.to_dict()))
    assert Outcome.from_dict(data) == outcome
    assert Outcome.from_dict({**data, "of_a_newer_version": 1}) == outcome


# ---- create, again


def test_an_unfinished_record_goes_on_with_new_addresses(record):
    record.set_state(JobState.STARTING)
    record.next_generation(1, by="chief-0", reason="worker-0 lost")
    again = JobRecord.create(plan_of(record.folder, ports=(7, 8, 9)))
    assert again.state is JobState.STARTING
    assert again.generation().number == 2
    assert again.plan().replica(RoleKind.PS, 0).address == "127.0.0.1:7"


def test_args_that_json_changes_are_still_the_same_job(tmp_path):
    record = JobRecord.create(plan_of(tmp_path, layers=(64, 32)))
    record.set_state(JobState.STARTING)
    assert JobRecord.create(plan_of(tmp_path, layers=(64, 32))).state is JobState.STARTING


def test_a_finished_record_stays(record):
    record.finish(JobState.SUCCEEDED, step=3)
    again = JobRecord.create(plan_of(record.folder, ports=(7, 8, 9)))
    assert again.state is JobState.SUCCEEDED
    assert again.plan() == plan_of(record.folder)


@pytest.mark.parametrize("end", [JobState.FAILED, JobState.CANCELLED], ids=str)
def test_a_failed_record_is_opened_again_and_keeps_its_checkpoints(record, end):
    (record.folder / "checkpoints").mkdir()
    (record.folder / "checkpoints" / "ckpt-1").write_text("weights")
    record.set_state(JobState.STARTING)
    record.next_generation(1, by="chief-0", reason="x")
    record.write_attempt(Attempt("chief", 0, 1, 1, 7, 1.0))
    record.finish(end, failure=BOOM)
    again = JobRecord.create(plan_of(record.folder))
    assert again.state is JobState.PLANNED
    assert again.generation().number == 1
    assert again.attempts() == []
    assert (again.folder / "checkpoints" / "ckpt-1").read_text() == "weights"
    assert read_json(again.folder / "history" / "0001" / "outcome.json")["state"] == end.value
    again.finish(end)
    JobRecord.create(plan_of(record.folder))
    assert sorted(p.name for p in (record.folder / "history").iterdir()) == ["0001", "0002"]


@pytest.mark.parametrize("end", [None, JobState.SUCCEEDED, JobState.FAILED], ids=str)
def test_a_record_of_another_job_moves_away_as_a_whole(record, end):
    (record.folder / "checkpoints").mkdir()
    if end:
        record.finish(end)
    again = JobRecord.create(plan_of(record.folder, steps=7))
    assert again.state is JobState.PLANNED
    assert again.plan().job.args == {"steps": 7}
    assert not (again.folder / "checkpoints").exists()
    old = again.folder / "history" / "0001"
    assert (old / "checkpoints").is_dir()
    assert read_json(old / "plan.json")["job"]["args"] == {}


@pytest.mark.parametrize("changes", [{}, {"steps": 7}], ids=["same job", "another job"])
@pytest.mark.parametrize("end", [JobState.SUCCEEDED, JobState.FAILED], ids=str)
@pytest.mark.parametrize("moved", range(8))
def test_a_move_to_history_that_was_cut_short_is_finished(record, monkeypatch, changes, end, moved):
    record.set_state(JobState.STARTING)
    record.beat(Heartbeat("chief", 0))
    record.write_attempt(Attempt("chief", 0, 1, 1, 7, 1.0))
    record.finish(end)
    rename, left = Path.rename, iter(range(moved))

    def cut(self, target):
        if next(left, None) is None:
            raise InterruptedError("power cut")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut)
        with contextlib.suppress(InterruptedError):
            JobRecord.create(plan_of(record.folder, **changes))
    again = JobRecord.create(plan_of(record.folder, **changes))
    stays = not changes and end is JobState.SUCCEEDED
    assert again.state is (JobState.SUCCEEDED if stays else JobState.PLANNED)
    assert again.plan().job.args == changes
    assert len(again.attempts()) == stays


def test_open(record, tmp_path):
    assert JobRecord.open(str(record.folder)).plan() == record.plan()
    with pytest.raises(MissingRecord, match="no job in"):
        JobRecord.open(tmp_path / "nothing")
    (record.folder / "plan.json").unlink()
    with pytest.raises(MissingRecord, match=r"plan\.json is not there"):
        record.plan()


def test_no_state_file_reads_as_planned(record):
    (record.folder / "state.json").unlink()
    assert record.state is JobState.PLANNED
    (record.folder / "generations" / "0001.json").unlink()
    assert record.generation().number == 1


# ---- heartbeats, attempts, generations


def test_heartbeats(record):
    assert record.heartbeat("worker", 0) is None
    record.beat(Heartbeat("worker", 0, "training", step=1, loss=0.5))
    record.beat(Heartbeat("chief", 0, at=7.0))
    record.beat(Heartbeat("worker", 0, "training", step=2))
    beat = record.heartbeat(RoleKind.WORKER, 0)
    assert (beat.step, beat.loss, beat.replica) == (2, None, "worker-0")
    assert beat.at > 100
    assert [(b.replica, b.at) for b in record.heartbeats()] == [("chief-0", 7.0), ("worker-0", beat.at)]


def test_fields_of_a_newer_version_are_left_out(record):
    record.beat(Heartbeat("chief", 0, step=1))
    path = record.folder / "heartbeats" / "chief-0.json"
    write_json(path, {**read_json(path), "of_a_newer_version": 1})
    assert record.heartbeat("chief", 0).step == 1


def test_attempts(record):
    first = Attempt("worker", 1, 1, 1, 10, started=5.0, ended=6.0, signal=9, failure_class="INFRA")
    second = Attempt("worker", 1, 2, 1, 11, started=7.0)
    chief = Attempt("chief", 0, 1, 1, 12, started=6.0)
    for attempt in (second, chief, first):
        record.write_attempt(attempt)
    assert record.attempts() == [first, chief, second]
    assert record.attempts("worker") == [first, second]
    assert record.attempts(RoleKind.CHIEF, 0) == [chief]
    assert record.attempts("worker", 0) == []


def test_generations(record):
    assert record.next_generation(1, by="worker-0", reason="died").number == 2
    second = record.next_generation(1, by="chief-0", reason="saw it too")
    assert (second.number, second.by) == (2, "worker-0")
    assert record.next_generation(2, by="chief-0", reason="again").number == 3


# ---- files


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def full_disk(fd):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_bytes(path, b"half")
    with pytest.raises(OSError, match="no space"):
        create_json(tmp_path / "b.json", {})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_create_json_once(tmp_path):
    path = tmp_path / "a.json"
    assert create_json(path, 1)
    assert not create_json(path, 2)
    assert read_json(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert read_json(tmp_path / "b.json") is None


# ---- several processes at once

WRITER = """
import sys, time
from trainers.job.record import *
from trainers.job.record import Heartbeat
from trainers.job.failures import Failure, FailureClass
record, me, at = JobRecord.open(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
while time.time() < at:
    time.sleep(0.001)
for n in range(1, 31):
    assert record.next_generation(n, by=f"worker-{me}", reason="x" * 1000).number >= n + 1
    record.beat(Heartbeat("worker", me, step=n))
    record.beat(Heartbeat("chief", 0, phase=f"{me}" * 5000, step=n))
end = JobState.SUCCEEDED if me % 2 else JobState.FAILED
print(record.finish(end, step=me).step)
"""


def test_writers_in_many_processes(record):
    at = time.time() + 1.5  # all begin at the same instant
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(record.folder), str(n), str(at)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    seen = set()
    while any(w.poll() is None for w in writers):
        beat = record.heartbeat("chief", 0)  # never half a file, never an error
        if beat:
            assert len(set(beat.phase)) == 1
            assert len(beat.phase) == 5000
            seen.add(beat.phase[0])
        for heartbeat in record.heartbeats():
            assert heartbeat.step >= 1
        record.generation()
    ends = [w.communicate() for w in writers]
    assert [w.returncode for w in writers] == [0] * 4, ends
    outcome = record.outcome()
    assert {out.strip() for out, _ in ends} == {str(outcome.step)}  # all were told the one that won
    assert outcome.state is (JobState.SUCCEEDED if outcome.step % 2 else JobState.FAILED)
    assert record.generation().number == 31
    files = sorted((record.folder / "generations").iterdir())
    assert [f.name for f in files] == [f"{n:04d}.json" for n in range(1, 32)]
    assert seen
