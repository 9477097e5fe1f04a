"""The user's trainer module, checked before anything is built from it.

build_model(hparams) -> keras.Model or tf.Module         required; build_model(hparams, records) where layers
                                                         come from the records' statistics or schema
loss(hparams) -> keras.losses.Loss, or a function        required
optimizer(hparams, learning_rate) -> keras optimizer     default: Adam
metrics(hparams) -> list of keras.metrics.Metric         used by evaluation
make_dataset(records, ctx) -> batches of (features, label) or (features, label, weight)
CLASSES                                                  names of the classes, for evaluation and export
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

from trainers.job.errors import ConfigError

__all__ = ["TrainerModule", "UnusableTrainer", "load_module"]


class UnusableTrainer(ConfigError):
    """The job's trainer module is not there, or lacks what the loop calls."""

    code = "runtime.unusable_trainer"


class TrainerModule:
    """A trainer module: the user's functions, and defaults for those left out."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        for name in ("build_model", "loss"):
            if not callable(getattr(module, name, None)):
                raise UnusableTrainer(
                    f"trainer module {module.__name__} ({module.__file__}) has no function {name}(hparams)",
                    hint="see docs/add-a-pipeline.md for what a trainer module holds",
                )

    @property
    def name(self) -> str:
        """Its dotted name."""
        return self.module.__name__

    def build_model(self, hparams: Mapping[str, Any], records: str = "") -> Any:
        """A new model; `records` is the URI of the manifest, and the user's function gets the RecordsDataset."""
        make = self.module.build_model
        if "records" not in inspect.signature(make).parameters:
            return make(hparams)
        if not records:
            raise UnusableTrainer(
                f"build_model of {self.name} takes records, and the job has none",
                hint='set inputs["records"] to a manifest, or write build_model(hparams)',
            )
        from trainers.records.read import RecordsDataset

        return make(hparams, records=RecordsDataset.open(records, verify=False))

    def loss(self, hparams: Mapping[str, Any]) -> Any:
        """The loss, a callable of (label, outputs) that gives the batch's mean."""
        return self.module.loss(hparams)

    def metrics(self, hparams: Mapping[str, Any]) -> list[Any]:
        """The metrics that evaluation computes; [] when the module has none."""
        make = getattr(self.module, "metrics", None)
        return list(make(hparams)) if make else []

    def optimizer(self, hparams: Mapping[str, Any], learning_rate: Any) -> Any:
        """The optimizer; Adam when the module has none. `learning_rate` is a number, or the job's schedule."""
        make = getattr(self.module, "optimizer", None)
        if make:
            return make(hparams, learning_rate)
        import keras

        return keras.optimizers.Adam(learning_rate)

    @property
    def make_dataset(self) -> Any | None:
        """The user's `make_dataset`, or None."""
        return getattr(self.module, "make_dataset", None)

    @property
    def classes(self) -> list[Any] | None:
        """Names of the classes, or None when it is no classifier."""
        classes = getattr(self.module, "CLASSES", None)
        return list(classes) if classes is not None else None


def load_module(name: str) -> TrainerModule:
    """Import a trainer module by its dotted name.

    Raises UnusableTrainer when there is no such module; what its own code raises passes through.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(f"{e.name}.")):
            raise  # the module is there; something that it imports is not
        raise UnusableTrainer(
            f"there is no trainer module {name!r}",
            hint="trainer is a dotted name like trainers.models.digits; is its folder on PYTHONPATH?",
        ) from e
    return TrainerModule(module)
