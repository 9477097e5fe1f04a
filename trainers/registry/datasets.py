"""A run's dataset inputs: which records it was trained and evaluated on, by digest, with source, schema and sizes."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainers.job.errors import TrainyardError

if TYPE_CHECKING:
    from mlflow.entities import Dataset, DatasetInput

    from trainers.records.manifest import Manifest

__all__ = ["dataset_inputs"]

_DIGEST_LENGTH = 36  # MLflow holds no more of a dataset's digest
_LONGEST_SCHEMA = 1_000_000  # bytes: MLflow takes 1 MiB
_CONTEXTS = {"train": "training", "eval": "evaluation"}
_DTYPES = {"string": "object", "bytes": "object"}


def dataset_inputs(records: Manifest) -> dict[str, DatasetInput]:
    """An input a split that has rows, by its context in MLflow: "training" and "evaluation".

    The training data has the digest of the whole dataset, so that it is found by what everything else calls it; what
    it was evaluated on has the digest of its shards.
    """
    from mlflow.entities import DatasetInput, InputTag

    found = {}
    for split, context in _CONTEXTS.items():
        if records.counts.get(split):
            tags = [InputTag("mlflow.data.context", context)]
            found[context] = DatasetInput(_dataset(records, split), tags)
    return found


def _dataset(records: Manifest, split: str) -> Dataset:
    from mlflow.entities import Dataset

    path = str(records.path)
    scheme = path.partition("://")[0] if "://" in path else "local"
    source = {
        "uri": path,
        "split": split,
        "digest": records.digest,
        "raw": dict(records.raw) or {"uri": list(records.sources)},
    }
    profile: dict[str, Any] = {"num_rows": records.counts[split], "splits": dict(records.counts)}
    profile["bytes"] = sum(shard.bytes for shard in records.split(split))
    profile["quarantined"] = records.quarantined
    return Dataset(
        name=records.name if split == "train" else f"{records.name}.{split}",
        digest=(records.digest if split == "train" else _digest(records, split))[:_DIGEST_LENGTH],
        source_type="local" if scheme == "file" else scheme,
        source=json.dumps(source),
        schema=_schema(records),
        profile=json.dumps(profile),
    )


def _digest(records: Manifest, split: str) -> str:
    lines = "".join(f"{shard.file} {shard.sha256}\n" for shard in records.split(split))
    return hashlib.sha256((records.schema_digest + lines).encode()).hexdigest()


def _schema(records: Manifest) -> str | None:
    """The records' features as MLflow's schema of tensors; None where it is not there or too long."""
    try:
        features = list(records.schema())
    except TrainyardError:
        return None
    sides: dict[str, list[dict[str, Any]]] = {"features": [], "targets": []}
    for feature in features:
        shape = [-1, *(-1 if size is None else size for size in feature.shape)]
        spec = {"dtype": _DTYPES.get(feature.type, feature.type), "shape": shape}
        side = "targets" if feature.name == records.label else "features"
        sides[side].append({"name": feature.name, "type": "tensor", "tensor-spec": spec})
    text = json.dumps(
        {"mlflow_tensorspec": {side: json.dumps(specs) if specs else None for side, specs in sides.items()}}
    )
    return text if len(text) <= _LONGEST_SCHEMA else None
