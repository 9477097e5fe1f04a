"""TF Serving's protocol messages and gRPC stubs, imported without importing TensorFlow.

The stubs of tensorflow-serving-api name `tensorflow.core.*` messages, whose package runs all of TensorFlow
on import (5 s, 700 MB). A stand-in package that only knows where TensorFlow lies on disk makes the same
messages importable in 0.3 s and 40 MB. The stand-in leaves after the import, so that a later
`import tensorflow` in the same process still gets the real one, which then shares these messages.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["light_tensorflow", "seed_tensorflow"]

_seeding = threading.RLock()


def seed_tensorflow() -> types.ModuleType | None:
    """Put the stand-in for the `tensorflow` package in place, and leave it there.

    For a process of our own (the model server) that wants only parts of TensorFlow. Returns the stand-in,
    or None where TensorFlow itself is imported already, which serves as well.
    """
    if "tensorflow" in sys.modules:
        return None
    found = importlib.util.find_spec("tensorflow")
    if found is None or not found.submodule_search_locations:
        raise ImportError("TensorFlow is not installed here; install the packages of requirements.txt")
    standin = types.ModuleType("tensorflow")
    standin.__path__ = list(found.submodule_search_locations)
    standin.__spec__ = found
    sys.modules["tensorflow"] = standin
    return standin


@contextmanager
def light_tensorflow() -> Iterator[None]:
    """Let parts of TensorFlow be imported inside without running the package itself."""
    with _seeding:
        standin = seed_tensorflow()
        try:
            yield
        finally:
            if standin is not None and sys.modules.get("tensorflow") is standin:
                del sys.modules["tensorflow"]


with light_tensorflow():
    from google.protobuf import text_format
    from tensorflow.core.example import example_pb2, feature_pb2
    from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorflow_serving.apis import (
        classification_pb2,
        get_model_metadata_pb2,
        get_model_status_pb2,
        inference_pb2,
        input_pb2,
        model_management_pb2,
        model_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_log_pb2,
        prediction_service_pb2_grpc,
        regression_pb2,
    )
    from tensorflow_serving.config import model_server_config_pb2

__all__ += [
    "classification_pb2",
    "example_pb2",
    "feature_pb2",
    "get_model_metadata_pb2",
    "get_model_status_pb2",
    "inference_pb2",
    "input_pb2",
    "model_management_pb2",
    "model_pb2",
    "model_server_config_pb2",
    "model_service_pb2_grpc",
    "predict_pb2",
    "prediction_log_pb2",
    "prediction_service_pb2_grpc",
    "regression_pb2",
    "tensor_pb2",
    "tensor_shape_pb2",
    "text_format",
    "types_pb2",
]
