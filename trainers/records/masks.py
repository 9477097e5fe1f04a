"""Which values were missing, beside the values that stand in for them: `km_missing` for the feature `km`.

A reader of records gets a feature's default (or schema.MISSING_VALUES) where a row has no value. A mask says where:
int64 [batch], 1 where the row has none and 0 where it has. It is the same from both layouts, and in an exported model:
there a feature that has a mask is parsed as the list it is in the record, and its length says whether it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainers.records.errors import InvalidOption
from trainers.records.layout import missing_value
from trainers.records.schema import Feature, Schema

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["mask_name", "masked", "masks_among", "spec_of", "with_masks"]

_SUFFIX = "_missing"


def mask_name(feature: str) -> str:
    """The name of a feature's mask."""
    return feature + _SUFFIX


def masked(schema: Schema, masks: bool | Sequence[str]) -> tuple[str, ...]:
    """The features whose masks are wanted: all optional ones for True, or those that are named.

    InvalidOption for one that has no mask (a list of any length, raw pixels), that isn't there, or whose mask's name
    is a feature's already.
    """
    if isinstance(masks, bool):
        wanted = [f.name for f in schema if masks and f.presence == "optional" and _can(f)]
    else:
        wanted = list(masks)
    for name in wanted:
        if not _can(schema[name]):  # raises ColumnError
            raise InvalidOption("masks", "name no list of any length and no pixels, which have no mask", name)
        if mask_name(name) in schema.names:
            raise InvalidOption("masks", f"leave out {name}, as {mask_name(name)} is a feature itself", name)
    return tuple(wanted)


def masks_among(schema: Schema, names: Sequence[str]) -> tuple[str, ...]:
    """The features whose masks are among some names, as those of a model's inputs."""
    return tuple(f.name for f in schema if _can(f) and mask_name(f.name) in set(names) - set(schema.names))


def _can(feature: Feature) -> bool:
    return not feature.ragged and feature.encoding != "raw"


def spec_of(feature: Feature, *, masked: bool = False) -> Any:
    """What `tf.io.parse_example` takes for a feature; for one with a mask, a list, of which `with_masks` makes both."""
    import tensorflow as tf

    if feature.encoding != "plain" or feature.type in ("string", "bytes"):
        dtype = tf.string
    else:
        dtype = tf.float32 if feature.type == "float32" else tf.int64
    if feature.ragged or masked:
        return tf.io.RaggedFeature(dtype)
    shape = [] if feature.encoding == "raw" else list(feature.shape)
    if feature.presence == "required":
        return tf.io.FixedLenFeature(shape, dtype)
    default = missing_value(feature)
    values = [default] * feature.size
    return tf.io.FixedLenFeature(shape, dtype, default_value=values if shape else default)


def with_masks(parsed: Mapping[str, Any], features: Sequence[Feature]) -> dict[str, tf.Tensor]:
    """Parsed tensors in which some features, still lists of none or all values, have their shape and a mask.

    Features that weren't parsed are passed over. The graph fails on a list of another length.
    """
    import tensorflow as tf

    out = dict(parsed)
    for feature in features:
        if feature.name not in out:
            continue
        lists = out[feature.name]
        lengths = lists.row_lengths()
        right = tf.reduce_all((lengths == 0) | (lengths == feature.size))
        words = f"{feature.name} must have {feature.size} values or none"
        with tf.control_dependencies([tf.debugging.assert_equal(right, True, words)]):
            none = tf.constant(missing_value(feature), lists.dtype)
            values = lists.to_tensor(none, shape=[None, feature.size])
        out[feature.name] = tf.reshape(values, [-1, *feature.shape])
        out[mask_name(feature.name)] = tf.cast(lengths == 0, tf.int64)
    return out
