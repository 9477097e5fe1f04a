"""Where the time of a job goes: every second under one name, over restarts too."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.job.failures import Failure, FailureClass
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import Attempt, JobRecord, JobState
from trainers.job.spec import TrainingJob
from trainers.job.times import Life, Marks, note_export, split_seconds, time_split


def test_one_life():
    life = Life(started=12.0, imported=15.0, stepped=19.0, kept=39.0, checkpoint=2.0)
    assert split_seconds(10.0, [life], 40.0) == {
        "queue": 2.0,
        "start": 3.0,
        "init": 4.0,
        "train": 19.0,
        "checkpoint": 2.0,
        "restarts": 0.0,
    }


def test_what_a_killed_chief_had_kept_counts_and_the_rest_is_a_restart():
    first = Life(
        started=12.0, imported=15.0, stepped=19.0, kept=29.0, checkpoint=1.0
    )  # killed at some time to 35
    second = Life(started=35.0, imported=36.0, stepped=38.0, kept=48.0, checkpoint=0.5)
    split = split_seconds(10.0, [first, second], 50.0)
    assert split == {
        "queue": 2,
        "start": 3,
        "init": 4,
        "train": 9 + 11.5,
        "checkpoint": 1.5,
        "restarts": 6 + 3,
    }
    assert sum(split.values()) == 40.0


@pytest.mark.parametrize(
    ("lives", "restarts"),
    [
        (
            [Life(1.0), Life(5.0, 6.0, 8.0)],
            4.0,
        ),  # never came to a step: its own start is the next one's to count
        ([Life(1.0, 2.0, 3.0), Life(5.0, 6.0, 8.0)], 5.0),  # nothing was kept
        ([Life(1.0, 2.0, 3.0, 4.5, 0.5), Life(5.0), Life(6.0, 7.0, 8.0)], 3.5),
        ([Life(1.0)], 0.0),
        ([Life(1.0, 2.0)], 0.0),
    ],
)
def test_every_second_has_one_name(lives, restarts):
    split = split_seconds(0.0, lives, 20.0)
    assert split["restarts"] == restarts
    assert sum(split.values()) == pytest.approx(20.0)
    assert all(value >= 0 for value in split.values())


def test_a_job_that_failed_has_lost_what_was_not_kept():
    life = Life(started=0.0, imported=1.0, stepped=2.0, kept=5.0)
    assert split_seconds(0.0, [life], 9.0, kept_all=False)["restarts"] == 4.0


def test_from_a_record(tmp_path: Path):
    clock = [100.0]
    job = TrainingJob("m", "t", output=str(tmp_path / "job"))
    record = JobRecord.create(make_plan(job, Cluster.process([5000]), gang="g"), clock=lambda: clock[0])
    assert time_split(record, end=101.0) == {}
    record.write_attempt(Attempt("chief", 0, 1, 1, 4711, started=103.0))
    clock[0] = 104.0
    marks = Marks(record.folder, 1, now=lambda: clock[0])
    clock[0] = 105.0
    marks.imported()
    clock[0] = 109.0
    marks.stepped()
    assert time_split(record, end=110.0) == {
        "queue": 3.0,
        "start": 2.0,
        "init": 4.0,
        "train": 1.0,
        "checkpoint": 0.0,
        "restarts": 0.0,
    }
    clock[0] = 120.0
    marks.kept(2.5)
    record.finish(JobState.SUCCEEDED, step=5, seconds=time_split(record, end=clock[0]))
    outcome = record.outcome()
    assert outcome is not None
    assert sum(outcome.seconds.values()) == 20.0
    note_export(record.folder, 1.25)
    assert time_split(record) == {**outcome.seconds, "export": 1.25}


def test_a_job_that_is_opened_again_begins_a_new_split(tmp_path: Path):
    plan = make_plan(TrainingJob("m", "t", output=str(tmp_path)), Cluster.process([5000]), gang="g")
    record = JobRecord.create(plan)
    Marks(record.folder, 1)
    record.finish(JobState.FAILED, failure=Failure(FailureClass.USER, "oh"))
    assert time_split(record)
    assert time_split(JobRecord.create(plan)) == {}


def test_a_mark_that_can_not_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "times").write_text("a file where the folder should be")
    Marks(tmp_path, 1).stepped()
    assert "could not note where the time goes" in caplog.text
