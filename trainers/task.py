"""What a trained model is for, what it takes and what it answers: one reading of both for evaluation and export.

A trainer module says it by its names: CLASSES or a cross-entropy loss make a classifier, anything else a
regressor. A model returns its scores (logits unless the loss says `from_logits=False`), alone or in a dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainers.job.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf

    from trainers.runtime.module import TrainerModule

__all__ = ["CLASSIFICATION", "REGRESSION", "ModelContractBroken", "Task", "call", "dense"]

CLASSIFICATION, REGRESSION = "classification", "regression"
_SCORES = (
    "logits",
    "probabilities",
    "predictions",
    "outputs",
)  # a dict's main output, in order of preference


class ModelContractBroken(UserError):
    """A trainer's model takes or gives something that evaluation and export can't use."""

    code = "model.contract"


@dataclasses.dataclass(frozen=True)
class Task:
    """What a model is for.

    `classes` are the names of the classes where the trainer gives them; `from_logits` says whether the model's
    scores are logits or probabilities already.
    """

    kind: str
    classes: tuple[str, ...] | None = None
    from_logits: bool = True

    def __post_init__(self) -> None:
        if self.kind not in (CLASSIFICATION, REGRESSION):
            raise ValueError(f"kind must be {CLASSIFICATION} or {REGRESSION}, got {self.kind!r}")

    @classmethod
    def of(cls, module: TrainerModule, hparams: Mapping[str, Any]) -> Task:
        """The task of a trainer module."""
        import keras

        loss = module.loss(hparams)
        names = module.classes
        classifying = (
            keras.losses.SparseCategoricalCrossentropy,
            keras.losses.CategoricalCrossentropy,
            keras.losses.CategoricalFocalCrossentropy,
            keras.losses.BinaryCrossentropy,
            keras.losses.BinaryFocalCrossentropy,
        )
        if names is None and not isinstance(loss, classifying):
            return cls(REGRESSION)
        config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
        classes = None if names is None else tuple(str(name) for name in names)
        return cls(CLASSIFICATION, classes, bool(config.get("from_logits", True)))

    def scores(self, output: Any) -> tf.Tensor:
        """The tensor that the loss is made from, of what the model returned."""
        if not isinstance(output, Mapping):
            if isinstance(output, (list, tuple)):
                raise ModelContractBroken(
                    f"the model returns a {type(output).__name__} of {len(output)}",
                    hint='return one tensor, or a dict with "logits" or "predictions"',
                )
            return output
        for name in _SCORES:
            if name in output:
                return output[name]
        if len(output) == 1:
            return next(iter(output.values()))
        raise ModelContractBroken(
            f"the model returns a dict of {sorted(output)}, and none of them is known as its scores",
            hint=f"name one of {', '.join(_SCORES)}",
        )

    def answers(self, output: Any) -> dict[str, tf.Tensor]:
        """What a served model answers: named tensors with the batch first; may be traced.

        Classification: logits (where the model gives them), probabilities [batch, classes] and classes
        (int64 [batch], the index of the likeliest); one score a row means two classes, the score being that of
        the second. Regression: predictions. Other outputs of a model that returns a dict stay.
        """
        import tensorflow as tf

        scores = self.scores(output)
        more = dict(output) if isinstance(output, Mapping) else {}
        if self.kind == REGRESSION:
            return more or {"predictions": scores}
        binary = scores.shape.rank == 1 or scores.shape[-1] == 1
        if binary:
            flat = tf.reshape(scores, [-1])
            second = tf.sigmoid(flat) if self.from_logits else flat
            probabilities = tf.stack([1 - second, second], axis=-1)
        else:
            probabilities = tf.nn.softmax(scores) if self.from_logits else scores
        if self.classes and probabilities.shape[-1] not in (None, len(self.classes)):
            raise ModelContractBroken(
                f"the model gives {probabilities.shape[-1]} scores a row for {len(self.classes)} CLASSES",
                hint="let the last layer have as many units as there are classes",
            )
        ours = {"probabilities": probabilities, "classes": tf.argmax(probabilities, axis=-1)}
        return {**more, **({"logits": scores} if self.from_logits else {}), **ours}


def call(model: Any, features: Mapping[str, Any]) -> Any:
    """A trained model's output for a batch of features, by the names of its inputs; may be traced.

    Features that a model with named inputs doesn't take are left out; any other model gets all of them.
    """
    import keras

    from trainers.runtime.steps import model_inputs

    inputs = model_inputs(model, {name: dense(value) for name, value in features.items()})
    return model(inputs, training=False) if isinstance(model, keras.Layer) else model(inputs)


def dense(tensor: Any) -> Any:
    """A ragged tensor padded with zeros or empty strings; anything else as it is."""
    return tensor.to_tensor() if hasattr(tensor, "to_tensor") else tensor
