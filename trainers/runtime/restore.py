"""A trained job's model, in this process, as plain Keras: for evaluation and export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.record import JobRecord
from trainers.job.spec import TrainingJob
from trainers.runtime.module import TrainerModule

__all__ = ["Trained", "Untrained", "load_trained"]


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


def load_trained(job_folder: Path | str) -> Trained:
    """The model of a job's newest readable checkpoint, whatever strategy it was trained with.

    Raises MissingRecord or Untrained when there is nothing to load, StaleCheckpoint when the trainer module now
    builds another model.
    """
    from trainers.runtime.lean import import_tensorflow

    tf = import_tensorflow()
    from trainers.runtime.checkpoints import checkpoint_folder, restore_newest, saved_variables
    from trainers.runtime.module import load_module

    job = JobRecord.open(job_folder).plan().job
    module = load_module(job.trainer)
    model = module.build_model(job.args)
    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    path = restore_newest(
        tf.train.Checkpoint(model=saved_variables(model), step=step),
        checkpoint_folder(job_folder),
        partial=True,
    )
    if path is None:
        raise Untrained(
            f"job {job.name} has no checkpoint in {checkpoint_folder(job_folder)}",
            hint="train it first; `trainyard jobs show` says how far it came",
        )
    return Trained(model, module, job, int(step.numpy()))
