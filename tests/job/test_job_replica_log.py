"""Logs that outlast their pods: order, rotation, a full disk, following."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainers.job import replica_log
from trainers.job.replica_log import ReplicaLog, read_logs, replicas_with_logs


class Clock:
    """A wall clock that is set."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


def texts(lines: Any) -> list[tuple[str, str]]:
    return [(replica, text) for _, replica, text in lines]


def test_lines_of_replicas_come_in_order_of_time(tmp_path: Path, clock: Clock) -> None:
    one, two = (ReplicaLog(tmp_path, name, now=clock) for name in ("worker-0", "ps-0"))
    for at, log, data in (
        (1, one, b"a\nb\n"),
        (2, two, b"c\n"),
        (3.25, one, "d é\n".encode()),
        (4, two, b"\xff\n"),
    ):
        clock.at = at
        log.write(data)
    assert replicas_with_logs(tmp_path) == ["ps-0", "worker-0"]
    lines = list(read_logs(tmp_path, ["worker-0", "ps-0", "chief-0"]))
    assert texts(lines) == [
        ("worker-0", "a"),
        ("worker-0", "b"),
        ("ps-0", "c"),
        ("worker-0", "d é"),
        ("ps-0", "\\xff"),
    ]
    assert lines[3][0] == "1970-01-01T00:00:03.250Z"
    assert texts(read_logs(tmp_path, ["worker-0"], tail=1)) == [("worker-0", "d é")]


def test_old_files_are_put_aside_and_only_some_are_kept(tmp_path: Path, clock: Clock) -> None:
    log = ReplicaLog(tmp_path, "w", now=clock, most_bytes=300)
    for number in range(100):
        log.write(f"line {number}\n".encode())
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files in (["w.log", "w.log.1", "w.log.2"], ["w.log.1", "w.log.2"])
    found = [int(text.split()[1]) for _, text in texts(read_logs(tmp_path, ["w"]))]
    assert found == list(range(found[0], 100)), "the end is whole and in order"
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < replica_log.KEEP * 400


def test_following_loses_nothing_when_a_file_is_put_aside_or_half_a_line_is_there(
    tmp_path: Path, clock: Clock
) -> None:
    log = ReplicaLog(tmp_path, "w", now=clock, most_bytes=400)
    log.write(b"0\n")
    written = [0]

    def sleep(_: float) -> None:
        for _ in range(3):
            written[0] += 1
            log.write(f"{written[0]}\n".encode())

    def half(_: float) -> None:
        sleep(_)
        append(b"1970-01-01T00:00:09.000Z ha")  # what a writer on a shared disk may show for a moment
        turns.append(lambda _: append(b"lf\n"))

    def append(data: bytes) -> None:
        with log.path.open("ab") as f:
            f.write(data)

    turns: list[Any] = []

    def turn(seconds: float) -> None:
        (turns.pop() if turns else (half if written[0] == 9 else sleep))(seconds)

    lines = texts(read_logs(tmp_path, ["w"], is_over=lambda: written[0] >= 40, sleep=turn))
    numbers = [int(text) for _, text in lines if text != "half"]
    assert numbers == list(range(written[0] + 1))
    assert ("w", "half") in lines


def test_a_disk_that_takes_nothing_is_told_of_later(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReplicaLog(tmp_path, "w", now=clock)
    log.write(b"before\n")
    (tmp_path / "logs").rename(tmp_path / "away")
    (tmp_path / "logs").write_text("in the way")
    log.write(b"lost 1\nlost 2\n")
    (tmp_path / "logs").unlink()
    (tmp_path / "away").rename(tmp_path / "logs")
    log.write(b"after\n")
    assert [text for _, text in texts(read_logs(tmp_path, ["w"]))] == [
        "before",
        "(2 lines before this one could not be kept)",
        "after",
    ]
