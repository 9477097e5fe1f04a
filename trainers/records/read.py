"""Records to tensors: batches first, parsing after.

    records = Dataset.open("storage/records/digits/048e887bcff6fa9c/manifest.json")
    for batch in records.dataset("train", 128, shuffle=True, seed=1):
        batch["image"], batch["label"]          # uint8 [128, 8, 8, 1], int64 [128]

Parsing is what reading costs, and it is cheap by the batch: `parse_example` on 1,024 records is ten times as
fast as on each of them. TensorFlow is imported when tensors are asked for, not before.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.records.errors import DatasetCorrupt, InvalidOption
from trainers.records.evolution import BREAKING, SchemaBreaks, compare, stored_as, widen
from trainers.records.frames import find_damage
from trainers.records.manifest import SPLITS, Manifest, Shard
from trainers.records.schema import MISSING_VALUES, Feature, Schema

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Dataset", "RecordsDataset"]

_CHECKSUM_UP_TO = 256 << 20  # bytes whose checksums are compared without being asked: a quarter of a second
_SHUFFLE_RECORDS = 65_536
_SHUFFLE_BYTES = 256 << 20
_INTERLEAVED = 8  # files read by turns when shuffling


class RecordsDataset:
    """A dataset that `prepare` published."""

    def __init__(self, manifest: Manifest, schema: Schema, stored: Schema | None = None) -> None:
        """`schema` is what tensors are wanted as, `stored` what the records hold, where that is another."""
        self.manifest = manifest
        self.schema = schema
        self.stored = schema if stored is None else stored

    @classmethod
    def open(
        cls, manifest: str | Path, *, verify: bool | None = None, schema: Schema | str | Path | None = None
    ) -> RecordsDataset:
        """Open a dataset by the path or file:// URI of its manifest or folder.

        The shards' sizes are always compared with the manifest, since TensorFlow does not notice a file that
        was cut between two records. `verify` says whether checksums are too; by default they are for datasets
        of up to 256 MB. With a newer `schema` (or its file's path) an older dataset is read as that has it,
        defaults filled in; see records.evolution. Raises DatasetMissing, DatasetCorrupt or SchemaBreaks.
        """
        found = Manifest.load(manifest)
        if verify is None:
            verify = sum(shard.bytes for shard in found.shards) <= _CHECKSUM_UP_TO
        found.verify(checksums=verify)
        stored = found.schema()
        if schema is None:
            return cls(found, stored)
        newer = schema if isinstance(schema, Schema) else Schema.load(schema)
        evolution = compare(stored, newer)
        if evolution.verdict == BREAKING:
            raise SchemaBreaks(evolution)
        return cls(found, newer, stored)

    @property
    def label(self) -> str:
        """The name of the label feature."""
        return self.manifest.label

    def count(self, split: str, *, shard: tuple[int, int] = (0, 1)) -> int:
        """Records of a split, or of one worker's share of it."""
        index, workers = _checked_shard(shard)
        files = self._files(split)
        total = sum(file.records for file in files)
        if workers <= len(files):
            return sum(file.records for file in files[index::workers])
        return (total - index + workers - 1) // workers

    def feature_spec(self) -> dict[str, Any]:
        """What `tf.io.parse_example` takes for these records.

        Lists of any length are RaggedFeatures; optional features get a default where they are missing: NaN,
        -1, "" (see schema.MISSING_VALUES).
        """
        return {feature.name: _feature_spec(stored_as(feature, self.stored)) for feature in self.schema}

    def decode(self, parsed: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Turn what `parse_example` gives for a batch into what a model takes; the same in training and export.

        Raw bytes become uint8 [batch, *shape]; everything else stays as it is. Features that the schema
        doesn't know stay too, and missing ones (the label, when serving) are not asked for.
        """
        import tensorflow as tf

        out = widen(parsed, self.stored, self.schema)
        for feature in self.schema:
            if feature.encoding == "raw" and feature.name in out:
                pixels = tf.io.decode_raw(out[feature.name], tf.uint8)
                out[feature.name] = tf.reshape(pixels, [-1, *feature.shape])
        return out

    def parse(self, serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        """Parse and decode a batch of serialised Examples, a string tensor [batch]."""
        import tensorflow as tf

        return self.decode(tf.io.parse_example(serialized, self.feature_spec()))

    def dataset(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        repeat: bool = False,
        shard: tuple[int, int] = (0, 1),
        drop_remainder: bool = False,
        cache: bool = False,
    ) -> tf.data.Dataset:
        """Batches of a split as dicts of tensors, in the order of the files unless shuffled.

        Args:
            seed: makes the order of shuffled rows the same in each run; each epoch has an order of its own.
            repeat: epochs without end; the last batch of an epoch may be smaller unless `drop_remainder`.
            shard: (index, workers): this worker's share. Whole files when there are enough of them, else
                every workers-th record. Shares never overlap and leave nothing out.
            cache: parse once and hold all rows of the share in memory; rows are shuffled after the cache, all
                of them, not within a window.

        Raises InvalidOption for a share that has no record, or fewer than a whole batch when remainders are
        dropped: such a dataset would be empty, or never give anything when repeated.
        """
        import tensorflow as tf

        if not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidOption("batch_size", "be a whole number above 0", batch_size)
        count = self.count(split, shard=shard)
        if not count:
            raise InvalidOption("shard", f"have records of split {split}", shard)
        if drop_remainder and count < batch_size:
            raise InvalidOption(
                "batch_size", f"be at most the {count} records of shard {shard} of split {split}", batch_size
            )
        seed = secrets.randbits(31) if seed is None else seed
        if cache:
            data = self._cached(
                split, shard, count, batch_size, seed if shuffle else None, drop_remainder, repeat
            )
        else:
            data = self._records(split, shard, seed if shuffle else None)
            data = data.batch(batch_size, drop_remainder=drop_remainder)
            data = data.map(_plain(self.parse), num_parallel_calls=tf.data.AUTOTUNE)
            if repeat:
                data = data.repeat()
        options = tf.data.Options()
        # Shares are made above; a strategy that cut the files again would lose data.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return data.with_options(options).prefetch(tf.data.AUTOTUNE)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around a loop over batches: TensorFlow's errors about broken records name the shard instead."""
        import tensorflow as tf

        try:
            yield
        except (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as e:
            damage = self.damage()
            if damage is None:
                raise
            raise damage from e

    def damage(self) -> DatasetCorrupt | None:
        """What is wrong with the first damaged shard, with record and byte; None when all are whole."""
        for shard in self.manifest.shards:
            path = self.manifest.folder / shard.file
            if not path.exists():
                return DatasetCorrupt(str(path), "is not there, though its manifest names it")
            found = find_damage(path)
            if found is not None:
                return DatasetCorrupt(
                    str(path), f"is damaged at record {found.record}, byte {found.offset}: {found.problem}"
                )
        try:
            self.manifest.verify()
        except DatasetCorrupt as e:
            return e
        return None

    def _files(self, split: str) -> list[Shard]:
        if split not in SPLITS:
            raise InvalidOption("split", f"be one of {', '.join(SPLITS)}", split)
        return [shard for shard in self.manifest.split(split) if shard.records]

    def _records(self, split: str, shard: tuple[int, int], seed: int | None) -> tf.data.Dataset:
        """Serialised records of a worker's share; shuffled within a window when there is a seed."""
        import tensorflow as tf

        index, workers = _checked_shard(shard)
        files = self._files(split)
        whole_files = workers <= len(files)
        if whole_files:
            files = files[index::workers]
        paths = [str(self.manifest.folder / file.file) for file in files]
        if seed is not None and whole_files and len(paths) > 1:
            # By turns from several files in an order of its own each epoch: mixes far more than a window does.
            data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=seed)
            data = data.interleave(
                tf.data.TFRecordDataset, cycle_length=min(_INTERLEAVED, len(paths)), block_length=16
            )
        else:
            data = tf.data.TFRecordDataset(paths)
        if not whole_files:
            data = data.shard(workers, index)
        if seed is None:
            return data
        records = sum(file.records for file in files)
        mean = max(1, sum(file.bytes for file in files) // records)
        window = max(1, min(records, _SHUFFLE_RECORDS, _SHUFFLE_BYTES // mean))
        return data.shuffle(window, seed=seed, reshuffle_each_iteration=True)

    def _cached(
        self,
        split: str,
        shard: tuple[int, int],
        count: int,
        batch_size: int,
        seed: int | None,
        drop_remainder: bool,
        repeat: bool,
    ) -> tf.data.Dataset:
        """All rows as one cached element, from which each epoch gathers its batches by row number.

        Gathering rows of whole tensors costs a fraction of unbatching and batching them again.
        """
        import tensorflow as tf

        rows = self._records(split, shard, None).batch(count).map(_plain(self.parse)).cache()
        epochs = tf.data.Dataset.counter() if repeat else tf.data.Dataset.range(1)

        def epoch(everything: Mapping[str, tf.Tensor], number: tf.Tensor) -> tf.data.Dataset:
            order = tf.range(count, dtype=tf.int64)
            if seed is not None:
                # Stateless, so that the order depends on seed and epoch and nothing else.
                noise = tf.random.stateless_uniform(
                    [count], seed=tf.stack([tf.cast(seed, tf.int64), number]), dtype=tf.float64
                )
                order = tf.argsort(noise)
            batches = tf.data.Dataset.from_tensor_slices(order).batch(
                batch_size, drop_remainder=drop_remainder
            )
            return batches.map(
                _plain(lambda chosen: {k: tf.gather(v, chosen) for k, v in everything.items()})
            )

        return tf.data.Dataset.zip((rows.repeat(), epochs)).flat_map(_plain(epoch))


# The name that opens one.
Dataset = RecordsDataset


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that AutoGraph need not rewrite, as it has no control flow over tensors: traces faster."""
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def _checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    index, workers = shard
    if workers < 1 or not 0 <= index < workers:
        raise InvalidOption("shard", "be (index, workers) with 0 <= index < workers", shard)
    return index, workers


def _feature_spec(feature: Feature) -> Any:
    import tensorflow as tf

    if feature.encoding != "plain" or feature.type in ("string", "bytes"):
        dtype = tf.string
    else:
        dtype = tf.float32 if feature.type == "float32" else tf.int64
    if feature.ragged:
        return tf.io.RaggedFeature(dtype)
    shape = [] if feature.encoding == "raw" else list(feature.shape)
    if feature.presence == "required":
        return tf.io.FixedLenFeature(shape, dtype)
    default = MISSING_VALUES[feature.type] if feature.default is None else feature.default
    values = [default] * feature.size
    return tf.io.FixedLenFeature(shape, dtype, default_value=values if shape else default)
