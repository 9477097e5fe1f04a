"""Asks the model server from a pod, as an application would: steadily, until told to stop.

    python caller.py FOLDER TARGET...      one caller a target; FOLDER/stop ends it, FOLDER/calls.json is what came

A target is what PredictClient takes (dns:///name:port, host:port), or an http:// address for REST.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from serving.client import PredictClient
from serving.errors import ServingError
from serving.files import write_atomic
from serving.rest_client import RestPredictClient

EVERY_S = 0.1


class Caller:
    """One client that sends a request every `EVERY_S`, whatever became of the one before."""

    def __init__(self, target: str, images: np.ndarray) -> None:
        make: Any = RestPredictClient if target.startswith("http") else PredictClient
        self.target = target
        self._client = make(target, "digits")
        self._images = images
        self.answered: dict[str, int] = {}
        self.errors: list[str] = []
        self.slowest = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until `stop`. Latency counts from when a request was due."""
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            try:
                logits = self._client.predict({"image": self._images})["logits"]
                first = f"{float(logits[0][0]):.3f}"  # tells which version answered
                self.answered[first] = self.answered.get(first, 0) + 1
            except ServingError as e:
                self.errors.append(f"{time.time():.1f} {e}")
            self.slowest = max(self.slowest, time.monotonic() - due)
            due = max(due + EVERY_S, time.monotonic())  # what came too late is not made up for


def main(folder: Path, targets: list[str]) -> None:
    """Write what came so far every half second."""
    images = np.random.default_rng(5).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
    callers = [Caller(target, images) for target in targets]
    stop = threading.Event()
    threads = [threading.Thread(target=caller.run, args=(stop,)) for caller in callers]
    for thread in threads:
        thread.start()

    def say(done: bool) -> None:
        found = {
            caller.target: {
                "answered": dict(caller.answered),
                "errors": list(caller.errors),
                "slowest_s": round(caller.slowest, 3),
            }
            for caller in callers
        }
        write_atomic(folder / "calls.json", json.dumps({"done": done, "callers": found}).encode())

    while not (folder / "stop").exists():
        say(done=False)
        time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    say(done=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
