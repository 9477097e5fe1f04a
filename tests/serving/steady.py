"""Callers that ask a server at a steady rate, whatever it does."""

from __future__ import annotations

import threading
import time
from typing import Any

from serving.errors import ServingError


class Steady:
    """Callers that each send one request every `every_s`; latency counts from when a request was due.

    Counting from the due time and not from sending keeps a stall from hiding the requests it held up
    (coordinated omission).
    """

    def __init__(self, callers: list[Any], inputs: dict[str, Any], every_s: float, **options: Any) -> None:
        self.latencies: list[float] = []
        self.errors: list[ServingError] = []
        self.answers: list[Any] = []
        self._callers, self._inputs, self._every, self._options = callers, inputs, every_s, options
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(client, number / len(callers)))
            for number, client in enumerate(callers)
        ]

    def _ask(self, client: Any, offset: float) -> None:
        due = time.monotonic() + offset * self._every
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            try:
                self.answers.append(client.predict(self._inputs, **self._options))
            except ServingError as e:
                self.errors.append(e)
            self.latencies.append(time.monotonic() - due)
            due += self._every

    def wait_for_answers(self, count: int, timeout: float = 120.0) -> None:
        """Until there are so many in all."""
        deadline = time.monotonic() + timeout
        while len(self.answers) < count:
            assert time.monotonic() < deadline, f"{len(self.answers)} answers, errors: {self.errors[:3]}"
            time.sleep(0.02)

    def __enter__(self) -> Steady:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for caller in self._callers:
            if hasattr(caller, "close"):
                caller.close()

    def quantile_ms(self, quantile: float) -> float:
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
