"""A whole parameter server gang with only an S3 server between its replicas."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from tests.s3_server import SECRET, Door
from tests.storage.conftest import LIMIT, StoreGang
from trainers.job.record import JobRecord, JobState
from trainers.runtime.local_gang import leftovers
from trainers.storage.inputs import sets_of

pytestmark = pytest.mark.timeout(900)


def test_a_gang_that_shares_no_folder_trains(make_gang: Callable[..., StoreGang]) -> None:
    gang = make_gang(steps=60, checkpoint_every=20, evaluator=True)
    with gang:
        gang.start()
        result = gang.wait()
    logs = {name: gang.log(name) for name in result.exit_codes}
    assert result.outcome is not None, logs
    assert result.outcome.state is JobState.SUCCEEDED, logs
    assert result.outcome.step == 60
    assert set(result.exit_codes.values()) == {0}, logs
    assert not any(SECRET in text for text in logs.values())


def until(what: Callable[[], object], gang: StoreGang) -> None:
    """Wait for something that a running gang does."""
    deadline = time.monotonic() + LIMIT
    while not what():
        gang.poll()
        logs = {name: gang.log(name)[-3000:] for name in gang.exit_codes}
        assert not any(gang.exit_codes.values()), logs
        assert time.monotonic() < deadline
        time.sleep(0.1)


def uploaded(gang: StoreGang) -> list[int]:
    """The steps of the whole checkpoints in the store."""
    key = gang.mirror.key(gang.record.folder)
    return [saved.step for saved in sets_of(gang.mirror, key).saved()]


def replace(gang: StoreGang, name: str) -> None:
    """Kill a pod as a lost node does; another takes its place, whose disk is empty."""
    gang.signal(name, signal.SIGKILL)
    gang.launchers.pop(name).wait()
    job = gang.root(name) / gang.record.folder.relative_to(gang.mirror.root)
    assert leftovers(job, name=name, patience=10.0) == []
    shutil.rmtree(gang.root(name))
    gang.start(name)


def test_pods_whose_disks_are_lost_go_on_from_the_store(make_gang: Callable[..., StoreGang]) -> None:
    gang = make_gang(steps=1500, checkpoint_every=50)
    with gang:
        gang.start()
        until(lambda: uploaded(gang), gang)
        replace(gang, "worker-0")
        before = uploaded(gang)[-1]
        replace(gang, "chief-0")
        result = gang.wait()
    log = gang.log("chief-0")
    assert result.outcome is not None, log
    assert result.outcome.state is JobState.SUCCEEDED, log
    starts = [int(step) for step in re.findall(r"chief-0 trains \S+ from step (\d+) to", log)]
    assert starts[0] == 0
    assert starts[-1] >= before > 0
    assert uploaded(gang)[-1] == 1500


def test_training_goes_on_while_the_store_is_away(make_gang: Callable[..., StoreGang], door: Door) -> None:
    gang = make_gang(steps=300, checkpoint_every=100)
    key = gang.mirror.key(gang.record.folder)
    here = JobRecord(gang.root("chief-0") / key)
    with gang:
        gang.start()
        until(lambda: (beat := here.heartbeat("chief", 0)) and (beat.step or 0) > 0, gang)
        door.shut()
        until(lambda: (beat := here.heartbeat("chief", 0)) and beat.phase == "ended", gang)
        assert "chief-0" in gang.launchers  # its outcome waits for the store
        assert here.outcome() is None
        until(lambda: "can't be" in gang.log("chief-0"), gang)  # a quick gang ends before it misses the store
        door.open()
        result = gang.wait()
    log = gang.log("chief-0")
    assert result.outcome is not None, log
    assert result.outcome.state is JobState.SUCCEEDED, log
    assert set(result.exit_codes.values()) == {0}
    assert uploaded(gang)[-1] == 300
    assert "can't be" in log
    assert "the store is back after" in log
    assert SECRET not in log
