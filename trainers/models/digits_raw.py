"""Raw data of the digits example: scikit-learn's 1,797 real handwritten digits as PNG files.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository
(1998); scikit-learn bundles the test part of it, so nothing is fetched.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FILES", "write_raw"]

FILES = 1797
_DONE = ".complete.json"


def write_raw(folder: str | Path, *, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Write the digits to `folder`/<label>/<nnnn>.png and return {"source": folder, "files": 1797}.

    Pictures are 8 x 8 pixels, 8-bit grayscale, 0 to 16 scaled to 0 to 255. A folder that is there and whole
    stays as it is; otherwise everything is written beside it and moved into place in one rename.
    """
    folder = Path(folder)
    if _is_complete(folder):
        progress(f"{folder} already holds {FILES} digits")
        return {"source": str(folder), "files": FILES}
    temp = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write(temp)
        _move(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    progress(f"wrote {FILES} digits to {folder}")
    return {"source": str(folder), "files": FILES}


def _write(folder: Path) -> None:
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for label in sorted(set(digits.target.tolist())):
        (folder / str(label)).mkdir(parents=True)
    for i, (image, label) in enumerate(zip(pixels, digits.target.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{i:04d}.png")
    # Hidden, so no reader takes it for data; it says that the folder is ours and was whole.
    (folder / _DONE).write_text(json.dumps({"files": FILES}) + "\n")


def _is_complete(folder: Path) -> bool:
    return (folder / _DONE).is_file() and sum(1 for _ in folder.glob("*/*.png")) == FILES


def _move(temp: Path, folder: Path) -> None:
    """Put `temp` in the place of `folder`; of two who do so at once, either is right: both hold the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not _is_complete(folder):
        if not (folder / _DONE).exists() and any(folder.iterdir()):
            raise FileExistsError(
                f"{folder} holds files that aren't ours; name a folder that is new or empty"
            )
        # Ours, but with files missing: out of the way in one step, so that nobody sees a mix.
        old = temp.with_name(temp.name + ".old")
        folder.rename(old)
        shutil.rmtree(old)
    try:
        temp.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise
