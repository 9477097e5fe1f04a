"""How long an export takes to load, in a process that has nothing of it yet; and that it does load there.

A SavedModel can hold what only its maker's process has (a `tf.py_function`, a custom operation that was registered by
hand). A server has none of that, so a process of its own loads the export, answers the golden examples by both
signatures, and compares. It is started early, so that its import of TensorFlow goes on beside the export.

    python -m trainers.exporting.loading < FOLDER      one JSON object, the last line of its output
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainers.job.errors import UserError

__all__ = ["FreshProcess", "NotLoadable", "measure"]

_PATIENCE_S = 900.0  # for models of many gigabytes


class NotLoadable(UserError):
    """The SavedModel can't be loaded, or answers otherwise, in a process other than its maker's."""

    code = "export.not_loadable"


def measure(folder: Path) -> dict[str, float]:
    """Load an export as a model server does: {"load_s", "first_answer_s"}, seconds.

    `load_s` is until both signatures may be called, `first_answer_s` what the golden examples then take, which
    includes what TensorFlow puts off until the first call. Raises SavedModelDiffers when the answers are not those
    of golden.json.
    """
    import numpy as np
    import tensorflow as tf

    from trainers.exporting import golden, package
    from trainers.job.files import read_json

    document = read_json(folder / package.GOLDEN) or {}
    inputs = {name: golden.tensor(value) for name, value in document["inputs"].items()}
    wanted = {name: golden.tensor(value) for name, value in document["outputs"].items()}
    started = time.monotonic()
    loaded = tf.saved_model.load(str(folder))
    function = loaded.signatures[document["signature"]]
    load_s = time.monotonic() - started
    answers = function(**{name: tf.constant(value) for name, value in inputs.items()})
    first_answer_s = time.monotonic() - started - load_s
    found = {name: np.asarray(value) for name, value in answers.items()}
    golden.check_same(wanted, found, "the exporting process and another")
    return {"load_s": round(load_s, 4), "first_answer_s": round(first_answer_s, 4)}


class FreshProcess:
    """A process that loads one export; use as a context, so that it is gone when the export fails."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainers.exporting.loading"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(OSError, ValueError):
            self._process.communicate()

    def measure(self, folder: Path) -> dict[str, float]:
        """What `measure` says in that process; NotLoadable when it can't."""
        try:
            output, _ = self._process.communicate(f"{folder}\n", timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as e:
            raise NotLoadable(f"the SavedModel was not loaded within {_PATIENCE_S:g} s") from e
        said: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            said = json.loads(output.splitlines()[-1])
        if "error" in said or not said:
            why = said.get("error") or f"the process ended with code {self._process.returncode}"
            raise NotLoadable(
                f"the SavedModel does not work in a process of its own: {why}",
                hint="does the model use tf.py_function, a file, or an operation that only training has?",
            )
        return said


def main() -> int:
    """Load the export whose folder comes by standard input."""
    from trainers.lean import import_tensorflow

    logging.basicConfig(level=logging.WARNING)
    import_tensorflow()
    import trainers.exporting.golden  # noqa: F401 - so that no import is measured

    folder = sys.stdin.readline().strip()
    if not folder:
        return 0  # the export failed
    try:
        said: dict[str, Any] = measure(Path(folder))
    except Exception as e:  # noqa: BLE001 - whatever a model raises; the exporter makes an error of it
        said = {"error": f"{type(e).__name__}: {e}"[:1000]}
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
