"""Golden examples: held-out records, one of each class where that can be, and what a SavedModel answers to them.

Whoever deploys a version asks it these and compares: a version that answers otherwise is not what was exported.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.exporting.saved_model import EXAMPLES, SERVING_DEFAULT
from trainers.job.errors import DataError, UserError
from trainers.records.masks import masks_among
from trainers.task import dense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainers.records.read import RecordsDataset

__all__ = [
    "TOLERANCE",
    "Golden",
    "NoRecordsToShow",
    "SavedModelDiffers",
    "answer",
    "check_same",
    "choose",
    "document",
    "tensor",
]

TOLERANCE = 1e-4
_FEWEST, _MOST = 5, 16
_SEARCHED = 8192  # records looked through for one of each class
_BATCH = 512
_NUMBERS = 500_000  # in golden.json: some megabytes


class NoRecordsToShow(DataError):
    """There is no record to make golden examples of."""

    code = "export.no_records"


class SavedModelDiffers(UserError):
    """The SavedModel on disk does not answer as the model it was made from."""

    code = "export.differs"


@dataclasses.dataclass(frozen=True)
class Golden:
    """n chosen examples: serialised, as the features of `serving_default`, and their labels."""

    serialized: NDArray
    inputs: Mapping[str, NDArray]
    labels: NDArray

    def __len__(self) -> int:
        return len(self.serialized)

    def repeated(self, rows: int) -> Golden:
        """The same examples over and over, `rows` of them."""
        index = np.arange(rows) % len(self)
        return Golden(
            self.serialized[index], {k: v[index] for k, v in self.inputs.items()}, self.labels[index]
        )


def choose(records: RecordsDataset, names: list[str], classes: int | None) -> Golden:
    """5 to 16 held-out examples of the features `names`, one of each of the first 16 `classes` (None: any).

    Of the split "eval", or of "train" where nothing was held out. Raises NoRecordsToShow when there is none.
    """
    import tensorflow as tf

    from trainers.records.examples import examples  # Arrow

    split = "eval" if records.count("eval") else "train"
    if not records.count(split):
        raise NoRecordsToShow(
            f"the records in {records.manifest.folder} are empty",
            hint="prepare records with at least one row",
        )
    records = records.with_masks(masks_among(records.schema, names))
    wanted = min(_MOST, max(_FEWEST, classes or 8))
    chosen: dict[int, int] = {}  # label -> row
    spare: list[int] = []
    rows: list[NDArray] = []
    labels: list[NDArray] = []
    with records.reading():
        for batch in itertools.islice(examples(records, split, _BATCH), -(-_SEARCHED // _BATCH)):
            seen = sum(map(len, rows))
            rows.append(batch)
            label = dense(records.parse(tf.constant(batch))[records.label]).numpy()
            labels.append(label)
            for offset, value in enumerate(label.reshape(len(label), -1)[:, 0]):
                row, key = seen + offset, int(value) if classes else seen + offset
                if key not in chosen and len(chosen) < wanted:
                    chosen[key] = row
                elif len(spare) < wanted:
                    spare.append(row)
            if len(chosen) >= wanted:
                break
    index = [row for _, row in sorted(chosen.items())]
    index += spare[: max(0, wanted - len(index))]
    serialized = np.concatenate(rows)[index]
    parsed = records.parse(tf.constant(serialized))
    inputs = {name: dense(parsed[name]).numpy() for name in names}
    golden = Golden(serialized, inputs, np.concatenate(labels)[index])
    size = sum(value.size // len(value) for value in inputs.values())
    fewer = max(_FEWEST, _NUMBERS // max(1, size))
    return golden if len(golden) <= fewer else golden.repeated(fewer)


def answer(loaded: Any, golden: Golden) -> dict[str, NDArray]:
    """What a loaded SavedModel answers by name; SavedModelDiffers when it answers otherwise by Example."""
    import tensorflow as tf

    by_name = loaded.signatures[SERVING_DEFAULT](**{k: tf.constant(v) for k, v in golden.inputs.items()})
    outputs = {name: value.numpy() for name, value in sorted(by_name.items())}
    by_example = loaded.signatures[EXAMPLES](**{EXAMPLES: tf.constant(golden.serialized)})
    check_same(outputs, {name: value.numpy() for name, value in by_example.items()}, "its two signatures")
    return outputs


def check_same(one: Mapping[str, NDArray], other: Mapping[str, NDArray], what: str) -> None:
    """Raise SavedModelDiffers, saying what, unless both hold the same tensors within the tolerance."""
    for name in sorted(set(one) | set(other)):
        if name not in one or name not in other:
            raise SavedModelDiffers(f"{what} differ: only one of them gives {name}")
        a, b = one[name], other[name]
        if a.dtype.kind in "fc":
            same = a.shape == b.shape and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        else:
            same = np.array_equal(a, b)
        if not same:
            raise SavedModelDiffers(
                f"{what} give different {name} for the same examples",
                hint="does the model hold something random, or a Python value that changes, outside of training?",
            )


def document(golden: Golden, outputs: Mapping[str, NDArray]) -> dict[str, Any]:
    """golden.json: inputs and outputs of `serving_default` as {"dtype", "shape", "values"}, labels, tolerance."""
    return {
        "signature": SERVING_DEFAULT,
        "inputs": {name: _tensor(value) for name, value in golden.inputs.items()},
        "outputs": {name: _tensor(value) for name, value in outputs.items()},
        "labels": _values(golden.labels),
        "tolerance": TOLERANCE,
    }


def tensor(document: Mapping[str, Any]) -> NDArray:
    """A tensor of golden.json."""

    def read(item: Any) -> Any:
        if isinstance(item, list):
            return [read(i) for i in item]
        return base64.b64decode(item["b64"]) if isinstance(item, dict) else item

    dtype = object if document["dtype"] == "string" else document["dtype"]
    return np.array(read(document["values"]), dtype).reshape(document["shape"])


def _tensor(value: NDArray) -> dict[str, Any]:
    dtype = "string" if value.dtype.kind in "OSU" else value.dtype.name
    return {"dtype": dtype, "shape": list(value.shape), "values": _values(value)}


def _values(value: NDArray) -> Any:
    def shown(item: Any) -> Any:
        if isinstance(item, list):
            return [shown(i) for i in item]
        return {"b64": base64.b64encode(item).decode()} if isinstance(item, bytes) else item

    return shown(value.tolist())
