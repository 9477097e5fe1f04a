"""Blocks of rows to batches of tensors: parsed by the block, cut and shuffled as whole tensors.

What `Dataset.dataset` does for the `blocks` layout (see trainers.records.blocks); names, types, shapes and values
of what comes out are those of `rows`. A block is parsed into a few packed tensors; these are cut into batches
(`rebatch`), and only whole batches are taken apart into features, so nothing is done row by row.

Shuffling takes files in an order of their own each epoch, then blocks within a window, then the rows of some
blocks together; rows were shuffled within their shard when they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainers.records.errors import InvalidOption
from trainers.records.layout import BlockShape, missing_value
from trainers.records.masks import mask_name
from trainers.records.schema import Feature, Schema
from trainers.records.shares import Share

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["BlockReader", "plain", "seed_from"]

_MIXED_BLOCKS = 8  # whose rows are shuffled together

Packed = Mapping[str, Any]


class BlockReader:
    """Reads blocks of the `stored` schema as rows of a newer one; `block_rows` is how many rows most have."""

    def __init__(self, stored: Schema, schema: Schema, block_rows: int, masks: Sequence[str] = ()) -> None:
        """`masks` are features whose masks are wanted beside them."""
        self._stored = stored
        self._masks = tuple(masks)
        self._schema = schema
        self._shape = BlockShape.of(stored)
        self._block_rows = block_rows
        ragged = [f.name for f in schema if f.ragged]
        if ragged:
            raise InvalidOption("schema", "have no lists of any length for a dataset of blocks", ragged)
        # Where the newer schema has another default, the rows that lack a value must be told apart.
        self._masked = [
            f.name
            for f in schema
            if f.name in stored
            and stored[f.name].presence == "optional"
            and (
                f.name in self._masks
                or f.type != stored[f.name].type
                or repr(missing_value(f)) != repr(missing_value(stored[f.name]))
            )
        ]

    def spec(self) -> dict[str, Any]:
        """What `tf.io.parse_single_example` takes for a block."""
        import tensorflow as tf

        def rows_of(shape: Sequence[Any], dtype: Any) -> Any:
            return tf.io.FixedLenSequenceFeature(list(shape), dtype, allow_missing=True)

        spec = {kind: rows_of([width], _dtype(kind)) for kind, width in self._shape.widths.items()}
        spec |= {f"raw/{f.name}": tf.io.FixedLenFeature([], tf.string) for f in self._shape.raw}
        spec |= {f"bytes/{f.name}": rows_of(f.shape, tf.string) for f in self._shape.texts}
        return spec | {
            f"missing/{name}": tf.io.FixedLenFeature([], tf.string, default_value="") for name in self._masked
        }

    def parse(self, serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        """One serialised block, a string scalar, as packed tensors of its rows."""
        import tensorflow as tf

        packed = dict(tf.io.parse_single_example(serialized, self.spec()))
        for feature in self._shape.raw:
            pixels = tf.io.decode_raw(packed[f"raw/{feature.name}"], tf.uint8)
            packed[f"raw/{feature.name}"] = tf.reshape(pixels, [-1, *feature.shape])
        for name in self._masked:
            mask = tf.io.decode_raw(packed.pop(f"missing/{name}"), tf.uint8)
            rest = tf.zeros([_count(packed) - tf.size(mask)], tf.uint8)  # all rows, or none
            packed[f"missing/{name}"] = tf.concat([mask, rest], 0)
        return packed

    def count(self, blocks: tf.data.Dataset) -> int:
        """Rows of some serialised blocks."""
        import tensorflow as tf

        spec = {"rows": tf.io.FixedLenFeature([], tf.int64)}
        rows = blocks.map(lambda block: tf.io.parse_single_example(block, spec)["rows"])
        return int(rows.reduce(tf.constant(0, tf.int64), lambda total, count: total + count))

    def features(self, packed: Packed) -> dict[str, tf.Tensor]:
        """Packed tensors of some rows as the features of the schema."""
        import tensorflow as tf

        found: dict[str, tf.Tensor] = {}
        for kind, features in self._shape.packed.items():
            if all(not feature.shape for feature, _ in features):
                columns = tf.unstack(packed[kind], num=len(features), axis=1)
            else:
                columns = tf.split(packed[kind], [feature.size for feature, _ in features], axis=1)
                columns = [
                    tf.reshape(column, [-1, *feature.shape])
                    for column, (feature, _) in zip(columns, features, strict=True)
                ]
            found |= {feature.name: column for (feature, _), column in zip(features, columns, strict=True)}
        found |= {feature.name: packed[f"raw/{feature.name}"] for feature in self._shape.raw}
        found |= {feature.name: packed[f"bytes/{feature.name}"] for feature in self._shape.texts}
        # In the order of parse_example.
        wanted = {
            f.name: self._as_wanted(f, found, packed) for f in sorted(self._schema, key=lambda f: f.name)
        }
        return wanted | {mask_name(name): self._mask(name, packed) for name in self._masks}

    def _mask(self, name: str, packed: Packed) -> tf.Tensor:
        """Where a feature has no value: everywhere for one that no record holds."""
        import tensorflow as tf

        if name in self._masked:
            return tf.cast(packed[f"missing/{name}"], tf.int64)
        return tf.fill([_count(packed)], tf.constant(int(name not in self._stored), tf.int64))

    def _as_wanted(self, feature: Feature, found: Packed, packed: Packed) -> tf.Tensor:
        """A feature as the newer schema has it, see records.evolution."""
        import tensorflow as tf

        if feature.name not in found:
            return tf.fill([_count(packed), *feature.shape], _constant(feature))
        values = found[feature.name]
        if self._stored[feature.name].type != feature.type:
            values = tf.cast(values, _dtype(feature.type))
        if feature.name in self._masked:
            missing = tf.reshape(packed[f"missing/{feature.name}"] > 0, [-1, *[1] * len(feature.shape)])
            values = tf.where(missing, _constant(feature), values)
        return values

    def rows(
        self, blocks: tf.data.Dataset, share: Share, seed: tf.Tensor | None, window: int
    ) -> tf.data.Dataset:
        """Packed tensors of some rows each, of a share of serialised blocks.

        In the order of the blocks or, with a seed (int64 [2]), shuffled within a window of so many rows.
        """
        import tensorflow as tf

        places = max(1, window // self._block_rows)
        if seed is not None and share.whole_files:
            blocks = blocks.shuffle(places, seed=seed_from(seed))
        data = blocks.map(plain(self.parse))
        if not share.whole_files:
            # Cut so that each piece begins with a row of the first worker, however many rows the blocks have.
            data = data.rebatch(share.step * -(-self._block_rows // share.step))
            data = data.map(plain(lambda rows: {k: v[share.first :: share.step] for k, v in rows.items()}))
            data = data.filter(plain(lambda rows: _count(rows) > 0))
            if seed is not None:
                data = data.shuffle(places * share.step, seed=seed_from(seed))
        if seed is None:
            return data
        data = data.rebatch(max(1, min(window, _MIXED_BLOCKS * self._block_rows)))

        def mixed(number: tf.Tensor, rows: Packed) -> dict[str, tf.Tensor]:
            mine = tf.random.experimental.stateless_fold_in(seed, number)
            order = tf.argsort(tf.random.stateless_uniform([_count(rows)], mine, None, None, tf.int32))
            return {name: tf.gather(values, order) for name, values in rows.items()}

        return data.enumerate().map(plain(mixed))


def _count(rows: Packed) -> tf.Tensor:
    import tensorflow as tf

    return tf.shape(next(iter(rows.values())))[0]


def _constant(feature: Feature) -> tf.Tensor:
    import tensorflow as tf

    return tf.constant(missing_value(feature), _dtype(feature.type))


def _dtype(kind: str) -> Any:
    import tensorflow as tf

    return {"float32": tf.float32, "int64": tf.int64, "uint8": tf.uint8}.get(kind, tf.string)


def seed_from(seed: tf.Tensor) -> tf.Tensor:
    """One number, for `shuffle`, from a seed of two."""
    import tensorflow as tf

    return tf.random.stateless_uniform([], seed, minval=0, maxval=(1 << 31) - 1, dtype=tf.int64)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that AutoGraph need not rewrite, as it has no control flow over tensors: traces faster."""
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)
