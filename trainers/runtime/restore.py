"""A trained job's model, in this process, as plain Keras: for evaluation and export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.record import JobRecord
from trainers.job.spec import TrainingJob
from trainers.runtime.module import TrainerModule

__all__ = ["Restorable", "Trained", "Untrained", "load_trained"]


class Untrained(ConfigError):
    """The job has no checkpoint yet."""

    code = "runtime.untrained"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with trained weights, the trainer module it is of, its job, and the step of the weights."""

    model: Any
    module: TrainerModule
    job: TrainingJob
    step: int


class Restorable:
    """A job's model, built once, into which its newest checkpoint is read as often as asked.

    Raises MissingRecord when there is no such job.
    """

    def __init__(self, job_folder: Path | str) -> None:
        from trainers.runtime.lean import import_tensorflow

        tf = import_tensorflow()
        from trainers.runtime.checkpoints import checkpoint_folder, saved_variables
        from trainers.runtime.module import load_module

        self.job = JobRecord.open(job_folder).plan().job
        self.folder = checkpoint_folder(job_folder)
        self._module = load_module(self.job.trainer)
        self._model = self._module.build_model(self.job.args)
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoint = tf.train.Checkpoint(model=saved_variables(self._model), step=self._step)

    def newest(self) -> Trained | None:
        """The model of the newest readable checkpoint, whatever strategy wrote it; None when there is none.

        Raises StaleCheckpoint when the trainer module now builds another model.
        """
        from trainers.runtime.checkpoints import restore_newest

        if restore_newest(self._checkpoint, self.folder, partial=True) is None:
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
