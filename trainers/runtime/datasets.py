"""From records to the batches that a training step takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainers.job.errors import ConfigError, DataError
from trainers.job.spec import TrainingJob
from trainers.records.masks import mask_name, masks_among
from trainers.runtime.context import TrainerContext
from trainers.runtime.heartbeat import Progress
from trainers.runtime.module import TrainerModule

__all__ = [
    "NoData",
    "NoRecords",
    "UnusableDataset",
    "check_dataset",
    "default_dataset",
    "explain_end",
    "make_dataset",
    "model_features",
    "open_records",
]

CACHE_BYTES = 256 << 20  # a share of records up to this size is parsed once and kept in memory


_TOO_SHORT = (
    "end make_dataset with .repeat(), or ask for fewer steps; a batch that is larger than the data and "
    "drop_remainder leave nothing"
)


class UnusableDataset(ConfigError):
    """The trainer module's `make_dataset` gave something that the loop can't train on."""

    code = "runtime.unusable_dataset"


class NoData(DataError):
    """There are no more batches, and the job wants more steps."""

    code = "runtime.no_data"


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


class _Named(NamedTuple):
    name: str


def model_features(model: Any, records: Any) -> list[str]:
    """The features that go into the model: those its inputs are named by, else all but label and keys.

    A subclassed model or a tf.Module, which has no named inputs, may say them in its attribute `features`; text goes
    into one that does, and not into one that takes what there is.

    An input may be the mask of a feature, `km_missing` of `km`; see trainers.records.masks. Raises ConfigError when
    the model has an input that the records do not hold.
    """
    known = [feature.name for feature in records.schema if feature.name != records.label]
    inputs = getattr(model, "inputs", None)
    named = getattr(model, "features", None)
    if not inputs and isinstance(named, (list, tuple)) and named:
        inputs = [_Named(str(name)) for name in named]
    if not inputs:  # a subclassed model or a tf.Module takes what there is
        return [f.name for f in records.schema if f.name in known and f.type not in ("string", "bytes")]
    names = [tensor.name for tensor in inputs]
    masks = {mask_name(name) for name in masks_among(records.schema, names)}
    missing = sorted(set(names) - set(known) - masks)
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
        # After a restart, what would have come next; without a seed, and for asynchronous workers, any order does.
        start=0 if ctx.seed is None or ctx.draws_seeds else ctx.start_step * ctx.devices,
        masks=masks_among(records.schema, features),
    )
    label = records.label
    return data.map(lambda batch: ({name: batch[name] for name in features}, batch[label]))


def make_dataset(module: TrainerModule, model: Any, records: Any, ctx: TrainerContext) -> Any:
    """The training data as the trainer module makes it, or the default; a tf.data.Dataset of batches.

    Raises NoRecords when there is neither, UnusableDataset for one that can't be trained on.
    """
    if module.make_dataset is not None:
        made = module.make_dataset(records, ctx)
        check_dataset(made, f"make_dataset of {module.name}")
        return made
    if records is None:
        raise NoRecords(
            f"job {ctx.job} has no records and {module.name} makes no dataset",
            hint='set inputs["records"] to a manifest, or write make_dataset(records, ctx)',
        )
    import tensorflow as tf

    # Nothing in it needs AutoGraph, which would take half a second to find that out.
    default = tf.autograph.experimental.do_not_convert(default_dataset)
    return default(records, ctx, model_features(model, records))


def check_dataset(data: Any, what: str) -> None:
    """Raise UnusableDataset unless it is a dataset of (features, label) or (features, label, weight) in batches."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        raise UnusableDataset(
            f"{what} must return a tf.data.Dataset, got {type(data).__name__}",
            hint="tf.data.Dataset.from_generator or from_tensor_slices makes one",
        )
    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        got = f"a tuple of {len(spec)}" if isinstance(spec, tuple) else type(spec).__name__
        raise UnusableDataset(
            f"{what} must give batches of (features, label) or (features, label, weight), got {got}",
            hint="map each batch to such a tuple",
        )
    flat = [x for x in tf.nest.flatten(spec) if isinstance(x, tf.TensorSpec)]
    scalars = [x for x in flat if x.shape.rank == 0]
    if scalars:
        raise UnusableDataset(
            f"{what} must give batches, got single examples ({scalars[0].dtype.name} without a dimension)",
            hint="end it with .batch(ctx.batch_size, drop_remainder=True)",
        )
    # Not in a graph, where a worker makes its own; the chief has looked before.
    if tf.executing_eagerly() and int(data.cardinality()) == 0:
        raise NoData(f"{what} gave a dataset without a batch", hint=_TOO_SHORT)


def explain_end(error: Exception, module: TrainerModule, progress: Progress) -> None:
    """Raise NoData when the loop failed because the training data came to its end."""
    import tensorflow as tf

    if not isinstance(error, tf.errors.OutOfRangeError) or "End of sequence" not in str(error):
        return
    raise NoData(
        f"the training data of {module.name} ended before step {progress.target} of the job (after step "
        f"{progress.step})",
        hint=_TOO_SHORT,
    ) from error
