"""Runs requests of many callers as one batch, with the limits of TF Serving's batching parameters.

A worker takes what is queued when it becomes free and, with a timeout set, waits for more. With a timeout of
zero a lone request is never held back, and batches form by themselves under load.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.server.flags import Batching
from serving.server.padding import padded_alike
from serving.server.status import Code, Refused

__all__ = ["Batcher"]


@dataclass
class _Item:
    arrays: tuple[np.ndarray, ...]
    size: int
    shapes: tuple[tuple[int, ...], ...]
    done: Future[list[Any]] = field(default_factory=Future)


class Batcher:
    """Call it with the arrays of one request, get that request's results.

    `run` gets concatenated arrays and answers arrays with the same first dimension. A request larger than a
    batch may be is split, where that is enabled. Raises Refused when it is not, when the queue is full, or
    when the batcher has stopped.
    """

    def __init__(self, run: Callable[..., list[Any]], limits: Batching, *, name: str = "batch") -> None:
        self._run = run
        self._limits = limits
        self._queue: deque[_Item] = deque()
        self._queued = 0
        self._largest = limits.largest_batch
        self._capacity = limits.max_enqueued_batches * self._largest
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(limits.num_batch_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, *arrays: np.ndarray) -> list[Any]:
        if not all(array.ndim for array in arrays):
            raise Refused(
                Code.INVALID_ARGUMENT, "Batching Run() input tensors must have at least one dimension"
            )
        sizes = {array.shape[0] for array in arrays}
        if len(sizes) != 1:
            raise Refused(
                Code.INVALID_ARGUMENT, "Batching Run() input tensors must have equal 0th-dimension size"
            )
        size = sizes.pop()
        if size <= self._largest:
            item = self._item(arrays, size)
            self._enqueue([item], size)
            return item.done.result()
        if not self._limits.enable_large_batch_splitting:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"Task size {size} is larger than maximum input batch size {self._largest}",
            )
        starts = range(0, size, self._largest)
        items = [
            self._item(
                tuple(a[start : start + self._largest] for a in arrays), min(self._largest, size - start)
            )
            for start in starts
        ]
        self._enqueue(items, size)
        parts = [item.done.result() for item in items]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    def _item(self, arrays: tuple[np.ndarray, ...], size: int) -> _Item:
        # Items of one batch have the same shapes, or the same ranks where they are padded.
        padded = self._limits.pad_variable_length_inputs
        shapes = tuple((array.ndim,) if padded else array.shape[1:] for array in arrays)
        return _Item(arrays, size, shapes)

    def _enqueue(self, items: list[_Item], size: int) -> None:
        with self._changed:
            if self._stopped:
                raise Refused(Code.UNAVAILABLE, "The version is being unloaded")
            if self._queued + size > self._capacity:
                raise Refused(
                    Code.UNAVAILABLE,
                    "The batch scheduling queue to which this task was submitted is full; "
                    f"max_enqueued_batches is {self._limits.max_enqueued_batches}",
                )
            self._queue.extend(items)
            self._queued += size
            self._changed.notify(len(items))

    def stop(self) -> None:
        """Finish what is queued and end the workers."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while batch := self._take():
            try:
                for item, results in zip(batch, self._results(batch), strict=True):
                    item.done.set_result(results)
            except Exception as e:  # noqa: BLE001  # handed to the callers, who raise it
                if len(batch) == 1:
                    batch[0].done.set_exception(e)
                else:
                    self._one_by_one(batch)

    def _take(self) -> list[_Item]:
        """The next batch; empty when the batcher has stopped and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            if not self._queue:
                return []
            batch = [self._queue.popleft()]
            total = batch[0].size
            until = time.monotonic() + self._limits.batch_timeout_s
            while total < self._largest:
                if not self._queue:
                    left = until - time.monotonic()
                    if left <= 0 or self._stopped or not self._changed.wait_for(lambda: self._queue, left):
                        break
                following = self._queue[0]
                if total + following.size > self._largest or following.shapes != batch[0].shapes:
                    break
                batch.append(self._queue.popleft())
                total += following.size
            self._queued -= total
            return batch

    def _results(self, batch: list[_Item]) -> list[list[Any]]:
        total = sum(item.size for item in batch)
        padding = next((size for size in self._limits.allowed_batch_sizes if size >= total), total) - total
        if len(batch) == 1 and not padding:
            return [self._run(*batch[0].arrays)]
        arrays = []
        for parts in zip(*(item.arrays for item in batch), strict=True):
            if self._limits.pad_variable_length_inputs:
                parts = padded_alike(parts)
            fill = [np.repeat(parts[0][:1], padding, axis=0)] if padding and parts[0].shape[0] else []
            arrays.append(np.concatenate([*parts, *fill]))
        outputs = self._run(*arrays)
        if any(output.shape[0] != arrays[0].shape[0] for output in outputs):
            raise Refused(
                Code.FAILED_PRECONDITION,
                "Batched output tensor's 0th dimension does not equal the sum of the input sizes",
            )
        results, start = [], 0
        for item in batch:
            results.append([output[start : start + item.size] for output in outputs])
            start += item.size
        return results

    def _one_by_one(self, batch: list[_Item]) -> None:
        """One bad request must not fail its neighbours: each runs alone, and only the bad one fails."""
        for item in batch:
            try:
                item.done.set_result(self._results([item])[0])
            except Exception as e:  # noqa: BLE001  # handed to the caller, who raises it
                item.done.set_exception(e)
