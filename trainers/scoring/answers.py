# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""A released SavedModel's answers to rows, as Arrow columns, and the rows that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from trainers.job.errors import UserError
from trainers.released import Released

__all__ = ["Answerer", "ModelRefuses", "columns_of"]


class ModelRefuses(UserError):
    """The model can't be loaded, or can't be asked with these columns."""

    code = "score.model_refuses"


class Answerer:
    """Asks one signature of a released version."""

    def __init__(self, released: Released, signature: str) -> None:
        import tensorflow as tf

        try:
            self._loaded = tf.saved_model.load(str(released.path))  # its variables live as long as it is held
            self._function = self._loaded.signatures[signature]
        except (OSError, KeyError, ValueError, tf.errors.OpError) as e:
            raise ModelRefuses(
                f"signature {signature} of {released.path} can't be loaded: {e}",
                hint=f"it has {', '.join(sorted(released.info.get('signatures') or {})) or 'none'}",
            ) from e
        self.inputs = dict(self._function.structured_input_signature[1])

    def ask(self, rows: Mapping[str, Any], count: int) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """The answers to all rows that it takes, and of the others why not.

        `rows` are arrays or tensors by input, `count` long. A batch that it refuses is halved until the rows
        that are to blame are alone.
        """
        import tensorflow as tf

        try:
            inputs = {
                name: tf.cast(rows[name], spec.dtype) if spec.dtype != tf.string else tf.constant(rows[name])
                for name, spec in self.inputs.items()
            }
            for name, spec in self.inputs.items():
                spec.shape.assert_is_compatible_with(inputs[name].shape)
        except (KeyError, ValueError, TypeError) as e:
            raise ModelRefuses(f"the model can't be given these rows: {e}") from e
        return self._ask(inputs, 0, count)

    def _ask(
        self, inputs: Mapping[str, Any], begin: int, end: int
    ) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        import tensorflow as tf

        try:
            answers = self._function(**{name: value[begin:end] for name, value in inputs.items()})
        except tf.errors.InvalidArgumentError as e:
            if end - begin == 1:
                return {}, {begin: f"the model refuses it: {_why(e.message)}"[:300]}
            middle = (begin + end) // 2
            halves = [self._ask(inputs, begin, middle), self._ask(inputs, middle, end)]
            found = [answers for answers, _ in halves if answers]
            joined = {n: np.concatenate([f[n] for f in found]) for n in (found[0] if found else ())}
            return joined, {**halves[0][1], **halves[1][1]}
        out = {name: value.numpy() for name, value in sorted(answers.items())}
        odd = [name for name, value in out.items() if value.ndim == 0 or len(value) != end - begin]
        if odd:
            raise ModelRefuses(
                f"output {odd[0]} has no row for each row that it is asked, so it can't be batched"
            )
        return out, {}


def _why(message: str) -> str:
    """What an op says, of TensorFlow's message with its stack: the line before the node is named."""
    lines = [line.strip() for line in message.split("[[{{")[0].splitlines() if line.strip()]
    return lines[-1] if lines else message[:200]


def columns_of(answers: Mapping[str, np.ndarray], prefix: str) -> dict[str, pa.Array]:
    """Answers as columns: one value a row, or a list of fixed length."""
    return {f"{prefix}{name}": _column(array) for name, array in answers.items()}


def _column(array: np.ndarray) -> pa.Array:
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    flat = array.reshape(len(array), -1)
    kind = pa.binary() if array.dtype.kind == "O" else None
    if flat.shape[1] == 1:
        return pa.array(flat[:, 0].tolist() if kind else flat[:, 0], kind)
    values = np.ascontiguousarray(flat).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(
        pa.array(values.tolist() if kind else values, kind), flat.shape[1]
    )
