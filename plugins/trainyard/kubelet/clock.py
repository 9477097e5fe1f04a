"""Times as the API writes them."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone

__all__ = ["epoch", "log_stamp", "micro_time", "timestamp"]


def timestamp(seconds: float | None = None) -> str:
    """A moment (now by default) to the second, as in `status.startTime`."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time() -> str:
    """Now to the microsecond, as in an event's `eventTime`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def log_stamp(nanoseconds: int) -> bytes:
    """A moment as a log line carries it: always 30 bytes, so that stamps sort as bytes."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode() + b".%09dZ" % rest


def epoch(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time; ValueError when it is none."""
    # Python 3.10 reads neither "Z" nor any number of digits but 3 or 6 after the point.
    whole = re.sub(
        r"\.(\d+)", lambda found: f".{found[1]:0<6.6}", text.strip().upper().replace("Z", "+00:00")
    )
    moment = datetime.fromisoformat(whole)
    if moment.tzinfo is None:
        raise ValueError(f"time must have a zone, got {text!r}")
    return moment.timestamp()
