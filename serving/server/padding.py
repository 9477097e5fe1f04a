"""Arrays of unequal shapes made alike, as TF Serving's pad_variable_length_inputs does before it batches them."""

from __future__ import annotations

import numpy as np

__all__ = ["padded_alike"]


def padded_alike(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The arrays, each filled up with its own first element to the largest size in every dimension but the first.

    For example shapes [1, 500], [2, 300] become [1, 500], [2, 500]. All must have one rank.
    """
    if len({array.shape[1:] for array in arrays}) == 1:
        return arrays
    widest = tuple(map(max, zip(*(array.shape[1:] for array in arrays), strict=True)))
    return tuple(_padded(array, widest) for array in arrays)


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape[1:] == shape:
        return array
    first = array.flat[0] if array.size else np.zeros((), array.dtype)[()]
    if array.dtype == object and not array.size:
        first = b""
    padded = np.full((array.shape[0], *shape), first, array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded
