"""Make the environment of tfx-bsl and Beam, apart from ours, and print its Python: benchmarks/peers/make_tfx.py.

It goes into a cache folder ($XDG_CACHE_HOME/trainyard, else ~/.cache/trainyard), about 2 GB, and is kept. tfx-bsl
has wheels for Python 3.10 and 3.11.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements-tfx.txt")
VERSIONS = ((3, 11), (3, 10))


def python_for() -> str | None:
    """A Python that tfx-bsl has wheels for."""
    if sys.version_info[:2] in VERSIONS:
        return sys.executable
    return next((found for a, b in VERSIONS if (found := shutil.which(f"python{a}.{b}"))), None)


def make() -> tuple[Path | None, str]:
    """The environment's Python, or None and what stood in the way."""
    base = python_for()
    if base is None:
        return None, "needs Python 3.10 or 3.11, and neither is here"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    folder = cache / f"tfx-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / ".made").exists():
        return python, ""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [base, "-m", "venv", "--clear", str(folder)], check=True, capture_output=True, text=True
        )
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*install, "-r", str(REQUIREMENTS)], check=True, capture_output=True, text=True, timeout=900
        )
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", "") or str(e)
        return (
            None,
            f"could not be installed: {said.strip().splitlines()[-1] if said.strip() else type(e).__name__}",
        )
    (folder / ".made").touch()
    return python, ""


if __name__ == "__main__":
    made, problem = make()
    print(made or problem)
    sys.exit(0 if made else 1)
