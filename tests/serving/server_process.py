"""A model server as a process of its own, as users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["ServerProcess"]

_PATIENCE_S = 120.0  # a guard against hanging, not a measure


class ServerProcess:
    """The embedded server on free ports, with `flags` besides; one that does not get ready is killed.

    `name` tells servers of one folder apart: NAME.log is what it says, NAME-ready.json there while it is ready.
    With `wait=False` it may still be starting, and has neither `ports` nor addresses.
    """

    def __init__(self, folder: Path, *flags: str, name: str = "server", wait: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        self.ready = folder / f"{name}-ready.json"
        self.ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "serving.server", "--port=0", "--rest_api_port=0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--ready-file={self.ready}", *flags],
                stderr=log,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            )
        if wait:
            try:
                self._wait()
            except BaseException:
                self.close()
                raise

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self.ready.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.ports: dict[str, Any] = json.loads(self.ready.read_text())
        self.grpc = f"127.0.0.1:{self.ports['grpc']}"
        self.rest = f"http://127.0.0.1:{self.ports['rest']}"

    def close(self) -> None:
        """Kill it, unless it has ended."""
        self.process.kill()
        self.process.wait()
