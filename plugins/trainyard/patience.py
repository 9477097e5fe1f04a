"""Requests that outlast an API server that is away for a while: started anew, moved, or busy."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from urllib3.exceptions import HTTPError

__all__ = ["PATIENCE", "patiently"]

log = logging.getLogger(__name__)

PATIENCE = 150.0
"""Seconds for which a task goes on asking: longer than a control plane takes to come back."""

_LATER = frozenset({408, 429, 500, 502, 503, 504})
_PAUSES = (0.5, 10.0)  # the first and the longest pause, in seconds

Result = TypeVar("Result")


def patiently(
    request: Callable[[], Result],
    *,
    seconds: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = random.random,
) -> Result:
    """The request's result; asked again with growing pauses while the API can't be reached or says "later".

    Raises what the request raises: at once for an answer that is an error, after `seconds` for none.
    """
    from kubernetes.client.exceptions import ApiException

    deadline = clock() + seconds
    pause, longest = _PAUSES
    while True:
        try:
            return request()
        except (HTTPError, ApiException) as e:
            if isinstance(e, ApiException) and e.status not in _LATER:
                raise
            if clock() >= deadline:
                raise
            log.warning("the Kubernetes API can't be reached, asking again: %s", _short(e))
        sleep(pause * (0.5 + jitter()))
        pause = min(pause * 2, longest)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
