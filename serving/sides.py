"""A client's two sides: calls that go to the canary, calls that don't, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from serving.errors import (
    BadRequest,
    ModelNotFound,
    RequestTooLarge,
    ServerFailed,
    ServerUnavailable,
    ServingError,
)
from serving.traffic import CANARY, CallCounter, Route

__all__ = ["Sides"]

Answer = TypeVar("Answer")
# What the other side may well answer. A deadline is not among them: its time is used up.
_ASK_STABLE = (BadRequest, ModelNotFound, ServerFailed, ServerUnavailable)


class Sides:
    """Routes the calls of one client between its label and `canary`, and counts both."""

    def __init__(
        self, model: str, share: float | Path | str | Route, counter: CallCounter | None = None
    ) -> None:
        self._route = share if isinstance(share, Route) else Route(model, share)
        self._counter = counter
        self.active = counter is not None or isinstance(share, Route) or bool(share)

    def call(self, label: str, key: str | bytes | None, ask: Callable[[str], Answer]) -> Answer:
        """Ask the side that this call belongs to.

        A call that the canary fails is asked of `label`, and counts against the canary only where that one
        answers: a request that both refuse is the caller's mistake. A label that is not there (any more) counts
        for nobody.
        """
        share = self._route.current()
        if share is None or not self._route.to_canary(key):
            return self._timed(label, ask, label)
        side = f"{CANARY}:{share.version}" if share.version else CANARY
        start = time.perf_counter()
        try:
            answer = ask(CANARY)
        except RequestTooLarge:
            raise
        except _ASK_STABLE as e:
            answer = self._timed(label, ask, label)
            if not isinstance(e, ModelNotFound):
                self._count(side, False, start)
            return answer
        except ServingError:
            self._count(side, False, start)
            raise
        self._count(side, True, start)
        return answer

    def _timed(self, side: str, ask: Callable[[str], Answer], label: str) -> Answer:
        start = time.perf_counter()
        try:
            answer = ask(label)
        except (BadRequest, ModelNotFound):
            raise
        except ServingError:
            self._count(side, False, start)
            raise
        self._count(side, True, start)
        return answer

    def _count(self, side: str, ok: bool, start: float) -> None:
        if self._counter is not None:
            self._counter.count(side, ok, (time.perf_counter() - start) * 1e6)

    def close(self) -> None:
        """Write what was counted."""
        if self._counter is not None:
            self._counter.close()
