"""JSON values of every kind, as a hypothesis strategy for requests that nobody means."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["json_values"]


def json_values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Any JSON value, nested, whose objects have `keys`; numbers beyond 64 bits, NaN and base64 objects too."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 70), 1 << 70)
        | st.floats()
        | st.text(max_size=5)
        | st.fixed_dictionaries({"b64": st.text(max_size=6)})
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=12,
    )
