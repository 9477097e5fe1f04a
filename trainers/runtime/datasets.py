"""From records to the batches that a training step takes."""

from __future__ import annotations

from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.spec import TrainingJob
from trainers.runtime.context import TrainerContext
from trainers.runtime.module import TrainerModule

__all__ = ["NoRecords", "default_dataset", "make_dataset", "model_features", "open_records"]

CACHE_BYTES = 256 << 20  # a share of records up to this size is parsed once and kept in memory


class NoRecords(ConfigError):
    """The job names no records."""

    code = "runtime.no_records"


def open_records(job: TrainingJob) -> Any:
    """The job's RecordsDataset: `inputs["records"]` is its manifest. None for a job without records.

    Its files' sizes are compared with the manifest, not their checksums: `prepare` did that, and TensorFlow
    checks each record's as it reads.
    """
    uri = job.inputs.get("records")
    if uri is None:
        return None
    from trainers.records.read import Dataset

    return Dataset.open(uri, verify=False)


def model_features(model: Any, records: Any) -> list[str]:
    """The features that go into the model: those its inputs are named by, else all but label and keys.

    Raises ConfigError when the model has an input that the records do not hold.
    """
    known = [feature.name for feature in records.schema if feature.name != records.label]
    inputs = getattr(model, "inputs", None)
    if not inputs:  # a subclassed model or a tf.Module takes what there is
        return [f.name for f in records.schema if f.name in known and f.type not in ("string", "bytes")]
    names = [tensor.name for tensor in inputs]
    missing = sorted(set(names) - set(known))
    if missing:
        raise ConfigError(
            f"the model has inputs {missing} that the records in {records.manifest.folder} do not hold",
            hint=f"name the model's inputs after features: {', '.join(known)}",
        )
    return names


def default_dataset(records: Any, ctx: TrainerContext, features: list[str]) -> Any:
    """Endless shuffled batches of (features, label) of this replica's share of the split "train"."""
    share = sum(shard.bytes for shard in records.manifest.split("train")) // ctx.shard[1]
    data = records.dataset(
        "train",
        ctx.batch_size,
        shuffle=True,
        seed=ctx.shuffle_seed(),
        repeat=True,
        shard=ctx.shard,
        drop_remainder=True,
        cache=share <= CACHE_BYTES,
    )
    label = records.label
    return data.map(lambda batch: ({name: batch[name] for name in features}, batch[label]))


def make_dataset(module: TrainerModule, model: Any, records: Any, ctx: TrainerContext) -> Any:
    """The training data as the trainer module makes it, or the default; a tf.data.Dataset of batches."""
    if module.make_dataset is not None:
        return module.make_dataset(records, ctx)
    if records is None:
        raise NoRecords(
            f"job {ctx.job} has no records and {module.name} makes no dataset",
            hint='set inputs["records"] to a manifest, or write make_dataset(records, ctx)',
        )
    import tensorflow as tf

    # Nothing in it needs AutoGraph, which would take half a second to find that out.
    default = tf.autograph.experimental.do_not_convert(default_dataset)
    return default(records, ctx, model_features(model, records))
