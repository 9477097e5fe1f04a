"""A trained job's model, in this process, as plain Keras: for evaluation and export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind, TrainingJob
from trainers.runtime.module import TrainerModule

__all__ = ["NoTrainer", "Restorable", "Trained", "Untrained", "load_trained"]


class Untrained(ConfigError):
    """The job has no checkpoint yet."""

    code = "runtime.untrained"


class NoTrainer(ConfigError):
    """The job has no trainer module that could build its model."""

    code = "runtime.no_trainer"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with trained weights, the trainer module it is of, its job, and the step of the weights."""

    model: Any
    module: TrainerModule
    job: TrainingJob
    step: int


class Restorable:
    """A job's model, built once, into which its newest checkpoint is read as often as asked.

    Raises MissingRecord when there is no such job, NoTrainer when it ran a command.
    """

    def __init__(self, job_folder: Path | str) -> None:
        from trainers.runtime.lean import import_tensorflow

        tf = import_tensorflow()
        from trainers.runtime.building import make_model
        from trainers.runtime.checkpoints import checkpoint_folder
        from trainers.runtime.context import context_of
        from trainers.runtime.datasets import make_dataset, open_records
        from trainers.runtime.module import load_module

        self.job = JobRecord.open(job_folder).plan().job
        if self.job.is_custom:
            raise NoTrainer(
                f"the job in {job_folder} ran a command of its own, and no trainer module",
                hint="its command says what it has written where; evaluate and release that in tasks of your own",
            )
        self.folder = checkpoint_folder(job_folder)
        self._module = module = load_module(self.job.trainer)
        hparams = {name: value for name, value in self.job.args.items() if name != "mixed_precision"}
        ctx = dataclasses.replace(context_of(self.job, RoleKind.CHIEF, 0), hparams=hparams)
        self._model = make_model(
            module, ctx, lambda model: make_dataset(module, model, open_records(self.job), ctx)
        )
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def newest(self) -> Trained | None:
        """The model of the newest readable checkpoint, whatever strategy wrote it; None when there is none.

        Its weights are the moving averages where the job kept them (`ema_momentum`), and it computes in float32
        whatever `mixed_precision` the job had: that is what is evaluated, exported and served.

        Raises StaleCheckpoint when the trainer module now builds another model.
        """
        import tensorflow as tf

        from trainers.runtime.checkpoints import restore_newest, saved_weights

        checkpoint = tf.train.Checkpoint(step=self._step, **saved_weights(self._model, self.folder))
        if restore_newest(checkpoint, self.folder, partial=True) is None:
            return None
        return Trained(self._model, self._module, self.job, int(self._step.numpy()))


def load_trained(job_folder: Path | str) -> Trained:
    """The model of a job's newest readable checkpoint, whatever strategy it was trained with.

    Raises MissingRecord or Untrained when there is nothing to load, StaleCheckpoint when the trainer module now
    builds another model.
    """
    known = Restorable(job_folder)
    trained = known.newest()
    if trained is None:
        raise Untrained(
            f"job {known.job.name} has no checkpoint in {known.folder}",
            hint="train it first; `trainyard jobs show` says how far it came",
        )
    return trained
