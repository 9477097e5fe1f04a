"""What a replica uses of its machine: sampled by its launcher, spooled for MLflow's page of system metrics.

    system/chief-0/cpu_utilization_percentage        of the trainer and its children; 100 is one core
    system/chief-0/memory_usage_megabytes            their resident memory
    system/chief-0/system_memory_usage_percentage    of the whole machine, which others use too
    system/chief-0/disk_usage_percentage             of the disk that holds the job's folder
    system/chief-0/disk_read_megabytes, disk_write_megabytes      since the trainer started

"system/" and the node's name after it are MLflow's own form for runs on several machines. A step is a second since the
job was planned, so that the lines of all replicas, over all restarts, have one axis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.runtime.tracking import Spool

__all__ = ["EVERY", "ENV_EVERY", "Usage"]

log = logging.getLogger(__name__)

ENV_EVERY = "TRAINYARD_SYSTEM_METRICS_EVERY"
"""Seconds between samples; 0 switches them off."""

EVERY = 10.0
_MB = 1e6


class Usage:
    """Samples one replica's processes; `poll` costs a comparison until a sample is due."""

    def __init__(
        self,
        folder: Path,
        replica: str,
        environ: Mapping[str, str],
        *,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._replica = replica
        self._clock = clock
        self._now = now
        self._began = now() if began is None else began
        self._every = _seconds(environ) if environ.get("MLFLOW_TRACKING_URI") else 0.0
        self._due = clock() + self._every
        self._spool: Spool | None = None
        self._cpu: tuple[float, float] | None = None  # CPU seconds of the processes, and when
        self._pid = 0

    def poll(self, pid: int) -> None:
        """Sample the process `pid` and its children when it is time to."""
        if not self._every or self._clock() < self._due:
            return
        self._due = self._clock() + self._every
        try:
            values = self._sample(pid)
            if values:
                self._spool = self._spool or Spool(self._folder, f"system-{self._replica}", clock=self._now)
                named = {f"system/{self._replica}/{name}": value for name, value in values.items()}
                self._spool.metrics(named, step=max(0, int(self._now() - self._began)))
        except OSError as e:  # a full disk: training goes on, so do we
            log.debug("no system metrics: %s", e)

    def _sample(self, pid: int) -> dict[str, float]:
        try:
            import psutil
        except ImportError:  # an image of the user's own: it does without
            self._every = 0.0
            return {}
        values: dict[str, float] = {}
        cpu = memory = read = written = 0.0
        try:
            top = psutil.Process(pid)
            processes = [top, *top.children(recursive=True)]
        except psutil.Error:
            return {}  # it has just ended
        for process in processes:
            try:
                times = process.cpu_times()
                cpu += times.user + times.system
                memory += process.memory_info().rss
                counters: Any = process.io_counters()
                read, written = read + counters.read_bytes, written + counters.write_bytes
            except (psutil.Error, NotImplementedError):
                continue
        now = self._clock()
        if self._cpu is not None and self._pid == pid and now > self._cpu[1] and cpu >= self._cpu[0]:
            values["cpu_utilization_percentage"] = round(100 * (cpu - self._cpu[0]) / (now - self._cpu[1]), 2)
        self._cpu, self._pid = (cpu, now), pid
        values["memory_usage_megabytes"] = round(memory / _MB, 2)
        values["disk_read_megabytes"] = round(read / _MB, 2)
        values["disk_write_megabytes"] = round(written / _MB, 2)
        values["system_memory_usage_percentage"] = psutil.virtual_memory().percent
        values["disk_usage_percentage"] = psutil.disk_usage(str(self._folder)).percent
        return values


def _seconds(environ: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(environ.get(ENV_EVERY) or EVERY))
    except ValueError:
        log.warning("%s must be seconds, got %r: it is %s", ENV_EVERY, environ[ENV_EVERY], EVERY)
        return EVERY
