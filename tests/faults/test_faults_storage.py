"""Disks that are full, and checkpoints that are damaged."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import LIMIT, assert_arrived, card_of
from trainers.runtime.checkpoints import known_checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount; test_files_that_may_not_grow is the same for checkpoints alone")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk to the last byte; the file to remove."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as f:
        for size in (65536, 1):
            try:
                while f.write(b"x" * size):
                    pass
            except OSError:
                continue
    return ballast


def test_a_full_disk_is_a_pause_of_the_checkpoints(gang: Callable, small_disk: Path) -> None:
    run = gang(
        workers=1, ps=1, steps=3000, checkpoint_every=300, output=small_disk / "job", budgets={"stall": 10}
    )
    run.start()
    run.until(lambda: known_checkpoints(run.record.folder / "checkpoints"))
    ballast = fill(small_disk)
    run.until(lambda: "no room for the checkpoint" in run.log("chief-0"))
    assert "is kept" in run.log("chief-0")
    kept = known_checkpoints(run.record.folder / "checkpoints")
    assert not list((run.record.folder / "checkpoints").glob("*temp*"))
    # The heartbeat can't be written, either, and its file's time tells of steps all the same.
    told = run.record.heartbeat_touched("chief", 0)
    run.until(lambda: run.record.heartbeat_touched("chief", 0) != told)
    ballast.unlink()
    run.until(lambda: known_checkpoints(run.record.folder / "checkpoints") != kept)
    assert_arrived(run, run.wait(LIMIT), 3000)
    assert [len(run.record.attempts(role, 0)) for role in ("chief", "worker", "ps")] == [1, 1, 1], [
        line for line in run.log("chief-0").splitlines() if "[chief-0]" in line
    ]
    ballast.unlink(missing_ok=True)


def test_files_that_may_not_grow(gang: Callable) -> None:
    """The same by the limit of a process, which needs no root: all checkpoints fail, the last one too."""
    run = gang(
        "local", steps=600, checkpoint_every=50, caps={"INFRA": 0}, env={"TRAINYARD_ROOM_PATIENCE": "1"}
    )
    run.start()
    run.until(lambda: known_checkpoints(run.record.folder / "checkpoints"))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(run.trainer_pid("chief"), resource.RLIMIT_FSIZE, (16384, hard))
    failure = card_of(run, run.wait(LIMIT), "INFRA")
    assert failure.code == "runtime.disk_full"
    assert "no room for the checkpoint of step 600" in failure.reason
    assert "free space" in failure.hint
    kept = known_checkpoints(run.record.folder / "checkpoints")
    assert kept
    assert all(
        f"{name}.index" in [p.name for p in (run.record.folder / "checkpoints").iterdir()] for name in kept
    )


def test_damaged_checkpoints_are_passed_over(gang: Callable) -> None:
    run = gang("local", steps=2000, checkpoint_every=50, retries=5)
    folder = run.record.folder / "checkpoints"
    run.start()

    def damaged(damage: Callable[[str], None]) -> tuple[list[str], int]:
        """Kill it, damage its newest checkpoint: the names there were, and the step that it went on from."""
        starts = len(run.resumed())
        run.until(lambda: len(known_checkpoints(folder)) == 3 and len(run.resumed()) == starts)
        os.kill(run.launchers["chief-0"].pid, signal.SIGSTOP)  # so that it starts no other meanwhile
        run.kill_trainer("chief")
        names = known_checkpoints(folder)
        damage(names[-1])
        os.kill(run.launchers["chief-0"].pid, signal.SIGCONT)
        run.until(lambda: len(run.resumed()) > starts)
        return names, run.resumed()[-1]

    def truncate(name: str) -> None:
        data = max(folder.glob(f"{name}.data-*"), key=lambda path: path.stat().st_size)
        os.truncate(data, data.stat().st_size // 2)

    run.until_step(160)
    names, step = damaged(truncate)
    assert f"step-{step}" == names[-2]
    assert f"{names[-1]} is broken, taking the one before" in run.log("chief-0")

    run.until_step(step + 60)
    names, step = damaged(lambda name: (folder / f"{name}.index").unlink())
    assert f"step-{step}" == names[-2]

    run.until_step(step + 60)
    names, step = damaged(lambda _: (folder / "checkpoint").write_bytes(b"\xff\x00 no such thing"))
    assert f"step-{step}" == names[-1]
    assert "is damaged or lost: looking at the checkpoints that are there" in run.log("chief-0")
    assert_arrived(run, run.wait(LIMIT), 2000)
