"""The variables of a model, whatever it is made with: Keras, or a plain tf.Module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["is_trainable", "model_variables", "parts_of", "plain_variable", "trainable_parts"]


def plain_variable(variable: Any) -> Any:
    """TensorFlow's variable in a Keras one, or the variable itself."""
    import keras

    return variable.value if isinstance(variable, keras.Variable) else variable


def parts_of(variable: Any) -> Sequence[Any]:
    """The parts of a variable that is cut over parameter servers; else the variable alone."""
    parts = getattr(variable, "variables", None)
    return list(parts) if parts is not None else [variable]


def is_trainable(variable: Any) -> bool:
    """Whether an optimizer updates one of TensorFlow's variables."""
    return bool(parts_of(variable)[0].trainable)


def model_variables(model: Any) -> dict[str, Any]:
    """TensorFlow's variables of a Keras object or a tf.Module by number ("0000"), those that are cut as one.

    By number, since Keras numbers its names by what else was built in the process. The order is that of Keras,
    or of a module's attributes by name. {} for anything else.
    """
    import keras
    import tensorflow as tf
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    found: Sequence[Any]
    if isinstance(model, (keras.Layer, keras.optimizers.Optimizer)):
        found = [plain_variable(variable) for variable in model.variables]
    elif isinstance(model, tf.Module):
        # `variables` would name the parts, and a process without parameter servers has none.
        kinds = (tf.Variable, ShardedVariable)
        found = model._flatten(predicate=lambda value: isinstance(value, kinds), expand_composites=False)
    else:
        found = []
    return {f"{number:04d}": variable for number, variable in enumerate(found)}


def trainable_parts(model: Any) -> list[Any]:
    """What the optimizer updates: the trainable variables, those cut over parameter servers part by part."""
    parts: list[Any] = []
    for variable in model.trainable_variables:
        cut = getattr(plain_variable(variable), "variables", None)
        parts += cut if cut is not None else [variable]
    return parts
