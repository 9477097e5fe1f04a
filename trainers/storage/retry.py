"""Waiting for a store that is away: what must be done is tried again until it is, or patience is at its end."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from trainers.job.checks import check, is_number
from trainers.job.errors import InvalidSpec
from trainers.storage.objects import StorageAway, StorageRefused

__all__ = ["ENV_PATIENCE", "Weather", "patience_of", "persist"]

ENV_PATIENCE = "TRAINYARD_STORE_PATIENCE"  # seconds that what can't wait is tried for
_FIRST, _MOST = 0.2, 5.0  # seconds between two tries

T = TypeVar("T")


def patience_of(environ: os._Environ[str] | dict[str, str] | None = None) -> float:
    """Seconds of patience with a store that is away: 600 unless the environment says."""
    text = (os.environ if environ is None else environ).get(ENV_PATIENCE) or "600"
    try:
        seconds = float(text)
    except ValueError as e:
        raise InvalidSpec(ENV_PATIENCE, "be a number of seconds", text) from e
    check(is_number(seconds) and seconds >= 0, ENV_PATIENCE, "be seconds of 0 or more", text)
    return seconds


class Weather:
    """Says once that the store is away, and once that it is back."""

    def __init__(
        self,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._clock = clock
        self._since: float | None = None

    def away(self, error: StorageAway | StorageRefused) -> None:
        """Note that it did not answer."""
        if self._since is None:
            self._since = self._clock()
            self._say(f"storage: {error.message}; going on, and trying again")

    def fine(self) -> None:
        """Note that it answered."""
        if self._since is not None:
            self._say(f"storage: the store is back after {self._clock() - self._since:.0f} s")
            self._since = None


def persist(
    action: Callable[[], T],
    patience: float,
    weather: Weather,
    *,
    through_refusals: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """`action`, tried again while the store is away; its StorageAway after `patience` seconds.

    With `through_refusals` a refusal is waited out too: credentials that were good may just be being renewed.
    """
    deadline = clock() + patience
    pause = _FIRST
    while True:
        try:
            value = action()
        except (StorageAway, StorageRefused) as e:
            if isinstance(e, StorageRefused) and not through_refusals:
                raise
            weather.away(e)
            if clock() >= deadline:
                raise
            sleep(min(pause * random.uniform(0.7, 1.3), max(0.0, deadline - clock())))
            pause = min(2 * pause, _MOST)
        else:
            weather.fine()
            return value
