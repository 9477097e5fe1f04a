"""What becomes of a model's entry when a version is taken out of it again."""

from __future__ import annotations

import pytest

from serving.errors import ReleaseNotFound
from serving.tfserving.config import ModelEntry
from serving.tfserving.entries import deployed, without_version


def entry(*versions, **labels):
    return ModelEntry("m", "/m", versions, labels)


@pytest.mark.parametrize(
    ("now", "was", "left"),
    [
        (entry(8), None, None),
        (entry(8, canary=8), None, None),
        (entry(7, 8, stable=7, canary=7), entry(7, stable=7, canary=7), entry(7, stable=7, canary=7)),
        (entry(7, 8, stable=7, canary=8), entry(6, 7, stable=7, canary=7), entry(6, 7, stable=7, canary=7)),
        (entry(7, 8, stable=7, canary=8), entry(7, 8, stable=7, canary=8), entry(7, stable=7, canary=7)),
        (entry(7, 8, stable=7, canary=8), entry(7, stable=7), entry(7, stable=7)),
        (entry(7, 8, canary=8), entry(7, 8, canary=8), entry(7)),
        (entry(8, canary=8), entry(8, canary=8), None),
        (entry(8, stable=8, canary=8), entry(8, stable=8), entry(8, stable=8, canary=8)),
        (entry(7, 8, stable=7, shadow=8), entry(7, stable=7), entry(7, stable=7)),
        (None, None, None),
    ],
)
def test_a_version_goes_as_if_it_had_never_been_there(now, was, left):
    assert without_version(now, was, 8) == left


def test_what_is_not_deployed_is_named():
    assert deployed(entry(7), "m", [7]) == entry(7)
    with pytest.raises(ReleaseNotFound, match=r"versions \[8\] of m are not deployed; deploy them first"):
        deployed(entry(7), "m", [7, 8])
    with pytest.raises(ReleaseNotFound, match="not deployed"):
        deployed(None, "m", [])
