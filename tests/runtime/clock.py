"""A clock for tests of what depends on time."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """A clock that goes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
