"""Environments of peers that can't live in Trainyard's, in a cache folder ($XDG_CACHE_HOME, else ~/.cache)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["make"]


def make(name: str, requirements: Path, versions: Sequence[tuple[int, int]]) -> tuple[Path | None, str]:
    """The Python of an environment with these requirements, made where it is not there yet; or None and why not."""
    base = _python_of(versions)
    if base is None:
        wanted = " or ".join(f"{a}.{b}" for a, b in versions)
        return None, f"needs Python {wanted}, which is not here"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    folder = cache / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / ".made").exists():
        return python, ""
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _run([base, "-m", "venv", "--clear", str(folder)])
        _run([*install, "-r", str(requirements)])
    except (OSError, subprocess.SubprocessError) as e:
        said = (getattr(e, "stderr", "") or str(e)).strip()
        return None, f"could not be installed: {said.splitlines()[-1] if said else type(e).__name__}"
    (folder / ".made").touch()
    return python, ""


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)


def _python_of(versions: Sequence[tuple[int, int]]) -> str | None:
    if sys.version_info[:2] in versions:
        return sys.executable
    return next((found for a, b in versions if (found := shutil.which(f"python{a}.{b}"))), None)
