"""Small raw data of every kind, and a `prepare` that keeps what it says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from trainers.records.build import prepare
from trainers.records.manifest import Manifest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture
def pictures(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of class folders of pictures with a pattern of their own."""

    def make(
        count: int = 40,
        classes: tuple[str, ...] = ("0", "1", "2", "3"),
        suffix: str = ".png",
        shape: tuple[int, ...] = (4, 6),
    ) -> Path:
        folder = tmp_path / "pictures"
        rng = np.random.default_rng(7)
        for i in range(count):
            path = folder / classes[i % len(classes)] / f"{i:04d}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
        return folder

    return make


def rows(count: int = 100, first: int = 0) -> pa.Table:
    """A table with an id, numbers, text, a list, some nulls, and a label."""
    index = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(index, pa.int64()),
            "x": pa.array([None if i % 10 == 3 else i / 7 for i in index], pa.float64()),
            "color": pa.array([("red", "green", "blue")[i % 3] for i in index]),
            "tags": pa.array([["a", "b", "c"][: i % 4] for i in index], pa.list_(pa.string())),
            "y": pa.array([i % 2 for i in index], pa.int8()),
        }
    )


@pytest.fixture
def table() -> Callable[..., pa.Table]:
    return rows


@pytest.fixture
def said() -> list[str]:
    """Lines of progress."""
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str]) -> Callable[..., Manifest]:
    """`prepare` into tmp_path/out with a name, a label, and its lines kept in `said`."""

    def call(source: Path, **options: Any) -> Manifest:
        defaults = {"name": "test", "label": "y", "progress": said.append}
        return prepare(source, tmp_path / "out", **{**defaults, **options})

    return call
