"""One training step, and K of them in one call.

A call of a tf.function costs a millisecond, a closure on a remote worker several: small models would spend their
time there. So K steps are packed in a loop inside the function, K a tensor, so that it is traced once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from trainers.runtime.variables import plain_variable, trainable_parts

__all__ = [
    "StepSize",
    "make_apply",
    "make_gradients",
    "make_run",
    "make_step",
    "mean_over_replicas",
    "model_inputs",
    "plain_variable",
    "trainable_parts",
]


def model_inputs(model: Any, features: Any) -> Any:
    """The features of a batch in the structure that a Keras model takes them in, by the names of its inputs."""
    if not isinstance(features, dict):
        return features
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return features
    names = [tensor.name for tensor in inputs]
    if isinstance(getattr(model, "input", None), dict):
        return {name: features[name] for name in names}
    values = [features[name] for name in names]
    return values[0] if len(values) == 1 else values


def make_gradients(
    model: Any, loss: Any, optimizer: Any, *, jit_compile: bool = False
) -> Callable[[Any], tuple[Any, list[Any]]]:
    """`gradients(batch) -> (mean loss, gradients)` of one batch, by `trainable_parts(model)`.

    The gradients are of the mean loss as the optimizer scales it (`scale_loss`, for float16), so they go to
    `make_apply` of the same optimizer; one is None where the loss does not depend on the variable. `jit_compile`
    lets XLA compile forward and backward pass.
    """
    import keras
    import tensorflow as tf

    is_keras = isinstance(model, keras.Layer)

    def gradients(batch: Any) -> tuple[Any, list[Any]]:
        features, label, *weight = batch
        with tf.GradientTape() as tape:
            inputs = model_inputs(model, features)
            outputs = model(inputs, training=True) if is_keras else model(inputs)
            outputs = _for_loss(outputs, loss)
            with _of_this_replica():
                value = loss(label, outputs, *weight)
            if is_keras and model.losses:
                value += tf.add_n(model.losses)
            scaled = optimizer.scale_loss(value)
        return value, tape.gradient(scaled, [plain_variable(part) for part in trainable_parts(model)])

    return tf.function(gradients, jit_compile=True, autograph=False) if jit_compile else gradients


def _for_loss(outputs: Any, loss: Any) -> Any:
    """What the loss is made from: of a dict its scores, unless the loss is a function that takes the dict.

    In float32 at least: a mean over a batch in 8 or 11 bits is too coarse.
    """
    import keras
    import tensorflow as tf

    from trainers.task import REGRESSION, Task

    if isinstance(outputs, dict):
        if "logits" in outputs:
            outputs = outputs["logits"]
        elif isinstance(loss, keras.losses.Loss):
            outputs = Task(REGRESSION).scores(outputs)
    short = (tf.float16, tf.bfloat16)
    return tf.nest.map_structure(
        lambda x: tf.cast(x, tf.float32) if getattr(x, "dtype", None) in short else x, outputs
    )


@contextlib.contextmanager
def _of_this_replica() -> Iterator[None]:
    """Where Keras's losses are means of the batch at hand.

    Elsewhere they are divided by the number of replicas too, so that `fit` can sum them; functions that users
    write are not, so the loop could not know which it got.
    """
    from keras.src.losses import loss as keras_losses

    divide = keras_losses.scale_loss_for_distribution
    keras_losses.scale_loss_for_distribution = lambda value: value
    try:
        yield
    finally:
        keras_losses.scale_loss_for_distribution = divide


def mean_over_replicas(gradients: list[Any], replicas: int) -> list[Any]:
    """The mean of the gradients of `replicas` replicas that step together; call it in `strategy.run`."""
    import tensorflow as tf

    if replicas == 1:
        return gradients
    there = [gradient for gradient in gradients if gradient is not None]
    context = tf.distribute.get_replica_context()
    means = iter(context.all_reduce(tf.distribute.ReduceOp.MEAN, there) if there else [])
    return [None if gradient is None else next(means) for gradient in gradients]


def make_apply(model: Any, optimizer: Any, averages: Any = None) -> Callable[[list[Any]], None]:
    """`apply(gradients)`: one update of the weights by the mean gradient of all that step together.

    Call it in `strategy.run`, each replica with the same gradients. Keras itself clips the gradient of each
    replica and sums afterwards; here the optimizer's clipping sees the mean, so N replicas do what one does with
    the N-fold batch. `averages` (averages.Averages) follow the weights.
    """
    for layer in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if layer is not None:
            layer._all_reduce_sum_gradients = lambda pairs: pairs  # it is done: mean_over_replicas

    def apply(gradients: list[Any]) -> None:
        optimizer.apply([_rows_once(gradient) for gradient in gradients], trainable_parts(model))
        if averages is not None:
            averages.update()

    return apply


def _rows_once(gradient: Any) -> Any:
    """A sparse gradient with each row named once: squares and norms of one that names rows twice are wrong."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, place = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, place, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def make_step(model: Any, loss: Any, optimizer: Any, replicas: int) -> Callable[[Any], Any]:
    """One step of one replica: a batch in, its mean loss out, the weights updated by the mean of all replicas.

    Run it in `strategy.run`.
    """
    gradients, apply = make_gradients(model, loss, optimizer), make_apply(model, optimizer)

    def step(batch: Any) -> Any:
        value, found = gradients(batch)
        apply(mean_over_replicas(found, replicas))
        return value

    return step


def make_run(strategy: Any, step: Callable[[Any], Any], *, replicas: int) -> Any:
    """`run(iterator, k, told) -> (mean loss of k steps, seconds waited for data, heard)`, one tf.function.

    `told` is a float32 vector of this process, `heard` its mean over all that step together. Peers need it: the
    collectives of a loop meet by the number of their turn, so all must ask for the same k, and leave together.
    """
    import tensorflow as tf

    def mean(value: Any) -> Any:
        return value if replicas == 1 else strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)

    def one(iterator: Any, total: Any, waited: Any) -> tuple[Any, Any]:
        # The clock is read after the step before and after the batch: order must be said.
        with tf.control_dependencies([total]):
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            waited += tf.timestamp() - before
        return total + tf.cast(mean(strategy.run(step, args=(batch,))), tf.float32), waited

    # Without AutoGraph, as in Keras: converting these few lines costs 2 CPU-seconds a process.
    @tf.function(autograph=False)
    def run(iterator: Any, k: Any, told: Any = None) -> Any:
        told = tf.zeros([0], tf.float32) if told is None else told
        heard = told if replicas == 1 else mean(strategy.run(lambda: tf.identity(told)))
        with tf.control_dependencies([heard]):
            start = tf.zeros([], tf.float32)
        _, total, waited = tf.while_loop(
            lambda i, *_: i < k,
            lambda i, total, waited: (i + 1, *one(iterator, total, waited)),
            (tf.constant(0), start, tf.zeros([], tf.float64)),
        )
        return total / tf.cast(k, tf.float32), waited, heard

    return run


class StepSize:
    """How many steps to pack into the next call: as many as take about `seconds`, from measured calls."""

    def __init__(self, *, seconds: float = 0.25, most: int = 500) -> None:
        self._seconds = seconds
        self._most = most
        self.value = 1
        self._step_time: float | None = None

    def measured(self, step_time: float) -> None:
        """Note the seconds that a step took, of a call that was no first one (that would count tracing)."""
        each = max(step_time, 1e-6)
        self._step_time = each if self._step_time is None else 0.5 * (self._step_time + each)
        wanted = int(self._seconds / self._step_time)
        # At most fourfold at once: the first measured calls of a process are slow, or lucky.
        self.value = max(1, min(wanted, 4 * self.value, self._most))
