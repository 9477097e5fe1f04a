"""Counters and histograms under TF Serving's names, as a Prometheus page.

Times are in microseconds, in TF Serving's buckets (10 us, growing 1.8 times a bucket, 33 of them).
"""

from __future__ import annotations

import bisect
import threading

__all__ = ["PATH", "Metrics"]

PATH = "/monitoring/prometheus/metrics"
_LATENCY = tuple(10 * 1.8**i for i in range(33))
# A canary is compared by these: fine enough to tell 1.3 times slower.
_FINE = tuple(10 * 1.25**i for i in range(73))
_EXAMPLES = tuple(float(2**i) for i in range(15))

_COUNTERS = {
    ":tensorflow:serving:request_count": ("model_name", "status"),
    ":tensorflow:serving:request_example_count_total": ("model",),
    ":trainyard:serving:version_request_count": ("model_name", "version", "status"),
    ":tensorflow:serving:request_log_count": ("model_name", "status_code"),
    ":trainyard:serving:request_log_dropped_count": ("model_name", "reason"),
    ":tensorflow:cc:saved_model:load_attempt_count": ("model_path", "status"),
    ":tensorflow:cc:saved_model:load_latency": ("model_path",),
}
_HISTOGRAMS = {
    ":trainyard:serving:version_request_latency": (("model_name", "version"), _FINE),
    ":tensorflow:serving:request_latency": (("model_name", "API", "entrypoint"), _LATENCY),
    ":tensorflow:serving:runtime_latency": (("model_name", "API", "runtime"), _LATENCY),
    ":tensorflow:serving:request_example_counts": (("model",), _EXAMPLES),
}


class Metrics:
    """All metrics of one server; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, tuple[str, ...]], int] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[float]]] = {}

    def request(self, model: str, api: str, entrypoint: str, status: str, micros: float) -> None:
        """One request answered, however it ended."""
        self._count(":tensorflow:serving:request_count", (model, status))
        if status == "OK":
            self._observe(":tensorflow:serving:request_latency", (model, api, entrypoint), micros)

    def version_request(self, model: str, version: int, status: str, micros: float) -> None:
        """One request that came as far as a version; TF Serving does not count these apart."""
        labels = (model, str(version))
        self._count(":trainyard:serving:version_request_count", (*labels, status))
        if status == "OK":
            self._observe(":trainyard:serving:version_request_latency", labels, micros)

    def run(self, model: str, api: str, micros: float) -> None:
        """One run of a model's graph."""
        self._observe(":tensorflow:serving:runtime_latency", (model, api, "TF1"), micros)

    def examples(self, model: str, count: int) -> None:
        """One request that brought `count` examples."""
        self._count(":tensorflow:serving:request_example_count_total", (model,), count)
        self._observe(":tensorflow:serving:request_example_counts", (model,), count)

    def request_logged(self, model: str) -> None:
        """One request written into the request log."""
        self._count(":tensorflow:serving:request_log_count", (model, "OK"))

    def request_dropped(self, model: str, reason: str) -> None:
        """One request that was picked for the request log and is not in it: "queue_full", "disk" or "error"."""
        self._count(":trainyard:serving:request_log_dropped_count", (model, reason))

    def load(self, path: str, ok: bool, micros: float) -> None:
        """One try to load a version."""
        self._count(":tensorflow:cc:saved_model:load_attempt_count", (path, "success" if ok else "fail"))
        if ok:
            self._count(":tensorflow:cc:saved_model:load_latency", (path,), int(micros))

    def _count(self, name: str, labels: tuple[str, ...], by: int = 1) -> None:
        key = (name, labels)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + by

    def _observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        limits = _HISTOGRAMS[name][1]
        at = bisect.bisect_right(limits, value)
        with self._lock:
            found = self._histograms.get((name, labels))
            if found is None:
                found = self._histograms[name, labels] = ([0] * (len(limits) + 1), [0.0])
            found[0][at] += 1
            found[1][0] += value

    def page(self) -> str:
        """The metrics in Prometheus' text format."""
        with self._lock:
            counts = sorted(self._counts.items())
            histograms = sorted(
                (key, list(buckets), total[0]) for key, (buckets, total) in self._histograms.items()
            )
        lines: list[str] = []
        typed = set()
        for (name, values), count in counts:
            if name not in typed:
                typed.add(name)
                lines.append(f"# TYPE {name} counter")
            lines.append(f"{name}{{{_labels(_COUNTERS[name], values)}}} {count}")
        for (name, values), buckets, total in histograms:
            names, limits = _HISTOGRAMS[name]
            if name not in typed:
                typed.add(name)
                lines.append(f"# TYPE {name} histogram")
            labels, running = _labels(names, values), 0
            for limit, size in zip((*limits, None), buckets, strict=True):
                running += size
                bound = "+Inf" if limit is None else f"{limit:g}"
                lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {running}')
            lines.append(f"{name}_sum{{{labels}}} {total!r}")
            lines.append(f"{name}_count{{{labels}}} {running}")
        return "\n".join(lines) + "\n"


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(
        '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in zip(names, values, strict=True)
    )
