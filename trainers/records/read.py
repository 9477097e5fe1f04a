"""Records to tensors: batches first, parsing after.

    records = Dataset.open("storage/records/digits/048e887bcff6fa9c/manifest.json")
    for batch in records.dataset("train", 128, shuffle=True, seed=1):
        batch["image"], batch["label"]          # uint8 [128, 8, 8, 1], int64 [128]

Parsing is what reading costs, and it is cheap by the batch: `parse_example` on 1,024 records is ten times as
fast as on each of them. TensorFlow is imported when tensors are asked for, not before.

An order is a function of seed, epoch and share, so reading can go on where it stopped: `start` batches later.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.files import sha256_of_file
from trainers.records.errors import DatasetCorrupt, InvalidOption
from trainers.records.evolution import BREAKING, SchemaBreaks, compare, stored_as, widen
from trainers.records.manifest import SPLITS, Manifest, Shard
from trainers.records.masks import masked, spec_of, with_masks
from trainers.records.read_blocks import BlockReader, plain, seed_from
from trainers.records.salvage import Salvage, damage_of, pieces, salvage
from trainers.records.schema import Schema
from trainers.records.shares import Order, Share, is_count, share_of

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Dataset", "RecordsDataset"]

_CHECKSUM_UP_TO = 256 << 20  # bytes whose checksums are compared without being asked: a quarter of a second
_SHUFFLE_RECORDS = 65_536
_SHUFFLE_BYTES = 256 << 20
_INTERLEAVED = 8  # files read by turns when shuffling
_COMPRESSED_TO = 4  # records may be as many times as large as their shards
_ON_CORRUPT = ("error", "skip")


class RecordsDataset:
    """A dataset that `prepare` published.

    `skipped` counts the records that were passed over, by shard: always empty unless it was opened to skip.
    """

    def __init__(
        self, manifest: Manifest, schema: Schema, stored: Schema | None = None, *, on_corrupt: str = "error"
    ) -> None:
        """`schema` is what tensors are wanted as, `stored` what the records hold, where that is another."""
        self.manifest = manifest
        self.schema = schema
        self.stored = schema if stored is None else stored
        self.on_corrupt = on_corrupt
        self.masks: tuple[str, ...] = ()
        self.skipped: dict[str, int] = {}
        self._salvaged: dict[str, Salvage | None] = {}
        self._blocks: BlockReader | None = None  # what reads the records where they are blocks
        if manifest.options.get("layout", "rows") == "blocks":
            self._blocks = BlockReader(self.stored, schema, manifest.options["block_rows"])

    @classmethod
    def open(
        cls,
        manifest: str | Path,
        *,
        verify: bool | None = None,
        schema: Schema | str | Path | None = None,
        on_corrupt: str = "error",
    ) -> RecordsDataset:
        """Open a dataset by the path or file:// URI of its manifest or folder.

        The shards' sizes are always compared with the manifest, since TensorFlow does not notice a file that
        was cut between two records. `verify` says whether checksums are too; by default they are for datasets
        of up to 256 MB. With a newer `schema` (or its file's path) an older dataset is read as that has it,
        defaults filled in; see records.evolution. Raises DatasetMissing, DatasetCorrupt or SchemaBreaks.

        `on_corrupt="skip"` reads what is whole of damaged shards, and counts the rest in `skipped`. Shards are
        then looked through when a split of theirs is first asked for. Of a damaged shard that is compressed,
        nothing is read.
        """
        if on_corrupt not in _ON_CORRUPT:
            raise InvalidOption("on_corrupt", f"be one of {', '.join(_ON_CORRUPT)}", on_corrupt)
        found = Manifest.load(manifest)
        if on_corrupt == "error":
            if verify is None:
                verify = sum(shard.bytes for shard in found.shards) <= _CHECKSUM_UP_TO
            found.verify(checksums=verify)
        stored = found.schema()
        if schema is None:
            return cls(found, stored, on_corrupt=on_corrupt)
        newer = schema if isinstance(schema, Schema) else Schema.load(schema)
        evolution = compare(stored, newer)
        if evolution.verdict == BREAKING:
            raise SchemaBreaks(evolution)
        return cls(found, newer, stored, on_corrupt=on_corrupt)

    @property
    def label(self) -> str:
        """The name of the label feature."""
        return self.manifest.label

    def count(self, split: str, *, shard: tuple[int, int] = (0, 1)) -> int:
        """Records of a split, or of one worker's share of it."""
        return share_of(self._files(split), shard).records

    def batches(
        self, split: str, batch_size: int, *, shard: tuple[int, int] = (0, 1), drop_remainder: bool = False
    ) -> int:
        """Batches of an epoch: what `start` counts."""
        count = self.count(split, shard=shard)
        return count // batch_size if drop_remainder else -(-count // batch_size)

    def with_masks(self, masks: bool | Sequence[str] = True) -> RecordsDataset:
        """The same dataset, which also says where values are missing: `km_missing`, int64 [batch], 1 where `km` is.

        For all optional features, or those that are named; see records.masks. All that reads and parses has them.
        """
        found = copy.copy(self)
        found.masks = masked(self.schema, masks)
        if found._blocks is not None:
            rows = self.manifest.options["block_rows"]
            found._blocks = BlockReader(self.stored, self.schema, rows, found.masks)
        return found

    def feature_spec(self) -> dict[str, Any]:
        """What `tf.io.parse_example` takes for these records.

        Lists of any length are RaggedFeatures; optional features get a default where they are missing: NaN,
        -1, "" (see schema.MISSING_VALUES). Those with a mask are lists here, of which `decode` makes values and mask.
        """
        return {
            feature.name: spec_of(stored_as(feature, self.stored), masked=feature.name in self.masks)
            for feature in self.schema
        }

    def decode(self, parsed: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Turn what `parse_example` gives for a batch into what a model takes; the same in training and export.

        Raw bytes become uint8 [batch, *shape]; everything else stays as it is. Features that the schema
        doesn't know stay too, and missing ones (the label, when serving) are not asked for.
        """
        import tensorflow as tf

        parsed = with_masks(parsed, [stored_as(self.schema[name], self.stored) for name in self.masks])
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
        start: int = 0,
        masks: bool | Sequence[str] = False,
    ) -> tf.data.Dataset:
        """Batches of a split as dicts of tensors, in the order of the files unless shuffled.

        Args:
            seed: makes the order of shuffled rows the same in each run; each epoch has an order of its own.
            repeat: epochs without end; the last batch of an epoch may be smaller unless `drop_remainder`.
            shard: (index, workers): this worker's share. Whole files when there are enough of them, else
                every workers-th record. Shares never overlap and leave nothing out.
            cache: parse once and hold all rows of the share in memory; rows are shuffled after the cache, all
                of them, not within a window.
            start: batches to leave out, over all epochs: after n batches of a dataset, the same one with
                start=n gives what would have come next. Costs at most an epoch of reading without parsing;
                needs the seed when shuffled.
            masks: which features' masks to give beside them, see `with_masks`.

        Raises InvalidOption for a share that has no record, or fewer than a whole batch when remainders are
        dropped: such a dataset would be empty, or never give anything when repeated.
        """
        import tensorflow as tf

        if masks:
            return self.with_masks(masks).dataset(
                split, batch_size, shuffle=shuffle, seed=seed, repeat=repeat, shard=shard,
                drop_remainder=drop_remainder, cache=cache, start=start,
            )  # fmt: skip
        if not is_count(batch_size) or not batch_size:
            raise InvalidOption("batch_size", "be a whole number above 0", batch_size)
        count = self.count(split, shard=shard)
        if not count:
            raise InvalidOption("shard", f"have records of split {split}", shard)
        if drop_remainder and count < batch_size:
            raise InvalidOption(
                "batch_size", f"be at most the {count} records of shard {shard} of split {split}", batch_size
            )
        per_epoch = count // batch_size if drop_remainder else -(-count // batch_size)
        if not is_count(start) or (not repeat and start > per_epoch):
            limit = "" if repeat else f" and at most the {per_epoch} batches of the epoch"
            raise InvalidOption("start", f"be a whole number of batches of 0 or more{limit}", start)
        if start and shuffle and seed is None:
            raise InvalidOption("seed", "be that of the dataset to go on with, when start is given", seed)
        if shuffle and seed is None:
            seed = secrets.randbits(31)
        first, offset = divmod(start, per_epoch)
        epochs = tf.data.Dataset.counter(first) if repeat else tf.data.Dataset.range(min(first, 1), 1)
        order = Order(seed if shuffle else None, batch_size, drop_remainder, first, offset)
        share = share_of(self._files(split), shard)
        data = self._cached(share, order, epochs) if cache else self._streamed(share, order, epochs)
        left = tf.data.INFINITE_CARDINALITY if repeat else per_epoch - start
        data = data.apply(tf.data.experimental.assert_cardinality(left))
        options = tf.data.Options()
        # Shares are made above; a strategy that cut the files again would lose data.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return data.with_options(options).prefetch(tf.data.AUTOTUNE)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around a loop over batches: TensorFlow's errors about broken records name the shard instead."""
        import tensorflow as tf

        suspects = (
            tf.errors.DataLossError,
            tf.errors.NotFoundError,
            tf.errors.InvalidArgumentError,
            tf.errors.FailedPreconditionError,  # fewer batches than there should be
        )
        try:
            yield
        except suspects as e:
            damage = self.damage()
            if damage is None:
                raise
            raise damage from e

    def damage(self) -> DatasetCorrupt | None:
        """What is wrong with the first damaged shard, with record and byte; None when all are whole."""
        return damage_of(self.manifest, self._compression)

    @property
    def _compression(self) -> str:
        return str(self.manifest.options.get("compression", ""))

    def _files(self, split: str) -> list[Shard]:
        if split not in SPLITS:
            raise InvalidOption("split", f"be one of {', '.join(SPLITS)}", split)
        shards = list(self.manifest.split(split))
        return shards if self.on_corrupt == "error" else [self._whole(shard) for shard in shards]

    def _whole(self, shard: Shard) -> Shard:
        """The shard with as many records as can be read of it; the others are counted."""
        if shard.file not in self._salvaged:
            path = self.manifest.folder / shard.file
            if not path.exists():
                raise DatasetCorrupt(str(path), "is not there, though its manifest names it")
            found = None
            if path.stat().st_size != shard.bytes or sha256_of_file(path) != shard.sha256:
                found = Salvage.nothing() if self._compression else salvage(path)
                self.skipped[shard.file] = shard.records - self._records_of(shard, found)
            self._salvaged[shard.file] = found
        if self._salvaged[shard.file] is None:
            return shard
        return dataclasses.replace(shard, records=shard.records - self.skipped[shard.file])

    def _records_of(self, shard: Shard, found: Salvage) -> int:
        """Rows in what was salvaged of a shard."""
        if self._blocks is None or not len(found.starts):
            return len(found.starts)
        return self._blocks.count(pieces(str(self.manifest.folder / shard.file), found))

    def _serialised(self, shards: Sequence[Shard]) -> tf.data.Dataset:
        """The records of some files, one after the other."""
        import tensorflow as tf

        whole = [shard for shard in shards if self._salvaged.get(shard.file) is None]
        data = None
        if whole:
            paths = [str(self.manifest.folder / shard.file) for shard in whole]
            data = tf.data.TFRecordDataset(paths, compression_type=self._compression)
        for shard in shards:
            found = self._salvaged.get(shard.file)
            if found is not None:
                rest = pieces(str(self.manifest.folder / shard.file), found)
                data = rest if data is None else data.concatenate(rest)
        return data

    def _mixed_files(self, share: Share, seed: tf.Tensor, run: int) -> tf.data.Dataset:
        """The records of whole files by turns, `run` of each, in an order that a seed (int64 [2]) decides."""
        import tensorflow as tf

        # The order is our seed's alone: a function has a seed of its own, whatever the program's is.
        tf.random.set_seed(1)
        whole = [shard for shard in share.shards if self._salvaged.get(shard.file) is None]
        damaged = [shard for shard in share.shards if self._salvaged.get(shard.file) is not None]
        if share.whole_files and len(whole) > 1:
            # By turns from several files in an order of its own each epoch: mixes far more than a window does.
            paths = tf.constant([str(self.manifest.folder / shard.file) for shard in whole])
            places = tf.argsort(tf.random.stateless_uniform([len(whole)], seed))
            data = tf.data.Dataset.from_tensor_slices(tf.gather(paths, places)).interleave(
                plain(lambda path: tf.data.TFRecordDataset(path, compression_type=self._compression)),
                cycle_length=min(_INTERLEAVED, len(whole)),
                block_length=run,
            )
            return data.concatenate(self._serialised(damaged)) if damaged else data
        return self._serialised(share.shards)

    def _window(self, share: Share) -> int:
        """Rows to shuffle within: so many, or so many bytes."""
        mean = max(1, sum(s.bytes for s in share.shards) // sum(s.records for s in share.shards))
        if self._compression:
            mean *= _COMPRESSED_TO
        return max(1, min(share.records, _SHUFFLE_RECORDS, _SHUFFLE_BYTES // mean))

    def _shuffled(self, share: Share, seed: tf.Tensor) -> tf.data.Dataset:
        """The records of a share in an order that a seed decides, mixed within a window."""
        data = self._mixed_files(share, seed, 16)
        if not share.whole_files:
            data = data.shard(share.step, share.first)
        return data.shuffle(self._window(share), seed=seed_from(seed))

    def _rows(self, share: Share, seed: tf.Tensor | None) -> tf.data.Dataset:
        """The rows of a share of blocks, packed, some at once; shuffled when there is a seed."""
        data = self._serialised(share.shards) if seed is None else self._mixed_files(share, seed, 1)
        return self._blocks.rows(data, share, seed, self._window(share))

    def _streamed(self, share: Share, order: Order, epochs: tf.data.Dataset) -> tf.data.Dataset:
        """Batches of epochs, read from the files in each."""
        import tensorflow as tf

        def epoch(number: tf.Tensor) -> tf.data.Dataset:
            seed = None if order.seed is None else tf.stack([tf.cast(order.seed, tf.int64), number])
            if self._blocks is not None:
                data = self._rows(share, seed)
                data = data.rebatch(order.batch_size, drop_remainder=order.drop_remainder)
                return data.skip(order.skipped(number)) if order.offset else data
            if seed is None:
                data = self._serialised(share.shards)
                data = data if share.whole_files else data.shard(share.step, share.first)
            else:
                data = self._shuffled(share, seed)
            data = data.batch(order.batch_size, drop_remainder=order.drop_remainder)
            # Batches before the start are read but never parsed.
            return data.skip(order.skipped(number)) if order.offset else data

        data = epochs.flat_map(plain(epoch))
        if self._blocks is not None:
            return data.map(plain(self._blocks.features))
        return data.map(plain(self.parse), num_parallel_calls=tf.data.AUTOTUNE)

    def _cached(self, share: Share, order: Order, epochs: tf.data.Dataset) -> tf.data.Dataset:
        """All rows as one cached element, from which each epoch gathers its batches by row number.

        Gathering rows of whole tensors costs a fraction of unbatching and batching them again.
        """
        import tensorflow as tf

        count = share.records
        if self._blocks is not None:
            rows, finish = self._rows(share, None).rebatch(count).cache(), self._blocks.features
        else:
            rows, finish = self._serialised(share.shards), dict
            rows = rows if share.whole_files else rows.shard(share.step, share.first)
            rows = rows.batch(count).map(plain(self.parse)).cache()

        def epoch(everything: Mapping[str, tf.Tensor], number: tf.Tensor) -> tf.data.Dataset:
            places = tf.range(count, dtype=tf.int64)
            if order.seed is not None:
                # Stateless, so that the order depends on seed and epoch and nothing else.
                noise = tf.random.stateless_uniform(
                    [count], seed=tf.stack([tf.cast(order.seed, tf.int64), number]), dtype=tf.float64
                )
                places = tf.argsort(noise)
            batches = tf.data.Dataset.from_tensor_slices(places).batch(
                order.batch_size, drop_remainder=order.drop_remainder
            )
            if order.offset:
                batches = batches.skip(order.skipped(number))
            return batches.map(
                plain(lambda chosen: finish({k: tf.gather(v, chosen) for k, v in everything.items()}))
            )

        return tf.data.Dataset.zip((rows.repeat(), epochs)).flat_map(plain(epoch))


# The name that opens one.
Dataset = RecordsDataset
