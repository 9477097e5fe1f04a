"""Take out of an image's packages what none of its processes uses, and say how much that was.

    python slim.py /opt/venv

What goes: C++ headers for building TensorFlow ops, packages' own tests, and, where there is a `strip`, the symbol
tables of TensorFlow's libraries, which nothing but a debugger reads. Standard library only. Runs in the build stage,
where the result is imported afterwards.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HEADERS = ("tensorflow/include",)
TESTED = ("airflow", "joblib", "mlflow", "numpy", "pandas", "pyarrow", "scipy", "sklearn")
"""Packages whose folders `tests` hold nothing that the package itself imports."""
LIBRARIES = (
    "tensorflow/libtensorflow_cc.so.2",
    "tensorflow/libtensorflow_framework.so.2",
    "tensorflow/python/profiler/internal/_pywrap_profiler_plugin.so",
)


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def unused(packages: Path) -> list[Path]:
    """Folders that can go."""
    found = [packages / name for name in HEADERS]
    for package in TESTED:
        tests = sorted((packages / package).rglob("tests"), key=lambda path: len(path.parts))
        for folder in tests:
            if not any(known in folder.parents for known in found):
                found.append(folder)
    return [folder for folder in found if folder.is_dir()]


def remove(packages: Path) -> int:
    """Remove them; the bytes that it freed."""
    freed = 0
    for folder in unused(packages):
        freed += size(folder)
        shutil.rmtree(folder)
    return freed


def strip(packages: Path, program: str | None) -> int:
    """Strip TensorFlow's libraries; the bytes that it freed. CalledProcessError where `strip` refuses one."""
    freed = 0
    for name in LIBRARIES:
        library = packages / name
        if program is None or not library.is_file():
            continue
        before = size(library)
        subprocess.run([program, "--strip-unneeded", str(library)], check=True)
        freed += before - size(library)
    return freed


def main(argv: Sequence[str]) -> int:
    """Slim the virtual environment of the one argument."""
    if len(argv) != 1:
        print((__doc__ or "").splitlines()[2].strip(), file=sys.stderr)
        return 2
    found = list(Path(argv[0]).glob("lib/python3*/site-packages"))
    if len(found) != 1:
        print(
            f"{argv[0]} must be a virtual environment, got {len(found)} folders of packages", file=sys.stderr
        )
        return 1
    (packages,) = found
    program = shutil.which("strip")
    before = size(packages)
    removed, stripped = remove(packages), strip(packages, program)
    if program is None:
        print("slim: no `strip` here, symbol tables stay")
    print(
        f"slim: {before / 1e6:.0f} MB before; {removed / 1e6:.0f} MB of headers and tests, "
        f"{stripped / 1e6:.0f} MB of symbol tables are gone"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
