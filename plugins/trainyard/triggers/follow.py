"""Following what grows: lines told as they come, until somebody says that there will be no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Row", "Tell", "follow_files", "tell_all", "until"]

Row = tuple[str, str]
"""A line's time, as it was written, and its text."""
Tell = Callable[[str, str], None]

_FILE_SECONDS = (0.5, 4.0)  # between looks at files: while lines come, and at most
_BATCH = 200  # lines between two looks at what else the triggerer has to do


async def follow_files(read: Callable[[bool], list[Row]], tell: Tell, ended: asyncio.Event) -> None:
    """Tell what `read` finds, until the writer has `ended` and all that was written is told.

    `read(first)` is called in a thread and gives what is new since its last call; at `first` also what is old.
    """
    waits = _pauses()
    rows = await asyncio.to_thread(read, True)
    while True:
        if await tell_all(rows, tell):
            waits = _pauses()
        over = ended.is_set()  # asked first: what was written before the end is read after it
        if not over:
            await until(ended, next(waits))
        rows = await asyncio.to_thread(read, False)
        if over and not rows:
            return


async def tell_all(rows: Iterable[Row], tell: Tell) -> int:
    """Tell them, letting others on between; how many there were."""
    number = 0
    for number, (stamp, text) in enumerate(rows, 1):
        tell(stamp, text)
        if number % _BATCH == 0:
            await asyncio.sleep(0)
    return number


async def until(event: asyncio.Event, seconds: float) -> None:
    """Sleep, but not beyond the event."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _pauses() -> Iterator[float]:
    """Seconds between looks at a file: short while lines come, then longer."""
    pause, longest = _FILE_SECONDS
    while True:
        yield pause
        pause = min(pause * 1.5, longest)
