"""A trained model as a SavedModel with two signatures, the way from bytes to tensors inside the graph.

    serving_default   the model's features by name (digits: image uint8 [batch, 8, 8, 1])
    examples          serialised tf.train.Example, parsed and decoded as in training; the label may be missing

Both end in the same answers (see trainers.task), so that training and serving can't drift apart.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.records.masks import masks_among
from trainers.task import Task, call

if TYPE_CHECKING:
    import tensorflow as tf

    from trainers.records.read import RecordsDataset

__all__ = ["EXAMPLES", "SERVING_DEFAULT", "signatures_of", "write_saved_model"]

SERVING_DEFAULT = "serving_default"
EXAMPLES = "examples"


def write_saved_model(
    folder: Path, model: Any, names: Sequence[str], task: Task, records: RecordsDataset
) -> None:
    """Write the SavedModel of `model`, which takes the features `names` of `records`, into `folder`."""
    import keras
    import tensorflow as tf

    records = records.with_masks(masks_among(records.schema, names))
    wanted = {*names, *records.masks}
    parsing = {name: spec for name, spec in records.feature_spec().items() if name in wanted}

    def by_name(features: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        return task.answers(call(model, features))

    def by_example(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return by_name(records.decode(tf.io.parse_example(examples, parsing)))

    decoded = tf.function(lambda e: records.decode(tf.io.parse_example(e, parsing))).get_concrete_function(
        tf.TensorSpec([None], tf.string)
    )
    inputs = {name: _spec(name, decoded.structured_outputs[name]) for name in names}
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(SERVING_DEFAULT, by_name, input_signature=[inputs])
    archive.add_endpoint(
        EXAMPLES, by_example, input_signature=[tf.TensorSpec([None], tf.string, name=EXAMPLES)]
    )
    archive.write_out(str(folder), verbose=False)
    _settle_fingerprint(folder / "fingerprint.pb")


def _settle_fingerprint(path: Path) -> None:
    """Derive TensorFlow's random UUID of a SavedModel from its checksums, so that equal models are equal bytes."""
    from tensorflow.core.protobuf import fingerprint_pb2

    if not path.exists():
        return
    found = fingerprint_pb2.FingerprintDef.FromString(path.read_bytes())
    found.uuid = ""
    found.uuid = str(uuid.uuid5(uuid.NAMESPACE_OID, found.SerializeToString(deterministic=True).hex()))
    path.write_bytes(found.SerializeToString(deterministic=True))


def _spec(name: str, decoded: Any) -> tf.TensorSpec:
    import tensorflow as tf

    shape = [None, *decoded.shape[1:]]
    return tf.TensorSpec(shape, decoded.dtype, name=name)


def signatures_of(loaded: Any) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """{signature: {"inputs": {name: {"dtype", "shape"}}, "outputs": ...}} of a loaded SavedModel; null is any."""

    def described(specs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {
            name: {"dtype": spec.dtype.name, "shape": None if spec.shape.rank is None else list(spec.shape)}
            for name, spec in sorted(specs.items())
        }

    return {
        name: {
            "inputs": described(function.structured_input_signature[1]),
            "outputs": described(function.structured_outputs),
        }
        for name, function in sorted(loaded.signatures.items())
        if name in (SERVING_DEFAULT, EXAMPLES)
    }
