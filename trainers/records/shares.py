"""Which records each of several workers reads, and in which order: no record twice, none left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainers.records.errors import InvalidOption
from trainers.records.manifest import Shard

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Order", "Share", "is_count", "share_of"]


@dataclasses.dataclass(frozen=True)
class Share:
    """A worker's part of a split: of the records of `shards`, one after the other, every `step`-th from `first`."""

    shards: tuple[Shard, ...]
    first: int = 0
    step: int = 1

    @property
    def whole_files(self) -> bool:
        """Whether the worker has its files to itself."""
        return self.step == 1

    @property
    def records(self) -> int:
        """Records of the share."""
        total = sum(shard.records for shard in self.shards)
        return max(0, total - self.first + self.step - 1) // self.step


def share_of(shards: Sequence[Shard], shard: tuple[int, int]) -> Share:
    """The share of worker `index` of `workers`, given as (index, workers).

    Whole files when there are enough, every workers-th of them; else every workers-th record of all files.
    Raises InvalidOption unless 0 <= index < workers.
    """
    index, workers = shard
    if workers < 1 or not 0 <= index < workers:
        raise InvalidOption("shard", "be (index, workers) with 0 <= index < workers", shard)
    full = tuple(shard for shard in shards if shard.records)
    if workers <= len(full):
        return Share(full[index::workers])
    return Share(full, index, workers)


@dataclasses.dataclass(frozen=True)
class Order:
    """How batches follow each other: `offset` batches of epoch `first` are left out; no seed, no shuffling."""

    seed: int | None
    batch_size: int
    drop_remainder: bool
    first: int
    offset: int

    def skipped(self, number: tf.Tensor) -> tf.Tensor:
        """Batches to leave out in an epoch."""
        import tensorflow as tf

        return tf.where(number == self.first, tf.constant(self.offset, tf.int64), tf.constant(0, tf.int64))


def is_count(value: object) -> bool:
    """Whether a value is a whole number of 0 or more; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
