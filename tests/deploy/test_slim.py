"""deploy/docker/slim.py: what goes from an image's packages, and what stays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.compose_file import ROOT


@pytest.fixture(scope="module")
def slim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slim", ROOT / "deploy" / "docker" / "slim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A virtual environment with one of each; its folder of packages."""
    found = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    for name in (
        "tensorflow/include/a/b.h",
        "tensorflow/python/tests/kept.py",
        "pandas/tests/io/tests/x.py",
        "scipy/special/tests/x.py",
        "scipy/special/core.py",
        "own/tests/kept.py",
    ):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(b"x" * 1000)
    return found


def test_headers_and_tests_of_known_packages_go_and_all_else_stays(
    slim: ModuleType, packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert slim.main([str(packages.parents[2])]) == 0
    left = {path.relative_to(packages).as_posix() for path in packages.rglob("*.*") if path.is_file()}
    assert left == {"tensorflow/python/tests/kept.py", "scipy/special/core.py", "own/tests/kept.py"}
    assert "no `strip` here" in capsys.readouterr().out
    assert slim.remove(packages) == 0, "once more finds nothing"


def test_libraries_are_stripped_by_the_program_that_is_there_and_a_refusal_ends_the_build(
    slim: ModuleType, packages: Path, tmp_path: Path
) -> None:
    library = packages / slim.LIBRARIES[0]
    library.write_bytes(b"x" * 5000)
    program = tmp_path / "strip"
    program.write_text('#!/bin/sh\n[ "$1" = --strip-unneeded ] && printf short > "$2"\n')
    program.chmod(0o755)
    assert slim.strip(packages, str(program)) == 5000 - len("short")
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(slim.subprocess.CalledProcessError):
        slim.strip(packages, str(program))


def test_another_folder_is_refused(
    slim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slim.main([str(tmp_path)]) == 1
    assert "must be a virtual environment" in capsys.readouterr().err
    assert slim.main([]) == 2


def test_nothing_that_goes_is_imported_here(slim: ModuleType) -> None:
    """This environment has what the images have: none of its loaded modules lies where slim.py removes."""
    import numpy.testing
    import sklearn.datasets  # noqa: F401

    packages = Path(numpy.__file__).parents[1]
    gone = slim.unused(packages)
    assert gone != []
    loaded = {Path(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    assert [path for path in loaded if any(folder in path.parents for folder in gone)] == []
