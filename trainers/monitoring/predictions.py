# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""A model's answers as features, so that their distribution is compared as that of the inputs.

    one number or text a row        as it is                    "prediction: classes"
    several numbers a row           the greatest of them        "prediction: max of probabilities"

What they were on held-out records is found once a version, by asking its SavedModel, and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainers.job.files import read_json, write_json
from trainers.records.manifest import Manifest
from trainers.records.schema import Feature, Schema
from trainers.records.statistics import Statistics
from trainers.released import Released

__all__ = ["Answers", "baseline"]

log = logging.getLogger(__name__)

_MOST_ROWS = 20_000
_BATCH = 512
_TYPES = {"string": "string", "bool": "int64"}
_ARROW = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.string()}


class Answers:
    """Statistics of a version's answers; `add` takes tensors by name, as messages or arrays."""

    def __init__(self, schema: Schema, of: Mapping[str, str]) -> None:
        self.schema = schema
        self.statistics = Statistics(schema)
        self._of = of  # feature -> output

    @classmethod
    def of(cls, released: Released) -> Answers | None:
        """Of the outputs of serving_default; None when there is none that can be compared."""
        features, of = [], {}
        for name, spec in sorted(released.outputs().items()):
            found = _feature(name, spec)
            if found is not None:
                features.append(found)
                of[found.name] = name
        return cls(Schema(tuple(features)), of) if features else None

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Take in the answers to one request; those that are no arrays of rows are left out."""
        import tensorflow as tf

        for feature in self.schema:
            value = outputs.get(self._of[feature.name])
            if value is None:
                continue
            array = value if isinstance(value, np.ndarray) else tf.make_ndarray(value)
            if array.ndim and len(array):
                self.statistics.features[feature.name].add(_values(array, feature))


def _feature(name: str, spec: Mapping[str, Any]) -> Feature | None:
    shape, dtype = spec.get("shape"), str(spec.get("dtype"))
    if not shape:
        return None
    single = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
    number = dtype.startswith(("float", "double", "half", "bfloat"))
    if not single and not number:
        return None
    kind = "float32" if number else _TYPES.get(dtype, "int64")
    return Feature(f"prediction: {name if single else f'max of {name}'}", kind, presence="optional")


def _values(array: np.ndarray, feature: Feature) -> pa.Array:
    rows = array.reshape(len(array), -1)
    if feature.type == "string":
        return pa.array([bytes(v).decode("utf-8", "replace") for v in rows[:, 0]], pa.string())
    one = rows.max(axis=1) if rows.shape[1] > 1 else rows[:, 0]
    return pa.array(one.astype(np.float32 if feature.type == "float32" else np.int64), _ARROW[feature.type])


def baseline(released: Released, manifest: Manifest, path: Path) -> Answers | None:
    """What a version answers to the held-out records of its dataset; kept at `path`. None when it can't be asked."""
    found = Answers.of(released)
    if found is None:
        return None
    kept = read_json(path)
    if kept and kept.get("release") == released.digest and kept.get("records") == manifest.digest:
        found.statistics.merge(kept["states"])
        return found
    try:
        _ask(released, manifest, found)
    except Exception as e:  # noqa: BLE001 - the model is a program of anybody's: without it, inputs are compared
        log.warning("version %s can't be asked for its answers to held-out records: %s", released.version, e)
        return None
    state = {"release": released.digest, "records": manifest.digest, "states": found.statistics.state()}
    write_json(path, state)
    return found


def _ask(released: Released, manifest: Manifest, answers: Answers) -> None:
    import tensorflow as tf

    from trainers.records.read import RecordsDataset
    from trainers.task import dense

    records = RecordsDataset(manifest, manifest.schema())
    split = "eval" if records.count("eval") else "train"
    loaded = tf.saved_model.load(str(released.path))
    signature = loaded.signatures["serving_default"]
    wanted = signature.structured_input_signature[1]
    rows = 0
    for batch in records.dataset(split, _BATCH):
        inputs = {
            name: tf.cast(dense(batch[name]), spec.dtype) if spec.dtype != tf.string else dense(batch[name])
            for name, spec in wanted.items()
        }
        answers.add({name: value.numpy() for name, value in signature(**inputs).items()})
        rows += _BATCH
        if rows >= _MOST_ROWS:
            break
