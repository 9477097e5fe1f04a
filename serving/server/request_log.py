"""Logs a sample of the answered requests as PredictionLog records, beside the requests' way.

A request is logged when `--request_log_dir` is given and its model's rate is over 0: the
`logging_config { sampling_config { sampling_rate } }` of the model config, else `--request_log_sample_rate`.
Logging never slows or fails a request: what is picked goes into a bounded queue, a thread makes records of it
and writes them; what the queue or the disk can't take is dropped and counted.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving import tensors
from serving.errors import ConfigInvalid
from serving.server.metrics import Metrics
from serving.server.request_log_files import LogFiles
from serving.stubs import prediction_log_pb2

__all__ = ["LogOptions", "RequestLog"]

log = logging.getLogger(__name__)

_RETRY_S = 10.0  # after a failed write, until the disk is tried again
_COMPLAIN_S = 60.0
_FIELDS = {
    "PredictRequest": "predict_log",
    "ClassificationRequest": "classify_log",
    "RegressionRequest": "regress_log",
    "MultiInferenceRequest": "multi_inference_log",
}


@dataclass(frozen=True)
class LogOptions:
    """Where and how much to log; sizes in bytes, times in seconds."""

    folder: Path
    sample_rate: float = 0.0
    max_file_bytes: int = 64 << 20
    max_file_age_s: float = 60.0
    keep_bytes: int = 4 << 30
    queue_bytes: int = 64 << 20
    queue_length: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise ConfigInvalid(f"request_log_sample_rate must be from 0 to 1, got {self.sample_rate}")
        for name in ("max_file_bytes", "max_file_age_s", "keep_bytes", "queue_bytes", "queue_length"):
            if getattr(self, name) <= 0:
                raise ConfigInvalid(f"{name} of the request log must be over 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class _Item:
    model: str
    version: int
    rate: float
    size: int
    at: float
    record: Callable[[], Any]


class RequestLog:
    """The request log of one server. `rate_of` gives a model's sampling rate, None for the default one.

    `close` writes what is queued. Raises ConfigInvalid where the folder can't be written.
    """

    def __init__(
        self,
        options: LogOptions,
        metrics: Metrics,
        rate_of: Callable[[str], float | None],
        *,
        clock: Callable[[], float] = time.time,
        sample: Callable[[], float] = random.random,  # sampling, not a secret
    ) -> None:
        self._options = options
        self._metrics = metrics
        self._rate_of = rate_of
        self._clock = clock
        self._sample = sample
        self._files = LogFiles(
            options.folder,
            max_bytes=options.max_file_bytes,
            max_age_s=options.max_file_age_s,
            keep_bytes=options.keep_bytes,
            clock=clock,
        )
        try:
            options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            recovered = self._files.recover()
        except OSError as e:
            raise ConfigInvalid(
                f"request_log_dir {options.folder} can't be written: {e.strerror or e}"
            ) from e
        if recovered:
            log.info("request log: closed %d files that a killed server left open", recovered)
        self._queue: deque[_Item] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._broken_until = 0.0
        self._complained = -_COMPLAIN_S
        self._dropped_since = 0
        self._thread = threading.Thread(target=self._work, name="request-log", daemon=True)
        self._thread.start()

    # ---- on a request's way

    def offer(self, request: Any, response: Any) -> None:
        """Log a request message and its response, if they are picked."""
        self._offer(request, response, response.model_spec)

    def offer_multi(self, request: Any, response: Any) -> None:
        """The same for MultiInference, whose results each name the model."""
        if response.results:
            self._offer(request, response, response.results[0].model_spec)

    def _offer(self, request: Any, response: Any, spec: Any) -> None:
        rate = self._picked(spec.name)
        if rate:
            size = request.ByteSize() + response.ByteSize()
            self._put(
                spec.name, spec.version.value, rate, size, lambda: _of_messages(request, response, spec)
            )

    def offer_arrays(
        self,
        model: str,
        version: int,
        signature: str,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, Any],
    ) -> None:
        """Log a predict request that came as JSON, as the message it would have been."""
        rate = self._picked(model)
        if rate:
            size = sum(_size(array) for array in (*inputs.values(), *outputs.values()))
            self._put(
                model, version, rate, size, lambda: _of_arrays(model, version, signature, inputs, outputs)
            )

    def _picked(self, model: str) -> float:
        """The model's rate if this request is picked, else 0."""
        rate = self._rate_of(model)
        if rate is None:
            rate = self._options.sample_rate
        return rate if rate > 0 and self._sample() < rate else 0.0

    def _put(self, model: str, version: int, rate: float, size: int, record: Callable[[], Any]) -> None:
        with self._changed:
            if (
                self._closed
                or len(self._queue) >= self._options.queue_length
                or self._queued_bytes + size > self._options.queue_bytes
            ):
                self._metrics.request_dropped(model, "queue_full")
                return
            self._queue.append(_Item(model, version, rate, size, self._clock(), record))
            self._queued_bytes += size
            self._changed.notify()

    # ---- the writer's thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed, self._files.next_due())
                item = self._queue.popleft() if self._queue else None
                if item is not None:
                    self._queued_bytes -= item.size
                done = item is None and self._closed
            if item is not None:
                self._log(item)
            try:
                if done:
                    self._files.close()
                    return
                self._files.close_old()
            except OSError as e:
                self._complain(e)
                if done:
                    return

    def _log(self, item: _Item) -> None:
        if self._clock() < self._broken_until:
            self._drop(item.model)
            return
        try:
            record = item.record()
            record.log_metadata.sampling_config.sampling_rate = item.rate
            record.log_metadata.saved_model_tags.append("serve")
            record.log_metadata.timestamp_secs = int(item.at)
            data = record.SerializeToString()
        except Exception:
            # Whatever odd value a model answers: it must not end the thread that logs all others.
            log.exception("a request of %s can't be made a log record", item.model)
            self._metrics.request_dropped(item.model, "error")
            return
        try:
            self._files.append(item.model, item.version, data)
        except OSError as e:
            self._broken_until = self._clock() + _RETRY_S
            self._drop(item.model)
            self._complain(e)
        else:
            self._metrics.request_logged(item.model)

    def _drop(self, model: str) -> None:
        self._dropped_since += 1
        self._metrics.request_dropped(model, "disk")

    def _complain(self, error: OSError) -> None:
        if self._clock() - self._complained >= _COMPLAIN_S:
            self._complained = self._clock()
            log.warning(
                "request log %s can't be written: %s; %d requests are not logged, they are served all the same",
                self._options.folder,
                error.strerror or error,
                self._dropped_since,
            )
            self._dropped_since = 0

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close the files; gives up after the timeout."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)


def _size(array: Any) -> int:
    array = np.asarray(array)
    if array.dtype.kind == "O":
        return sum(map(len, array.ravel().tolist()))
    return int(array.nbytes)


def _of_messages(request: Any, response: Any, spec: Any) -> Any:
    record = prediction_log_pb2.PredictionLog()
    part = getattr(record, _FIELDS[type(request).__name__])
    part.request.CopyFrom(request)
    part.response.CopyFrom(response)
    record.log_metadata.model_spec.CopyFrom(spec)
    return record


def _of_arrays(
    model: str, version: int, signature: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, Any]
) -> Any:
    record = prediction_log_pb2.PredictionLog()
    request, response = record.predict_log.request, record.predict_log.response
    request.model_spec.name = model
    request.model_spec.signature_name = signature
    for name, array in inputs.items():
        tensors.to_proto(array, request.inputs[name])
    for name, array in outputs.items():
        tensors.to_proto(array, response.outputs[name])
    for spec in (response.model_spec, record.log_metadata.model_spec):
        spec.name = model
        spec.version.value = version
        spec.signature_name = signature
    return record
