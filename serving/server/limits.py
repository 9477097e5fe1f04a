"""Limits of HTTP connections that uvicorn lacks: the time and the bytes of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["PatientProtocol", "patient"]

_MAX_HEADER_BYTES = 64 << 10


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, with a limit to the time and the bytes that a request's head may take.

    Without it a client that sends a byte now and then holds its connection, and a file handle, for ever.
    """

    patience_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request():
            self._relax()
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEADER_BYTES:
            self._give_up()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.patience_s, self._give_up)

    def _relax(self) -> None:
        self._head_bytes = 0
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self._in_request():
            self.transport.abort()


def patient(patience_s: float) -> type[PatientProtocol]:
    """The protocol with another patience, in seconds."""
    return type("PatientProtocol", (PatientProtocol,), {"patience_s": patience_s})
