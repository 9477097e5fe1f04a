"""Keras preprocessing layers from a dataset's statistics, without an adapt() pass over the data.

    def build_model(hparams, records):
        import keras

        distance = keras.Input((), name="distance", dtype="int64")
        carrier = keras.Input((), name="carrier", dtype="string")
        parts = [
            layers.normalization(records, "distance")(keras.layers.Reshape((1,))(distance)),
            layers.string_lookup(records, "carrier", least=10, output_mode="one_hot")(carrier),
        ]

They are Keras' own layers with their state given, part of the model: what training saw is what a server answers
with, from raw tensors and from serialised Examples. State comes from the train split alone. A vocabulary's order
(most frequent first, equal counts by value) follows from the statistics, which follow from the data, so the same
dataset always gives the same indices; `Vocabulary.save` keeps it as a file of its own, and `vocabulary(after=...)`
puts new values behind those of an older one, so that an embedding trained before still fits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.files import read_json, write_json
from trainers.records.errors import DatasetCorrupt, DatasetMissing, InvalidOption
from trainers.records.manifest import STATISTICS

if TYPE_CHECKING:
    import keras

    from trainers.records.read import RecordsDataset
    from trainers.records.statistics import FeatureStatistics

__all__ = ["Vocabulary", "discretization", "integer_lookup", "normalization", "string_lookup", "vocabulary"]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The values of a feature in the order of their indices; `dataset` is the digest of where they are from."""

    feature: str
    values: tuple[str, ...] | tuple[int, ...]
    dataset: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError(f"values of {self.feature!r} must hold at least one, got none")
        if len(set(self.values)) != len(self.values):
            raise ValueError(f"values of {self.feature!r} must differ, got one twice")

    def __len__(self) -> int:
        return len(self.values)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically."""
        write_json(Path(path), {**dataclasses.asdict(self), "values": list(self.values)})

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what `save` wrote; DatasetMissing or DatasetCorrupt when it isn't there or is none."""
        try:
            data = read_json(Path(path))
            if data is None:
                raise DatasetMissing(f"no vocabulary at {path}", hint="save one with Vocabulary.save")
            return cls(**data)
        except (ValueError, TypeError) as e:
            raise DatasetCorrupt(str(path), f"is no vocabulary: {e}", hint="save it again") from e


def normalization(records: RecordsDataset, feature: str) -> keras.layers.Normalization:
    """Numbers minus their mean, by their standard deviation; one of each for all values of a list or picture.

    A missing number stays NaN unless the schema gives the feature a `default`.
    """
    import keras

    found = _numbers(records, feature)
    moments = found.moments
    return keras.layers.Normalization(
        axis=None, mean=moments.mean, variance=moments.std**2, name=f"{feature}_normalized"
    )


def discretization(
    records: RecordsDataset, feature: str, bins: int, *, output_mode: str = "int"
) -> keras.layers.Discretization:
    """Numbers to `bins` bins that hold about equal shares of the rows: fewer where one value fills several.

    Bounds are quantiles, known to within a bucket of records.sketch; the shares are as exact as that.
    """
    import keras

    if not isinstance(bins, int) or isinstance(bins, bool) or bins < 2:
        raise InvalidOption("bins", "be a whole number of 2 or more", bins)
    found = _numbers(records, feature)
    quantiles = {found.quantile(i / bins) for i in range(1, bins)}
    # A value on a bound belongs to the bin above: a bound at the least value would leave the first bin empty.
    bounds = sorted(quantile for quantile in quantiles if quantile > found.ranges["min"])
    if not bounds:
        raise InvalidOption("feature", "have more than one value to be cut into bins", feature)
    return keras.layers.Discretization(
        bin_boundaries=bounds, output_mode=output_mode, name=f"{feature}_binned"
    )


def vocabulary(
    records: RecordsDataset,
    feature: str,
    *,
    least: int = 1,
    most: int | None = None,
    after: Vocabulary | None = None,
) -> Vocabulary:
    """A feature's values, most frequent first: those of at least `least` rows, and of these at most `most`.

    With `after`, values of an older vocabulary keep their indices, also those that are gone, and new ones follow
    them. "" is left out: readers put it where a text is missing, and it is out of the vocabulary like rare values.
    InvalidOption for a feature of more different values than statistics count (10,000 texts, 2,048 numbers).
    """
    for option, value in (("least", least), ("most", most)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InvalidOption(option, "be a whole number of 1 or more", value)
    counts = {value: count for value, count in _counts(_of(records, feature), feature).items() if value != ""}
    chosen: list[Any] = sorted(counts, key=lambda value: (-counts[value], value))
    chosen = [value for value in chosen if counts[value] >= least][:most]
    if after is not None:
        if after.feature != feature:
            raise InvalidOption("after", f"be a vocabulary of {feature}", after.feature)
        old = set(after.values)
        chosen = [*after.values, *(value for value in chosen if value not in old)]
    if not chosen:
        raise InvalidOption("least", f"leave a value of {feature}", least)
    return Vocabulary(feature, tuple(chosen), records.manifest.digest)


def string_lookup(
    records: RecordsDataset, feature: str | Vocabulary, *, output_mode: str = "int", oov: int = 1, **cut: Any
) -> keras.layers.StringLookup:
    """Text to indices: 0 to `oov` - 1 for what isn't in the vocabulary, then one a value.

    `feature` is a name, with `least`, `most` and `after` as for `vocabulary`, or a vocabulary made before.
    `output_mode` is Keras': "int", "one_hot", "multi_hot", "count".
    """
    import keras

    return _lookup(keras.layers.StringLookup, _known(records, feature, "string", cut), output_mode, oov)


def integer_lookup(
    records: RecordsDataset, feature: str | Vocabulary, *, output_mode: str = "int", oov: int = 1, **cut: Any
) -> keras.layers.IntegerLookup:
    """Integers to indices, as `string_lookup`; for codes and ids of up to 2,048 different values."""
    import keras

    return _lookup(keras.layers.IntegerLookup, _known(records, feature, "int64", cut), output_mode, oov)


def _lookup(layer: Any, known: Vocabulary, output_mode: str, oov: int) -> Any:
    return layer(
        vocabulary=list(known.values),
        num_oov_indices=oov,
        output_mode=output_mode,
        name=f"{known.feature}_index",
    )


def _known(
    records: RecordsDataset, feature: str | Vocabulary, kind: str, cut: Mapping[str, Any]
) -> Vocabulary:
    name = feature.feature if isinstance(feature, Vocabulary) else feature
    if records.schema[name].type != kind:
        raise InvalidOption("feature", f"hold {kind}, as {name} does not", records.schema[name].type)
    return feature if isinstance(feature, Vocabulary) else vocabulary(records, feature, **cut)


def _of(records: RecordsDataset, feature: str) -> FeatureStatistics:
    """Statistics of a feature's train split, as its records hold it."""
    from trainers.records.statistics import FeatureStatistics  # Arrow

    path = records.manifest.folder / STATISTICS
    try:
        state = json.loads(path.read_text())["train"][feature]
    except (FileNotFoundError, KeyError) as e:
        records.schema[feature]  # raises ColumnError with what there is
        raise DatasetMissing(f"no statistics of {feature} at {path}", hint="prepare the dataset again") from e
    if not state["detail"]:
        raise DatasetMissing(f"{path} counts rows only", hint="prepare the dataset without statistics=False")
    found = FeatureStatistics(records.stored[feature])
    found.merge(state)
    return found


def _numbers(records: RecordsDataset, feature: str) -> FeatureStatistics:
    found = _of(records, feature)
    if not found.moments.n:
        raise InvalidOption("feature", "hold finite numbers", f"{feature}: {found.feature.type}")
    return found


def _counts(found: FeatureStatistics, feature: str) -> dict[Any, int]:
    """How often each value was there."""
    if found.feature.type == "string" and found.counts():
        return dict(found.counts())
    if found.feature.type == "int64" and found.moments.n and found.numbers.exact:
        low, _, counts = found.numbers.buckets()
        return {int(value): int(count) for value, count in zip(low, counts, strict=True)}
    many = f"{feature}: {found.feature.type}, {found.distinct_values()} different"
    raise InvalidOption("feature", "hold texts or integers of which each value was counted", many)
