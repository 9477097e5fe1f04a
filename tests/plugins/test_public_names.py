"""The package's face: what it says is what there is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trainyard


def test_all_is_what_is_visible() -> None:
    assert sorted(trainyard.__all__) == trainyard.__all__ == dir(trainyard)
    assert set(trainyard.__all__) == set(trainyard._HOMES)
    for name in trainyard.__all__:
        assert getattr(trainyard, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="wrong"):
        trainyard.wrong  # noqa: B018


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, trainyard; print([m for m in sys.modules if m.split('.')[0] in ('airflow', 'trainers')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
