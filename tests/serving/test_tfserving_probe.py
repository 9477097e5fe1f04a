from __future__ import annotations

import numpy as np
import pytest

from serving.errors import ExportInvalid, VerificationFailed
from serving.release.exported import Golden, GoldenTensor
from serving.tfserving.probe import compare


def _golden(**outputs):
    return Golden("", {"x": GoldenTensor("float32", (1,), [0.0])}, outputs, 1e-3)


def test_compare_floats_within_and_the_rest_exactly():
    golden = _golden(
        p=GoldenTensor("float32", (3,), [1.0, float("nan"), 1e3]),
        c=GoldenTensor("int64", (2,), [1, 2]),
        s=GoldenTensor("string", (2,), [b"a", "b"]),
        b=GoldenTensor("bfloat16", (1,), [0.5]),
    )
    good = {
        "p": np.float32([1.0005, np.nan, 1000.5]),
        "c": np.int64([1, 2]),
        "s": np.array([b"a", b"b"], object),
        "b": np.float32([0.5]),
        "more": np.zeros(1),
    }
    assert compare(golden, good, 1e-3, "it") == pytest.approx(0.5)
    for name, value, message in (
        ("p", np.float32([1.1, np.nan, 1e3]), r"for output p at \[0\].*1 of 3 values differ"),
        ("p", np.float32([1.0, 0.0, 1e3]), r"at \[1\]"),
        ("c", np.int64([1, 3]), r"output c at \[1\]"),
        ("s", np.array([b"a", b"c"], object), "output s"),
        ("c", np.int64([[1, 2]]), r"of shape \(1, 2\), not \(2,\)"),
    ):
        with pytest.raises(VerificationFailed, match=message):
            compare(golden, {**good, name: value}, 1e-3, "it")
    del good["c"]
    with pytest.raises(VerificationFailed, match="does not answer output c"):
        compare(golden, good, 1e-3, "it")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (GoldenTensor("quaternion", (1,), [1]), "unknown dtype"),
        (GoldenTensor("uint8", (1,), [300]), "does not hold"),
        (GoldenTensor("float32", (2,), [1.0]), "does not hold"),
        (GoldenTensor("string", (2,), [b"x"]), "does not hold"),
    ],
)
def test_golden_values_that_are_no_tensor_are_told(tensor, message):
    with pytest.raises(ExportInvalid, match=message):
        compare(_golden(y=tensor), {}, 1e-3, "it")
