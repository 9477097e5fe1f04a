"""Golden examples as arrays, and the comparison of a server's answers with the exporter's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from serving import tensors
from serving.errors import ExportInvalid, VerificationFailed
from serving.release.exported import Golden, GoldenTensor

__all__ = ["compare", "golden_inputs"]

# By TensorFlow's names and by NumPy's; bfloat16 is compared as float32, which holds all its values.
_DTYPES = {
    **{dtype.name: dtype for dtype in tensors.DTYPES.values()},
    **{tensors.dtype_name(enum): dtype for enum, dtype in tensors.DTYPES.items()},
    "bfloat16": np.dtype(np.float32),
}


def _array(name: str, tensor: GoldenTensor) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ExportInvalid(f"golden tensor {name} has an unknown dtype {tensor.dtype!r}")
    try:
        if dtype.kind == "O":
            flat = [item.encode() if isinstance(item, str) else item for item in _flat(tensor.values)]
            array = np.empty(len(flat), object)
            array[:] = flat
            return array.reshape(tensor.shape)
        return np.array(tensor.values, dtype).reshape(tensor.shape)
    except (ValueError, TypeError, OverflowError) as e:
        raise ExportInvalid(
            f"golden tensor {name} does not hold {tensor.dtype} of shape {tensor.shape}: {e}"
        ) from e


def _flat(value: object) -> list:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]


def golden_inputs(golden: Golden) -> dict[str, np.ndarray]:
    """The inputs of a predict call."""
    return {name: _array(name, tensor) for name, tensor in golden.inputs.items()}


def compare(golden: Golden, answers: Mapping[str, np.ndarray], tolerance: float, who: str) -> float:
    """Largest absolute difference of float outputs; raises VerificationFailed where one differs too much.

    Floats may differ by `tolerance`, absolute plus relative; whole numbers and strings must be equal.
    """
    worst = 0.0
    for name, tensor in golden.outputs.items():
        wanted = _array(name, tensor)
        got = answers.get(name)
        if got is None:
            raise VerificationFailed(f"{who} does not answer output {name}, only {sorted(answers)}")
        if got.shape != wanted.shape:
            raise VerificationFailed(f"{who} answers output {name} of shape {got.shape}, not {wanted.shape}")
        if wanted.dtype.kind in "fc":
            wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
            got = got.astype(wide)
            with np.errstate(invalid="ignore"):
                difference = np.abs(got - wanted.astype(wide))
            close = np.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            if difference.size and np.isfinite(difference).any():
                worst = max(worst, float(difference[np.isfinite(difference)].max()))
        else:
            close = got == wanted
        if not np.all(close):
            place = tuple(int(i) for i in np.argwhere(~np.asarray(close))[0])
            raise VerificationFailed(
                f"{who} answers {got[place]!r} for output {name} at {list(place)}, its exporter {wanted[place]!r} "
                f"(tolerance {tolerance:g}); {int(np.size(close) - np.sum(close))} of {np.size(close)} values differ",
                hint="the server runs another model, or its TensorFlow computes otherwise",
            )
    return worst
