"""The contract of pod life, on the process kubelet; `tests/kubernetes` runs the same tests on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite(
    "tests.contract.place", "tests.contract.pod_life", "tests.contract.pod_ends", "tests.contract.objects"
)

from tests.contract.objects import *  # noqa: E402, F403
from tests.contract.place import Place  # noqa: E402
from tests.contract.pod_ends import *  # noqa: E402, F403
from tests.contract.pod_life import *  # noqa: E402, F403


@pytest.fixture
def place(cluster: Any) -> Iterator[Place]:
    """The process kubelet."""
    place = Place(cluster.core_v1(), "contract", patience=20.0, image="none")
    yield place
    place.clean_up()
