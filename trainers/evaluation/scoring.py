"""One pass over batches: what a model said of each example.

A few numbers an example are kept, and no feature nor whole answer: 24 bytes of a classifier (label, answer, loss,
the probabilities of both, the label's rank) and 4 more for Brier's score of many classes, 20 of a regression. Of them
are metrics, intervals, confusion, plots and slices made afterwards, without asking the model again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.job.errors import DataError
from trainers.task import CLASSIFICATION, REGRESSION, Task

if TYPE_CHECKING:
    import keras
    from numpy.typing import NDArray

__all__ = ["LabelOutOfRange", "Scores", "Scorer"]


def _none() -> NDArray:
    return np.zeros(0, np.float32)


class LabelOutOfRange(DataError):
    """A label of the records is none of the model's classes."""

    code = "evaluate.label_out_of_range"


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model said of n examples.

    `labels` and `predicted` are class indices [n] of a classifier; `absolute` and `squared` are errors [n] of a
    regression, means over an example's outputs; `losses` is [n], `by_example` says whether each is of one
    example or the mean of its batch; `more` are the trainer's own metrics.

    Of a classifier, `truth` [n] is the probability it gave the label, `likely` [n] that of its answer (of two
    classes: of the second one), `rank` [n]
    is how many classes it thought likelier than the label, `brier` [n] the squared error of its probabilities. Of
    a regression with one output, `wanted` and `given` [n] are the label and the answer. Those are empty where the
    model says no such thing.
    """

    labels: NDArray
    predicted: NDArray
    losses: NDArray
    absolute: NDArray
    squared: NDArray
    classes: int
    more: Mapping[str, float]
    by_example: bool = True
    likely: NDArray = dataclasses.field(default_factory=_none)
    truth: NDArray = dataclasses.field(default_factory=_none)
    rank: NDArray = dataclasses.field(default_factory=_none)
    brier: NDArray = dataclasses.field(default_factory=_none)
    wanted: NDArray = dataclasses.field(default_factory=_none)
    given: NDArray = dataclasses.field(default_factory=_none)

    def take(self, rows: NDArray) -> Scores:
        """Those of some examples, by their indices; the trainer's own metrics are of all, so they are left out."""
        parts = {
            field.name: value[rows] if len(value) else value
            for field in dataclasses.fields(self)
            if hasattr(value := getattr(self, field.name), "dtype")
        }
        return dataclasses.replace(self, more={}, **parts)

    @property
    def examples(self) -> int:
        """How many."""
        return len(self.losses)


class Scorer:
    """Gathers what one model says, batch by batch.

    `predict` maps a dict of features to the model's output; `loss` (a Keras loss, or a function of labels and
    output that gives the batch's mean) and `metrics` are the trainer's.
    """

    def __init__(
        self,
        predict: Callable[[Mapping[str, Any]], Any],
        task: Task,
        loss: Callable[[Any, Any], Any],
        metrics: Sequence[keras.metrics.Metric] = (),
    ) -> None:
        self._predict = predict
        self._task = task
        self._loss = loss
        self._metrics = list(metrics)
        self._parts: list[dict[str, NDArray]] = []
        self._classes = len(task.classes or ())
        self._by_example = hasattr(loss, "reduction")
        if self._by_example:
            loss.reduction = "none"  # a loss an example: of them are means, intervals and slices made

    def update(self, features: Mapping[str, Any], labels: Any) -> None:
        """Take one batch."""
        import tensorflow as tf

        output = self._predict(features)
        scores = self._task.scores(output)
        part: dict[str, NDArray] = {}
        if self._task.kind == CLASSIFICATION:
            answers = self._task.answers(output)
            self._classes = max(self._classes, int(answers["probabilities"].shape[-1]))
            part["predicted"] = answers["classes"].numpy()
            part["labels"] = self._class_indices(labels.numpy())
            part |= _probabilities(answers["probabilities"].numpy(), part["labels"], part["predicted"])
        else:
            wanted = tf.cast(tf.reshape(labels, tf.shape(scores)), scores.dtype)
            error = (scores - wanted).numpy().reshape(len(labels), -1)
            part["absolute"] = np.abs(error).mean(axis=1)
            part["squared"] = np.square(error).mean(axis=1)
            if error.shape[1] == 1:
                part["wanted"] = wanted.numpy().reshape(-1)
                part["given"] = scores.numpy().reshape(-1)
        if self._by_example:
            # Keras takes the last axis for an example's outputs: one number an example needs an axis of its own.
            flat = self._task.kind == REGRESSION and scores.shape.rank == 1
            rows = (wanted[:, None], scores[:, None]) if flat else (labels, scores)
            losses = np.asarray(self._loss(*rows))
            part["losses"] = losses.reshape(len(losses), -1).mean(axis=1)
        else:  # a function of the batch: its mean stands for each of its examples
            part["losses"] = np.full(len(labels), float(self._loss(labels, output)))
        for metric in self._metrics:
            metric.update_state(labels, scores)
        self._parts.append(part)

    def _class_indices(self, labels: NDArray) -> NDArray:
        if labels.ndim > 1 and labels.shape[-1] > 1:
            labels = labels.argmax(axis=-1)  # one-hot
        labels = labels.reshape(-1).astype(np.int64)
        wrong = labels[(labels < 0) | (labels >= self._classes)]
        if len(wrong):
            raise LabelOutOfRange(
                f"label {wrong[0]} of the held-out records is none of the model's {self._classes} classes",
                hint="train on all classes, or correct the labels",
            )
        return labels

    def finish(self) -> Scores:
        """What was gathered."""

        def whole(name: str, dtype: type) -> NDArray:
            parts = [part[name] for part in self._parts if name in part]
            return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

        return Scores(
            labels=whole("labels", np.int32),
            predicted=whole("predicted", np.int32),
            losses=whole("losses", np.float32),
            absolute=whole("absolute", np.float32),
            squared=whole("squared", np.float32),
            classes=self._classes,
            more={metric.name: float(metric.result()) for metric in self._metrics},
            by_example=self._by_example,
            rank=whole("rank", np.int32),
            **{name: whole(name, np.float32) for name in ("likely", "truth", "brier", "wanted", "given")},
        )


def _probabilities(probabilities: NDArray, labels: NDArray, predicted: NDArray) -> dict[str, NDArray]:
    """What is kept of probabilities [n, classes]."""
    each = np.arange(len(labels))
    truth = probabilities[each, labels]
    if probabilities.shape[1] == 2:
        likely = probabilities[:, 1]
        brier = np.square(1 - truth)  # of one class, as is usual where there are two
    else:
        likely = probabilities[each, predicted]
        brier = np.square(probabilities).sum(axis=1) - 2 * truth + 1
    return {
        "likely": likely,
        "truth": truth,
        "rank": (probabilities > truth[:, None]).sum(axis=1),
        "brier": brier,
    }
