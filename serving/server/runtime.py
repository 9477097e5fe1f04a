"""The parts of TensorFlow that run a SavedModel, and nothing more of it.

Serving needs a session and the SavedModel loader. Importing only these takes 1 s and 400 MB instead of the
6 s and 700 MB of all of TensorFlow with Keras, and they behave the same: ops and kernels are in the shared
library. These modules are TensorFlow's inner ones, so where a release moves them, the public package is
imported instead (slower, same results).
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

from serving.stubs import light_tensorflow

__all__ = ["Runtime", "load_runtime"]

log = logging.getLogger(__name__)
_loading = threading.Lock()
_loaded: Runtime | None = None


@dataclass(frozen=True)
class Runtime:
    """Names that the server takes from TensorFlow."""

    graph: Any
    session: Any
    loader: Any
    op_error: Any
    config_pb2: Any


def load_runtime() -> Runtime:
    """Import what runs SavedModels; the first call takes about 1 s, later ones nothing."""
    global _loaded
    with _loading:
        if _loaded is None:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
            try:
                _loaded = _narrow()
            except ImportError as e:
                log.warning("this tensorflow has its parts elsewhere (%s), importing all of it", e)
                _loaded = _public()
        return _loaded


def _narrow() -> Runtime:
    with light_tensorflow():
        from tensorflow.core.protobuf import config_pb2
        from tensorflow.python.client import session
        from tensorflow.python.framework import errors, ops
        from tensorflow.python.saved_model import loader_impl

        return Runtime(ops.Graph, session.Session, loader_impl.SavedModelLoader, errors.OpError, config_pb2)


class _PublicLoader:
    def __init__(self, path: str) -> None:
        self._path = path

    def load(self, session: Any, tags: list[str]) -> Any:
        import tensorflow as tf

        return tf.compat.v1.saved_model.load(session, tags, self._path)


def _public() -> Runtime:
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2

    return Runtime(tf.Graph, tf.compat.v1.Session, _PublicLoader, tf.errors.OpError, config_pb2)
