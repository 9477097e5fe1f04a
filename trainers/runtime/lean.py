"""Importing TensorFlow without what a replica never uses.

Measured on 2 cores, CPU seconds: `import tensorflow` 5.6 (Keras brings matplotlib, pandas, scikit-learn and
scipy where they are installed), without these 2.8; a server alone 0.8, since parameter servers and workers run
graphs that the chief sends and need nothing of TensorFlow's Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from trainers.lean import import_tensorflow

__all__ = ["import_server", "import_tensorflow"]


def import_server() -> Any:
    """`tensorflow.python.training.server_lib` (Server, ClusterSpec), without the rest of TensorFlow if it can be."""
    name = "tensorflow.python.training.server_lib"
    if "tensorflow" in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
    # A package in whose place nothing was run: its sub-packages are found, its 4,000 modules are not loaded.
    bare = types.ModuleType("tensorflow")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["tensorflow"] = bare
    try:
        return importlib.import_module(name)
    except ImportError:
        # Another release may be laid out in another way: the whole of it will do.
        for module in [m for m in sys.modules if m.partition(".")[0] == "tensorflow"]:
            del sys.modules[module]
        importlib.import_module("tensorflow")
        return importlib.import_module(name)
