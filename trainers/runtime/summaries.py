"""TensorBoard event files of a job: `tensorboard/train` by the chief, `tensorboard/eval` by the evaluator.

Each process writes a file of its own. One that goes on from a checkpoint begins it with a session start at the next
step, by which TensorBoard drops what an earlier life wrote beyond that checkpoint. Encoding and writing are on a
thread; what the loop does is look at the clock and, when histograms are due, copy the weights.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.job.spec import TrainingJob
from trainers.runtime.heartbeat import Progress
from trainers.runtime.steps import plain_variable

__all__ = [
    "EventWriter",
    "SummarySettings",
    "TrainSummaries",
    "model_graph",
    "summary_folder",
    "train_summaries",
]

log = logging.getLogger(__name__)

_SECONDS = 1.0  # between scalars where no number of steps is named
_SCALARS = {"loss": "loss", "examples_per_s": "examples_per_s", "input_wait": "input_wait_share"}
_BUCKETS = 30
_QUEUED = 64  # events that may wait for a slow disk; then histograms and scalars are left out


def summary_folder(job_folder: Path | str, kind: str) -> Path:
    """Where the event files of one kind ("train", "eval") are."""
    return Path(job_folder) / "tensorboard" / kind


@dataclasses.dataclass(frozen=True)
class SummarySettings:
    """What a job's args say of event files.

    `tensorboard` (true) whether there are any; `summary_every` steps between scalars (by default a second);
    `histogram_every` steps between histograms of the weights (by default none).
    """

    on: bool = True
    summary_every: int | None = None
    histogram_every: int | None = None

    @classmethod
    def of(cls, job: TrainingJob) -> SummarySettings:
        """The settings of a job."""
        args = job.args
        return cls(args.get("tensorboard", True), args.get("summary_every"), args.get("histogram_every"))

    def room(self, step: int) -> int:
        """Steps until the next event that is due at a step of its own; from the step alone, as peers must agree."""
        periods = [period for period in (self.summary_every, self.histogram_every) if period and self.on]
        return min((period - step % period for period in periods), default=1 << 30)


class EventWriter:
    """Writes events into a new file in `folder`, on a thread; a file that can't be written is a warning.

    `begin` is the number of finished steps at which this life goes on.
    """

    def __init__(self, folder: Path, *, begin: int = 0, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.is_first = not any(folder.glob("events.out.tfevents.*")) if folder.exists() else True
        name = f"events.out.tfevents.{int(now()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / name
        self._queue: queue.Queue[Callable[[], Any] | None] = queue.Queue(_QUEUED)
        self._begin = begin
        self._behind = False
        self._thread = threading.Thread(target=self._run, name="trainyard-summaries", daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Figures at a step, by tag."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # In the older form, which all of TensorBoard's readers purge at a session start; it shows both alike.
        made = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._put(step, lambda: Summary(value=made))

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """Arrays at a step, by tag; their distribution is written."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._put(
            step,
            lambda: Summary(value=[Summary.Value(tag=tag, histo=_histogram(v)) for tag, v in values.items()]),
        )

    def graph(self, graph_def: bytes) -> None:
        """A serialized GraphDef."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._queue.put(lambda: Event(wall_time=self._now(), graph_def=graph_def))

    def close(self) -> None:
        """Write what is left, and end."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _put(self, step: int, make: Callable[[], Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        at = self._now()
        try:
            self._queue.put_nowait(lambda: Event(wall_time=at, step=step, summary=make()))
            self._behind = False
        except queue.Full:
            if not self._behind:
                log.warning("event files fall behind: what is due from step %s on is left out", step)
            self._behind = True

    def _run(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb") as file:
                self._write(file)
        except Exception as e:  # noqa: BLE001 - pictures for people: whatever is wrong with them, training goes on
            log.warning("no more event files for TensorBoard: %s: %s", type(e).__name__, e)
            while self._queue.get() is not None:  # whoever writes goes on unhindered
                continue

    def _write(self, file: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        writer = RecordWriter(file)
        writer.write(Event(wall_time=self._now(), file_version="brain.Event:2").SerializeToString())
        if not self.is_first:
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=self._now(), step=self._begin + 1, session_log=start)
            writer.write(event.SerializeToString())
        while True:
            make = self._queue.get()
            if make is None:
                return
            writer.write(make().SerializeToString())
            if self._queue.empty():
                writer.flush()


def _histogram(array: Any) -> Any:
    """The distribution of an array in 30 buckets; values that are not finite are left out."""
    import numpy as np
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    flat = np.asarray(array, np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    counts, edges = np.histogram(flat, bins=_BUCKETS)
    return HistogramProto(
        min=flat.min() if flat.size else 0.0,
        max=flat.max() if flat.size else 0.0,
        num=flat.size,
        sum=flat.sum(),
        sum_squares=np.square(flat).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


class TrainSummaries:
    """Says when the chief's events are due, and gathers them; other peers only make room for them.

    `learning_rate` reads the optimizer's; `weights` copies the weights, by name.
    """

    def __init__(
        self,
        settings: SummarySettings,
        progress: Progress,
        *,
        writer: EventWriter | None = None,
        learning_rate: Callable[[], float | None] = lambda: None,
        weights: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._writer = writer
        self._learning_rate = learning_rate
        self._weights = weights
        self._clock = clock
        self._wrote_at = clock()
        self._wrote = self._drew = progress.step

    def room(self, step: int) -> int:
        """Steps that may be packed into the next call."""
        return self._settings.room(step)

    def after(self, step: int) -> None:
        """Write what is due after `step` finished steps."""
        if self._writer is None:
            return
        every = self._settings.summary_every
        if step > self._wrote and (
            step // every > self._wrote // every if every else self._clock() - self._wrote_at >= _SECONDS
        ):
            self._scalars(step)
        every = self._settings.histogram_every
        if every and step // every > self._drew // every:
            self._drew = step
            self._writer.histograms(step, self._weights())

    def close(self, step: int | None = None) -> None:
        """End; after training has come to its end, with the last figures."""
        if self._writer is None:
            return
        if step is not None and step > self._wrote:
            self._scalars(step)
        self._writer.close()

    def _scalars(self, step: int) -> None:
        assert self._writer is not None
        self._wrote, self._wrote_at = step, self._clock()
        known: Mapping[str, Any] = self._progress.values()
        found = {tag: known[name] for name, tag in _SCALARS.items() if known[name] is not None}
        rate = self._learning_rate()
        self._writer.scalars(step, found if rate is None else {**found, "learning_rate": rate})


def train_summaries(
    job: TrainingJob, folder: Path, progress: Progress, model: Any, optimizer: Any, *, writes: bool
) -> TrainSummaries:
    """The summaries of a run that begins at `progress.step`; the graph is written by a job's first life."""
    settings = SummarySettings.of(job)
    if not (settings.on and writes):
        return TrainSummaries(settings, progress)
    writer = EventWriter(summary_folder(folder, "train"), begin=progress.step)
    if writer.is_first:
        graph = model_graph(model)
        if graph is not None:
            writer.graph(graph)

    def learning_rate() -> float | None:
        import tensorflow as tf

        rate = getattr(optimizer, "learning_rate", None)
        # Of a mirrored variable only a tensor becomes a number.
        return None if rate is None else float(tf.convert_to_tensor(rate))

    return TrainSummaries(
        settings, progress, writer=writer, learning_rate=learning_rate, weights=lambda: _weights(model)
    )


def _weights(model: Any) -> dict[str, Any]:
    """Copies of a model's trainable variables, those cut over parameter servers whole, by tag."""
    import tensorflow as tf

    return {
        f"weights/{getattr(v, 'path', v.name)}": tf.convert_to_tensor(plain_variable(v)).numpy()
        for v in model.trainable_variables
    }


def model_graph(model: Any) -> bytes | None:
    """The graph of a Keras model's forward pass, as a serialized GraphDef; None where its inputs are not named."""
    if not getattr(model, "inputs", None):
        return None
    import tensorflow as tf

    def spec(tensor: Any) -> Any:
        return tf.TensorSpec(tensor.shape, tensor.dtype, name=tensor.name)

    try:
        forward = tf.function(lambda inputs: model(inputs, training=False), autograph=False)
        graph = forward.get_concrete_function(tf.nest.map_structure(spec, model.input)).graph
    except Exception as e:  # noqa: BLE001 - a picture for people: whatever a model does, training goes on without it
        log.warning("no graph for TensorBoard: %s: %s", type(e).__name__, str(e).partition("\n")[0])
        return None
    return bytes(graph.as_graph_def(add_shapes=True).SerializeToString())
