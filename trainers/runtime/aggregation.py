"""Gradients of several workers, gathered on the parameter servers until a step has enough of them.

For each variable a conditional accumulator lies on the variable's own server, as in SyncReplicasOptimizer (Chen et
al. 2016, "Revisiting distributed synchronous SGD"): it takes gradients that are stamped with the present turn, and
drops those of an earlier one. Small variables of a server share one accumulator, since a transfer costs more than
they do. Sparse gradients (IndexedSlices) travel as they are and are added up densely on the server: TensorFlow's
sparse accumulator would divide each row by how often it came, which is no mean over workers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from trainers.runtime.steps import plain_variable

__all__ = ["Gradients"]

_SMALL_BYTES = 64 << 10  # variables up to this size travel together


@dataclasses.dataclass
class _Pack:
    """Variables that share an accumulator, by their numbers; `sizes` are numbers of elements."""

    device: str
    dtype: Any
    numbers: list[int]
    sizes: list[int]
    accumulator: Any = None


class Gradients:
    """Accumulators for the gradients of `parts`; `life` makes their names unique on servers that live longer.

    `push` is traced in a worker's function, `take` in the function that applies them, and after the first `push`:
    only then is it known which variables have gradients.
    """

    def __init__(self, parts: Sequence[Any], life: str) -> None:
        import tensorflow as tf

        self._variables = [plain_variable(part) for part in parts]
        self._present: list[bool] | None = None
        self._packs: list[_Pack] = []
        shared: dict[tuple[str, Any], _Pack] = {}
        for number, variable in enumerate(self._variables):
            size = math.prod(variable.shape)
            place = (variable.device, variable.dtype)
            pack = shared.get(place)
            if size * variable.dtype.size > _SMALL_BYTES or pack is None:
                pack = _Pack(*place, [], [])
                self._packs.append(pack)
                if size * variable.dtype.size <= _SMALL_BYTES:
                    shared[place] = pack
            pack.numbers.append(number)
            pack.sizes.append(size)
        for number, pack in enumerate(self._packs):
            with tf.device(pack.device):
                pack.accumulator = tf.compat.v1.ConditionalAccumulator(
                    pack.dtype, [sum(pack.sizes)], shared_name=f"{life}-gradients-{number}"
                )

    def push(self, gradients: Sequence[Any], stamp: Any) -> list[Any]:
        """Give a worker's gradients for the turn `stamp`, a scalar int64; the operations that do it."""
        import tensorflow as tf

        self._present = [gradient is not None for gradient in gradients]
        done = []
        for pack in self._packs:
            mine = [gradients[number] for number in pack.numbers]
            if all(gradient is None for gradient in mine):
                continue
            flat = []
            for gradient, size in zip(mine, pack.sizes, strict=True):
                if gradient is None:
                    flat.append(tf.zeros([size], pack.dtype))
                elif isinstance(gradient, tf.IndexedSlices):
                    with tf.device(pack.device):
                        flat.append(tf.reshape(tf.convert_to_tensor(gradient), [-1]))
                else:
                    flat.append(tf.reshape(gradient, [-1]))
            whole = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
            with tf.device(pack.device):
                done.append(pack.accumulator.apply_grad(whole, local_step=stamp))
        return done

    def take(self, count: int) -> list[Any]:
        """The mean of the first `count` gradients of this turn, for each variable; None where it has none.

        Waits for them. All are there before any can be used: no worker may see a mixture of two turns' weights
        and have its gradient taken for good.
        """
        import tensorflow as tf

        assert self._present is not None, "take must be traced after push"
        packs = [pack for pack in self._packs if any(self._present[number] for number in pack.numbers)]
        taken = []
        for pack in packs:
            with tf.device(pack.device):
                taken.append(pack.accumulator.take_grad(count))
        means: list[Any] = [None] * len(self._variables)
        with tf.control_dependencies(taken):
            for pack, mean in zip(packs, taken, strict=True):
                with tf.device(pack.device):
                    pieces = [tf.identity(mean)] if len(pack.sizes) == 1 else tf.split(mean, pack.sizes)
                    for number, piece in zip(pack.numbers, pieces, strict=True):
                        if self._present[number]:
                            means[number] = tf.reshape(piece, self._variables[number].shape)
        return means
