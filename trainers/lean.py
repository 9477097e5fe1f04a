"""Importing heavy libraries for less.

Keras imports scikit-learn, matplotlib and pandas wherever they are installed, for wrappers and plots that
training never calls, and Python's garbage collector walks the growing heap again and again meanwhile. Without
both, importing TensorFlow 2.21 with Keras 3.15 costs about 3.2 s of CPU instead of 5.9 s, and a pipeline does
it in every process. Both libraries work without those modules, as they must where these are not installed; code
that imports them later gets them as ever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["import_tensorflow", "without"]

_OPTIONAL_TO_KERAS = ("sklearn", "matplotlib", "pandas")


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Imports inside find no module of these names, unless it is there already, and collect no garbage.

    For the start of a process: imports of other threads see the same while it lasts.
    """
    hidden = [name for name in names if name not in sys.modules]
    collecting = gc.isenabled()
    gc.disable()
    # None in sys.modules is Python's own way to say "not to be imported": it raises ModuleNotFoundError.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name, ...) is None:
                del sys.modules[name]
        if collecting:
            gc.enable()


def import_tensorflow() -> ModuleType:
    """TensorFlow, with its chatter off and, on a machine without a GPU, its search for one.

    Call it before anything else imports TensorFlow or Keras. What the environment says wins.
    """
    if "tensorflow" in sys.modules:
        return sys.modules["tensorflow"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    with without(*_OPTIONAL_TO_KERAS):
        import keras  # noqa: F401 - the point of this function is to import it here
        import tensorflow as tf
    gc.freeze()  # a million objects that live as long as the process need no looking at
    return tf
