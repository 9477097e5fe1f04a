"""What the tests of the REST API share: two models' paths and a call."""

from __future__ import annotations

from typing import Any

HALF = "/v1/models/half_plus_two"
THREE = "/v1/models/half_plus_three"


def predict(rest: Any, body: Any, path: str = f"{HALF}:predict") -> tuple[int, Any]:
    """POST a body to a predict path; the status and the answer."""
    status, answer, _ = rest(path, body)
    return status, answer
