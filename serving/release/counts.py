"""Where the counts of a canary and of `stable` come from: servers' Prometheus pages, or clients' files.

by version   the embedded server counts requests and times by version, under names of its own
by group     TensorFlow Serving counts by model only: a canary that is a Deployment of its own has pages of its own
by clients   what clients wrote (serving.traffic.CallCounter), for TensorFlow Serving with labels on one Deployment

Each gives cumulative counts by source and side, so that a source that begins anew is noticed.
"""

from __future__ import annotations

import logging
import math
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from serving.credentials import Credentials
from serving.errors import ServerUnavailable
from serving.release.canary import Counts
from serving.tfserving.replicas import DNS, Replicas
from serving.traffic import read_counts

__all__ = ["CANDIDATE", "METRICS_PATH", "STABLE", "Sides", "by_clients", "by_group", "by_version"]

log = logging.getLogger(__name__)

STABLE, CANDIDATE = "stable", "canary"
METRICS_PATH = "/monitoring/prometheus/metrics"
Sides = Mapping[str, Mapping[str, Counts]]
"""Cumulative counts by source, then by side."""

_TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def by_version(urls: Sequence[str], model: str, stable: int, candidate: int) -> Sides:
    """Counts of the embedded server by version; {} where a page does not count by version."""
    found = {}
    for url, page in _pages(urls):
        sides = {
            side: _counts(
                page,
                ":trainyard:serving:version_request_count",
                ":trainyard:serving:version_request_latency_bucket",
                {"model_name": model, "version": str(version)},
            )
            for side, version in ((STABLE, stable), (CANDIDATE, candidate))
        }
        if any(counts.requests for counts in sides.values()):
            found[url] = sides
    return found


def by_group(stable_urls: Sequence[str], canary_urls: Sequence[str], model: str) -> Sides:
    """Counts under TensorFlow Serving's own names, of servers that have the one side only."""
    found = {}
    for side, urls in ((STABLE, stable_urls), (CANDIDATE, canary_urls)):
        for url, page in _pages(urls):
            found[url] = {
                side: _counts(
                    page,
                    ":tensorflow:serving:request_count",
                    ":tensorflow:serving:request_latency_bucket",
                    {"model_name": model},
                )
            }
    return found


def by_clients(folder: Path | str, model: str, candidate: int) -> Sides:
    """What clients counted for `stable` and for this candidate."""
    return {
        name: {
            STABLE: sides.get(STABLE, Counts()),
            CANDIDATE: sides.get(f"{CANDIDATE}:{candidate}", Counts()),
        }
        for name, sides in read_counts(folder, model).items()
    }


def _pages(urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    credentials = Credentials.from_environment()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=credentials.ssl_context())
    )
    opener.addheaders = list(credentials.metadata())
    for url in _found(urls, "https" if credentials.tls else "http"):
        address = url.rstrip("/") + METRICS_PATH
        try:
            with opener.open(address, timeout=_TIMEOUT_S) as response:
                yield url, response.read().decode()
        except (OSError, ValueError) as e:  # it may be just restarting: its counts come with the next look
            log.warning("%s can't be read: %s", address, getattr(e, "reason", e))


def _found(urls: Sequence[str], scheme: str) -> Iterator[str]:
    """The addresses themselves; of one that is a name of many (dns:///host:port), all of them."""
    for url in urls:
        if not url.startswith(DNS):
            yield url
            continue
        try:
            yield from (f"{scheme}://{address}" for address in Replicas([url]).now())
        except ServerUnavailable as e:
            log.warning("%s", e)


def _counts(page: str, count: str, bucket: str, wanted: Mapping[str, str]) -> Counts:
    requests = errors = 0
    rising: dict[tuple[str, ...], dict[float, int]] = {}
    for line in page.splitlines():
        if not line.startswith((count, bucket)):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample[1], dict(_LABEL.findall(sample[2])), float(sample[3])
        if any(labels.get(key) != given for key, given in wanted.items()):
            continue
        if name == count:
            requests += int(value)
            errors += 0 if labels.get("status") == "OK" else int(value)
        elif name == bucket:
            bound = math.inf if labels["le"] == "+Inf" else float(labels["le"])
            series = tuple(sorted(item for key, item in labels.items() if key != "le"))
            rising.setdefault(series, {})[bound] = int(value)
    total: dict[float, int] = {}
    for steps in rising.values():
        below = 0
        for bound in sorted(steps):
            total[bound] = total.get(bound, 0) + steps[bound] - below
            below = steps[bound]
    return Counts(requests, errors, total)
