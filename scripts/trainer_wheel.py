"""The trainer package as a wheel: `trainers` alone, without dependencies; see scripts/trainer-wheel."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "trainyard-trainer"
version = "{version}"
description = "What a pod of Trainyard runs: the launcher, and the trainers where their libraries are installed."
requires-python = ">=3.10"
license = "Apache-2.0"

[tool.setuptools.packages.find]
include = ["trainers*"]
"""


def build(folder: Path) -> Path:
    """Build the wheel into `folder`; its path."""
    from setuptools import build_meta

    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as temp:
        shutil.copytree(
            ROOT / "trainers", Path(temp) / "trainers", ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
        (Path(temp) / "pyproject.toml").write_text(PROJECT.format(version=found[1]))
        os.chdir(temp)  # the backend builds what is here
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                name = build_meta.build_wheel(str(folder))
        finally:
            os.chdir(before)
    return folder / name


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
