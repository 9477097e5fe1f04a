"""Who straggles, and shares of steps that are handed out again, by a clock of the test's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainers.runtime.async_servers import PATIENCE, _Shares
from trainers.runtime.stragglers import Stragglers, read_stragglers


class Time:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_silent_worker_is_named_until_it_gives_something(tmp_path: Path) -> None:
    clock = Time()
    watch = Stragglers(tmp_path, ["worker-0", "worker-2"], clock=clock, now=lambda: 1000.0 + clock.at)
    watch.gave(0, 0.01)
    watch.gave(1, 0.01)
    clock.at += 2
    watch.look()
    assert read_stragglers(tmp_path) == {}
    clock.at += 2
    watch.gave(0, 0.01)
    watch.look()
    (name, straggler), *others = read_stragglers(tmp_path).items()
    assert (name, others) == ("worker-2", [])
    assert (straggler.reason, straggler.since, straggler.silent_s) == ("silent", 1100.0, 4.0)
    watch.gave(1, 0.01)
    watch.look()
    assert read_stragglers(tmp_path) == {}


def test_who_owes_nothing_or_has_not_begun_is_not_silent(tmp_path: Path) -> None:
    clock = Time()
    watch = Stragglers(tmp_path, ["worker-0", "worker-1"], clock=clock)
    watch.gave(0, 0.01)
    clock.at += 60
    watch.excuse(0)
    watch.look()
    assert watch.named == {}


def test_silence_is_measured_by_the_steps_of_the_others(tmp_path: Path) -> None:
    clock = Time()
    watch = Stragglers(tmp_path, ["worker-0", "worker-1"], clock=clock)
    watch.gave(0, 2.0)
    watch.gave(1, 2.0)
    clock.at += 15
    watch.look()
    assert watch.named == {}
    clock.at += 6
    watch.look()
    assert set(watch.named) == {"worker-0", "worker-1"}


def test_a_slow_worker_is_compared_with_the_median(tmp_path: Path) -> None:
    clock = Time()
    watch = Stragglers(tmp_path, ["worker-0", "worker-1", "worker-2"], clock=clock)
    for count in range(1, 9):
        for worker, seconds in enumerate((0.1, 0.1, 0.5)):
            watch.counted(worker, count, seconds)
            watch.counted(worker, count, 9.0)  # nothing new: it says nothing
    watch.look()
    slow = read_stragglers(tmp_path)["worker-2"]
    assert (slow.reason, slow.step_s, slow.median_step_s) == ("slow", 0.5, 0.1)
    for _ in range(20):
        watch.gave(2, 0.1)
    watch.look()
    assert read_stragglers(tmp_path) == {}


def test_another_chief_begins_without_names(tmp_path: Path) -> None:
    clock = Time()
    watch = Stragglers(tmp_path, ["worker-0"], clock=clock)
    watch.gave(0, 0.1)
    clock.at += 10
    watch.look()
    assert read_stragglers(tmp_path)
    Stragglers(tmp_path, ["worker-0"])
    assert read_stragglers(tmp_path) == {}


def test_overdue_steps_are_handed_out_again_and_count_once() -> None:
    clock = Time()
    clock.at = 0.0
    shares = _Shares(0, 30, 30)
    held, made = shares.take(10, clock), shares.take(20, clock)
    assert held is not None
    assert made is not None
    assert shares.take(5, clock) is None
    assert shares.finish(made, 1.0)
    assert shares.revoke(PATIENCE - 1) == 0
    assert shares.revoke(PATIENCE + 1) == 1
    again = shares.take(100, clock)
    assert again is not None
    assert again.steps == 10
    assert shares.finish(again, 1.0)
    assert not shares.finish(held, PATIENCE + 3)  # late: the others have made them
    assert shares.done == 30


def test_nothing_is_taken_back_while_there_is_other_work() -> None:
    shares = _Shares(0, 30, 30)
    shares.take(10, Time())
    assert shares.revoke(1e6) == 0


def test_nothing_beyond_the_next_checkpoint_is_handed_out_before_it_is_written() -> None:
    shares = _Shares(0, 30, 20)
    first = shares.take(100, Time())
    assert first is not None
    assert first.steps == 20
    waiting = ThreadPoolExecutor(1).submit(shares.take, 100, Time())
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    assert shares.finish(first, 1.0)
    shares.allow(40)
    second = waiting.result(10)
    assert second is not None
    assert second.steps == 10


def test_who_waits_for_a_checkpoint_is_let_go_at_the_end() -> None:
    shares = _Shares(0, 30, 20)
    shares.take(20, Time())
    waiting = ThreadPoolExecutor(1).submit(shares.take, 100, Time())
    shares.end()
    assert waiting.result(10) is None
