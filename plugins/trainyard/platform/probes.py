"""How the supervisor knows that a component answers: one small check each, never blocking for long."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["Probe", "airflow_component", "all_of", "file_written", "http_ok", "tcp_get"]

Probe = Callable[[float], bool]
"""Given when the component was started (Unix seconds), whether it answers now."""

_TIMEOUT = 5.0


def tcp_get(url: str, timeout: float = _TIMEOUT) -> tuple[int, bytes]:
    """GET a loopback URL past any HTTP proxy of the environment; OSError when nobody answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url} did not answer in HTTP: {error!r}") from error
    finally:
        connection.close()


def http_ok(url: str, timeout: float = _TIMEOUT) -> Probe:
    """Answers when a GET gives a status below 500: the first request may build the application, so it waits."""

    def probe(_started: float) -> bool:
        try:
            status, _ = tcp_get(url, timeout)
        except OSError:
            return False
        return status < 500

    return probe


def file_written(path: Path) -> Probe:
    """Answers when the component has written its ready file since it was started."""

    def probe(started: float) -> bool:
        try:
            # File times may lag the clock by a kernel tick.
            return path.stat().st_mtime >= started - 0.05
        except FileNotFoundError:
            return False

    return probe


def airflow_component(api_url: str, component: str) -> Probe:
    """Answers when Airflow's health page has a heartbeat of this component newer than its start.

    `component` is "scheduler", "dag_processor" or "triggerer". The page alone says "healthy" for 30 s after
    a component that was killed, so its word is not enough.
    """

    def probe(started: float) -> bool:
        try:
            status, body = tcp_get(f"{api_url}/api/v2/monitor/health")
        except OSError:
            return False
        if status != 200:
            return False
        health = json.loads(body).get(component, {})
        beat = health.get(f"latest_{component}_heartbeat")
        return health.get("status") == "healthy" and beat is not None and _unix(beat) >= started

    return probe


def all_of(*probes: Probe) -> Probe:
    """Answers when every probe has answered, asked in this order; one that has answered isn't asked again.

    A component that was started again is asked from the first.
    """
    answered, life = 0, 0.0

    def probe(started: float) -> bool:
        nonlocal answered, life
        if started != life:
            answered, life = 0, started
        while answered < len(probes):
            if not probes[answered](started):
                return False
            answered += 1
        return True

    return probe


def _unix(text: str) -> float:
    """Unix seconds of an RFC 3339 time; fractions of any length and "Z", which Python 3.10 does not read."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
    if not match:
        raise ValueError(f"a time must look like 2026-01-31T12:00:00.5Z, got {text!r}")
    zone = "+00:00" if match[3] == "Z" else match[3]
    return datetime.fromisoformat(match[1] + zone).timestamp() + float(match[2] or 0)
