"""The trainer's output: passed through line by line, without known noise, its tail kept."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable

__all__ = ["LogPump"]

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16

# Lines that TensorFlow writes before any setting of ours is read, and that mean nothing on a machine without GPUs.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called"
    rb"|cudart_stub\.cc:\d+\] Could not find cuda drivers"
    rb"|gpu_device\.cc:\d+\] Cannot dlopen some GPU libraries"
    rb"|cuda_executor\.cc:\d+\]|cuda_diagnostics\.cc|cuda_platform\.cc:\d+\] failed call to cuInit"
)


class LogPump:
    """Copies what comes from the pipe `source` to the descriptor `sink`, whole lines at a time.

    `copy` gets the same lines. `source` becomes non-blocking. The last `keep` lines are in `tail`, each cut to 500
    characters.
    """

    def __init__(
        self,
        source: int,
        sink: int = 1,
        *,
        keep: int = 400,
        copy: Callable[[bytes], None] | None = None,
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.at_end = False
        self._sink = sink
        self._copy = copy
        self._rest = b""
        self._tail: collections.deque[str] = collections.deque(maxlen=keep)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return tuple(self._tail)

    def pump(self) -> None:
        """Copy what is there; never waits for more."""
        while not self.at_end:
            try:
                data = os.read(self.source, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.at_end = True
                if self._rest:
                    self._emit(self._rest + b"\n")
                    self._rest = b""
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._emit(b"".join(line + b"\n" for line in lines if not _NOISE.search(line)))
            if len(self._rest) > _LONGEST_LINE:
                self._emit(self._rest + b"\n")
                self._rest = b""

    def _emit(self, data: bytes) -> None:
        for line in data.decode(errors="backslashreplace").splitlines():
            self._tail.append(line[:500])
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]
        if self._copy is not None:
            self._copy(data)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.source)
