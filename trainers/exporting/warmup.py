"""Warm-up requests, TensorFlow Serving's way: PredictionLog records in assets.extra/tf_serving_warmup_requests.

A server plays them before it calls a version AVAILABLE, so that no user waits for the first run of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.exporting.saved_model import EXAMPLES, SERVING_DEFAULT

if TYPE_CHECKING:
    from trainers.exporting.golden import Golden

__all__ = ["BATCH_SIZES", "FILE", "write_warmup"]

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
BATCH_SIZES = (1, 8, 32)


def write_warmup(
    folder: Path, model_name: str, golden: Golden, *, batch_sizes: Sequence[int] = BATCH_SIZES
) -> int:
    """Write a request a signature and batch size from the golden examples; how many."""
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in batch_sizes:
            rows = golden.repeated(size)
            requests: dict[str, dict[str, Any]] = {
                SERVING_DEFAULT: dict(rows.inputs),
                EXAMPLES: {EXAMPLES: rows.serialized},
            }
            for signature, inputs in requests.items():
                log = prediction_log_pb2.PredictionLog()
                request = log.predict_log.request
                request.model_spec.name = model_name
                request.model_spec.signature_name = signature
                for name, value in inputs.items():
                    request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
                writer.write(log.SerializeToString(deterministic=True))  # the same bytes at every try
                count += 1
    return count
