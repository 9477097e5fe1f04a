"""Which requests are answered without another thread: by what their answers have taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving.server.rest_quick import QuickCalls

PATH = "/v1/models/m:predict"


@pytest.fixture
def times() -> dict[str, float]:
    """CPU time and the clock's, in seconds."""
    return {"cpu": 0.0, "clock": 0.0}


@pytest.fixture
def quick(times: dict[str, float]) -> QuickCalls:
    return QuickCalls(clock=lambda: times["clock"], cpu=lambda: times["cpu"])


@pytest.fixture
def ask(quick: QuickCalls, times: dict[str, float]) -> Callable[..., None]:
    """Asks so many times; each answer takes so many seconds."""

    def run(number: int, cpu: float, clock: float = 0.0, path: str = PATH) -> None:
        def respond() -> tuple[int, bytes]:
            times["cpu"] += cpu
            times["clock"] += clock or cpu
            return 200, b"{}"

        for _ in range(number):
            assert quick.timed(path, respond) == (200, b"{}")

    return run


def test_a_path_is_quick_once_it_has_shown_it(quick: QuickCalls, ask: Callable[..., None]) -> None:
    assert not quick.has(PATH)
    ask(19, 0.0003)
    assert not quick.has(PATH)
    ask(1, 0.0003)
    assert quick.has(PATH)
    assert not quick.has("/v1/models/other:predict")


def test_a_longer_answer_now_and_then_is_no_matter_a_slow_one_is(
    quick: QuickCalls, ask: Callable[..., None]
) -> None:
    ask(30, 0.0003)
    ask(1, 0.004)
    assert quick.has(PATH)
    ask(1, 0.006)
    assert not quick.has(PATH)
    ask(30, 0.0003)
    assert quick.has(PATH)
    ask(1, 0.0003, clock=0.06)  # it waited for something else
    assert not quick.has(PATH)


def test_one_that_becomes_slower_is_handed_over(quick: QuickCalls, ask: Callable[..., None]) -> None:
    ask(100, 0.0003)
    ask(30, 0.0015)
    assert not quick.has(PATH)


def test_no_path_is_quick_that_waits_for_a_batch(times: dict[str, float]) -> None:
    quick = QuickCalls(ever=False)
    for _ in range(50):
        quick.timed(PATH, lambda: (200, b"{}"))
    assert not quick.has(PATH)


def test_paths_that_nobody_serves_do_not_fill_the_memory(quick: QuickCalls, ask: Callable[..., None]) -> None:
    for number in range(1500):
        ask(1, 0.0001, path=f"/{number}")
    ask(30, 0.0001)
    assert len(quick._paths) == 1000
    assert not quick.has(PATH)


def test_what_raises_is_no_answer(quick: QuickCalls) -> None:
    def refuse() -> tuple[int, bytes]:
        raise ValueError

    with pytest.raises(ValueError):
        quick.timed(PATH, refuse)
    assert not quick.has(PATH)
