"""Exponential moving averages of the weights: steadier than the weights themselves, and what is evaluated.

    average <- m * average + (1 - m) * weight,   m = min(momentum, (1 + step) / (10 + step))

after each update (Polyak and Juditsky 1992; the start as in TensorFlow 1's ExponentialMovingAverage with
`num_updates`, so that the first steps do not hold it back).
"""

from __future__ import annotations

from typing import Any

from trainers.runtime.variables import is_trainable, model_variables, parts_of, plain_variable

__all__ = ["Averages"]


class Averages:
    """An average beside each trainable variable, where it lives: on each device, or on its parameter server.

    Make it in the strategy's scope, once the model's variables are there.
    """

    def __init__(self, model: Any, optimizer: Any, momentum: float) -> None:
        import tensorflow as tf

        self._optimizer = optimizer
        self._momentum = momentum
        self._pairs: list[tuple[Any, Any]] = []  # (average, weight), part by part
        self._saved: dict[str, Any] = {}
        extended = tf.distribute.get_strategy().extended
        for number, variable in model_variables(model).items():
            if not is_trainable(variable):
                continue
            averages = []
            for part in parts_of(variable):
                with extended.colocate_vars_with(part):
                    average = tf.Variable(
                        lambda part=part: tf.convert_to_tensor(part),
                        trainable=False,
                        dtype=part.dtype,
                        shape=part.shape,
                        name="average",
                    )
                averages.append(average)
                self._pairs.append((average, part))
            self._saved[number] = averages[0] if averages[0].shape == variable.shape else _whole(averages)

    def restart(self) -> None:
        """Begin at the weights as they are now."""
        for average, weight in self._pairs:
            average.assign(weight)

    def update(self) -> None:
        """Follow the weights by one step; call it in `strategy.run` after the optimizer's update."""
        import tensorflow as tf

        step = tf.cast(plain_variable(self._optimizer.iterations), tf.float32)
        momentum = tf.minimum(self._momentum, (1.0 + step) / (10.0 + step))

        def follow(average: Any, weight: Any, momentum: Any) -> Any:
            momentum = tf.cast(momentum, average.dtype)
            return average.assign(momentum * average + (1 - momentum) * tf.convert_to_tensor(weight))

        def everywhere(strategy: Any, momentum: Any) -> None:
            for average, weight in self._pairs:
                strategy.extended.update(average, follow, args=(weight, momentum), group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(
            everywhere, tf.distribute.get_strategy(), momentum
        )

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: an average for each trainable variable, numbered as the model's variables are."""
        return self._saved


def _whole(parts: list[Any]) -> Any:
    """Averages on several parameter servers as one variable, so that a checkpoint holds it in one piece."""
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    return ShardedVariable(parts)
