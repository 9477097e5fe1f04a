"""The launcher's hand on the process that delivers a job's spools (`trainers.runtime.deliver`) while it trains."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["Delivery"]

_ENV_URI = "MLFLOW_TRACKING_URI"


class Delivery:
    """The launcher's hand on the delivering process: begun once training has run for `after` seconds.

    A short job is not worth a process: the tasks after it deliver anyway.
    """

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        *,
        after: float = 10.0,
        patience: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._environ = environ
        self._after = after
        self._patience = patience
        self._clock = clock
        self._training_since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> list[int]:
        """The processes of its own."""
        return [] if self._process is None else [self._process.pid]

    def progressed(self, phase: str) -> None:
        """Note what the trainer does."""
        if phase == "training" and self._training_since is None:
            self._training_since = self._clock()

    def poll(self) -> None:
        """Start the process when it is due."""
        since = self._training_since
        due = since is not None and self._clock() - since >= self._after
        if not due or self._process is not None or not self._environ.get(_ENV_URI):
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainers.runtime.deliver", "--job", str(self._folder)],
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Give it a moment to send the rest."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience)

    def stop(self) -> None:
        """End it; what is not sent stays in the spool."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
