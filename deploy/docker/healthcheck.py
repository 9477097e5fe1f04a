"""A container's health, without curl: does a URL answer, does a component of Airflow have a heartbeat.

    python healthcheck.py http://127.0.0.1:5000/health
    python healthcheck.py http://airflow-api-server:8080 --airflow-component triggerer

Ends with 0 when healthy, with 1 and a sentence when not. Standard library only: `airflow jobs check` says the
same for four CPU-seconds a call.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

COMPONENTS = ("scheduler", "dag_processor", "triggerer")


def get(url: str, timeout: float) -> tuple[int, bytes]:
    """Status and body of a GET past any proxy of the environment; OSError when nobody answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as e:
        raise ConnectionError(f"no HTTP answer: {e!r}") from e
    finally:
        connection.close()


def ailment(url: str, component: str | None = None, *, timeout: float = 5.0) -> str:
    """What is wrong with the thing at `url`, or "" when it is well.

    With `component`, `url` is an Airflow api-server, whose health page has each component's last heartbeat.
    """
    target = f"{url.rstrip('/')}/api/v2/monitor/health" if component else url
    try:
        status, body = get(target, timeout)
    except OSError as e:
        return f"{target} does not answer: {e}"
    if status >= 400:
        return f"{target} answers {status}"
    if component:
        try:
            state = json.loads(body)[component]["status"]
        except (ValueError, KeyError, TypeError) as e:
            return f"{target} says nothing of {component}: {e!r}"
        if state != "healthy":
            return f"{component} is {state}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of a health check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="http://host:port/path")
    parser.add_argument(
        "--airflow-component", choices=COMPONENTS, help="url is an api-server: ask it for this one"
    )
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    given = parser.parse_args(argv)
    wrong = ailment(given.url, given.airflow_component, timeout=given.timeout)
    if wrong:
        print(wrong, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
