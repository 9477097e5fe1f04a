"""Where a trainer process leaves its termination message for the launcher that started it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["MessageFiles"]


class MessageFiles:
    """The message files of one replica, in the temporary folder.

    Not in the job's folder: on a full disk the reason would be lost with it. Not by the gang's name alone: two
    platforms of one machine may run the same pipeline at the same time.
    """

    def __init__(self, job_folder: Path, gang: str, replica: str) -> None:
        job = hashlib.sha256(str(job_folder).encode()).hexdigest()[:8]
        self._prefix = f"trainyard-{gang}-{job}-{replica}-"

    def new(self, attempt: int) -> Path:
        """An empty file for one process."""
        handle, path = tempfile.mkstemp(prefix=f"{self._prefix}{attempt}-", suffix=".json")
        os.close(handle)
        return Path(path)

    def take(self, path: Path) -> str:
        """What a process has left; "" where a launcher that has this one's place on the same machine swept it."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            return ""
        path.unlink(missing_ok=True)
        return text

    def left(self) -> list[Path]:
        """Those that killed launchers have left behind."""
        return [*Path(tempfile.gettempdir()).glob(f"{self._prefix}[0-9]*.json")]

    def sweep(self) -> None:
        """Remove them."""
        for path in self.left():
            with contextlib.suppress(PermissionError):  # another user's job of the same name
                path.unlink(missing_ok=True)
