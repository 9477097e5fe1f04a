"""Checkpoints of a job: written whole or not at all, three kept, the newest readable one restored.

A checkpoint holds the model, the optimizer with its slots and iterations, and the job's own step. TensorFlow
writes tensors to temporary files, renames them, and names them in the file `checkpoint` last; should the newest
be broken all the same (a disk that lost writes), the one before is taken.
"""

from __future__ import annotations

import errno
import logging
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError, UserError
from trainers.job.files import write_bytes
from trainers.runtime.variables import is_trainable, model_variables, plain_variable, trainable_parts

__all__ = [
    "Checkpoints",
    "NotFinite",
    "StaleCheckpoint",
    "checkpoint_folder",
    "known_checkpoints",
    "restore_newest",
    "saved_variables",
    "saved_weights",
]

log = logging.getLogger(__name__)

KEEP = 3
_NAME = "step"


class NotFinite(UserError):
    """Training has gone to NaN or infinity."""

    code = "runtime.not_finite"


class StaleCheckpoint(ConfigError):
    """A checkpoint is of another model than the one that the trainer module builds."""

    code = "runtime.stale_checkpoint"


def checkpoint_folder(job_folder: Path | str) -> Path:
    """Where a job's checkpoints are."""
    return Path(job_folder) / "checkpoints"


def saved_variables(owner: Any, *, averaged: bool = False) -> dict[str, Any]:
    """What a checkpoint holds of a model or optimizer, as arguments of tf.train.Checkpoint may be: by number.

    TensorFlow's own variables, since a Keras variable around one that is cut over parameter servers can't be
    saved. `averaged` leaves out those that have a moving average beside them.
    """
    known = model_variables(owner)
    if not known:
        return owner  # type: ignore[no-any-return]
    return {number: v for number, v in known.items() if not (averaged and is_trainable(v))}


def saved_weights(model: Any, folder: Path | str) -> dict[str, Any]:
    """Arguments of tf.train.Checkpoint that put into `model` the weights that a job's checkpoints offer.

    The moving averages of the trainable ones, where the job kept them; else the weights themselves.
    """
    import tensorflow as tf

    for path in reversed([str(Path(folder) / name) for name in known_checkpoints(folder)]):
        try:
            averaged = any(name.startswith("average/") for name, _ in tf.train.list_variables(path))
        except (tf.errors.OpError, ValueError):
            continue  # broken: restore_newest says so
        if averaged:
            trained = {number: v for number, v in model_variables(model).items() if is_trainable(v)}
            return {"model": saved_variables(model, averaged=True), "average": trained}
        break
    return {"model": saved_variables(model)}


def known_checkpoints(folder: Path | str) -> list[str]:
    """The names of the checkpoints in a folder, oldest first, broken ones among them.

    As the file `checkpoint` has them; where that is damaged or lost, as the files that are there.
    """
    folder = Path(folder)
    try:
        text = (folder / "checkpoint").read_text()
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except UnicodeDecodeError:
        text = "damaged"
    names = re.findall(r'^all_model_checkpoint_paths: "([^"]+)"$', text, re.MULTILINE)
    if names:
        return [Path(name).name for name in names]
    there = {path.stem: int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{_NAME}-[0-9]*.index")}
    if there:
        log.warning("%s is damaged or lost: looking at the checkpoints that are there", folder / "checkpoint")
    return sorted(there, key=lambda name: there[name])


def restore_newest(
    checkpoint: Any, folder: Path | str, *, options: Any = None, partial: bool = False
) -> str | None:
    """Restore the newest readable checkpoint in `folder` into a tf.train.Checkpoint; its path, or None.

    Broken ones are passed over with a warning. `partial` takes what the objects need and leaves the rest. Raises
    StaleCheckpoint when a checkpoint lacks variables that the objects have, or has them in other shapes.
    """
    import tensorflow as tf

    # A file that is too short comes as an IndexError or as the bare base class of TensorFlow's errors, the other
    # leaves of which (a parameter server that is gone) say nothing about the file.
    broken = (tf.errors.DataLossError, tf.errors.OutOfRangeError, tf.errors.NotFoundError, IndexError)
    for path in reversed([str(Path(folder) / name) for name in known_checkpoints(folder)]):
        try:
            # As `write` wrote it: `restore` would ask for a counter of saves, too.
            status = checkpoint.read(path, options=options)
            status.assert_existing_objects_matched()
        except (tf.errors.OpError, IndexError) as e:
            if not isinstance(e, broken) and type(e) is not tf.errors.OpError:
                raise
            log.warning("checkpoint %s is broken, taking the one before: %s", path, str(e).splitlines()[0])
            continue
        except (AssertionError, ValueError) as e:
            raise StaleCheckpoint(
                f"checkpoint {path} does not fit the model: {str(e).splitlines()[0]}",
                hint="build_model or its hyperparameters changed; train under another job name or folder",
            ) from e
        if partial:
            status.expect_partial()
        return str(path)
    return None


class Checkpoints:
    """Saves and restores one training run; only the chief writes.

    `more` are further things to hold, by name, as tf.train.Checkpoint takes them (building.Training.saved).
    `io_device` is the device whose disk is used: the chief's own, so that parameter servers need no storage.
    """

    def __init__(
        self,
        folder: Path | str,
        model: Any,
        optimizer: Any,
        *,
        more: Mapping[str, Any] | None = None,
        io_device: str | None = None,
        keep: int = KEEP,
    ) -> None:
        import tensorflow as tf

        self._model = model
        self._optimizer = optimizer
        with tf.device("CPU:0"):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="job_step")
        self._checkpoint = tf.train.Checkpoint(
            model=saved_variables(model),
            optimizer=saved_variables(optimizer),
            step=self._step,
            **(more or {}),
        )
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._folder = checkpoint_folder(folder)
        self._keep = keep
        # Traced once: TensorFlow itself would trace each save on parameter servers anew, half a second each.
        self._write = tf.function(
            lambda path: self._checkpoint.write(path, options=self._options),
            input_signature=[tf.TensorSpec([], tf.string)],
            autograph=False,
        )
        self._look = tf.function(lambda: _finite(trainable_parts(model)), autograph=False)
        self._swept = False
        self.last: int | None = None

    def trace(self) -> None:
        """Trace what `save` calls, while every peer answers.

        TensorFlow tells each new function to all workers and waits for each, so that one that is stopped would keep
        the first checkpoint, and everybody with it.
        """
        self._look.get_concrete_function()
        self._write.get_concrete_function()

    def restore(self) -> int:
        """Restore the newest readable checkpoint; the number of finished steps, 0 when there is none."""
        path = restore_newest(self._checkpoint, self._folder, options=self._options)
        if path is None:
            return 0
        self.last = int(self._step.numpy())
        log.info("restored step %s from %s", self.last, path)
        return self.last

    def save(self, step: int) -> None:
        """Write a checkpoint of `step` finished steps, and remove those beyond the ones that are kept.

        Raises NotFinite, and writes nothing, when a weight is not finite: the last good checkpoint stays.
        """
        import tensorflow as tf

        fine = self._look().numpy().tolist()
        parts = trainable_parts(self._model)
        bad = [getattr(v, "path", v.name) for v, ok in zip(parts, fine, strict=True) if not ok]
        if bad:
            raise not_finite("weights", step, f" ({', '.join(bad[:3])})")
        self._step.assign(step)
        self._folder.mkdir(exist_ok=True)
        name = f"{_NAME}-{step}"
        names = [known for known in known_checkpoints(self._folder) if known != name]
        if not self._swept:
            self._sweep(names)
        if shutil.disk_usage(self._folder).free < self._bytes():
            # Seen beforehand: an operation that fails here cancels what workers do for the same chief.
            raise OSError(errno.ENOSPC, "No space left on device", str(self._folder))
        self._write(tf.constant(str(self._folder / name)))
        names.append(name)
        _write_state(self._folder, names[-self._keep :])
        self.last = step
        for name in names[: -self._keep]:
            for file in self._folder.glob(f"{name}.*"):
                file.unlink(missing_ok=True)

    def _bytes(self) -> int:
        """About the size of a checkpoint."""
        size = 1 << 16  # index and state
        for variable in (*self._model.variables, *self._optimizer.variables):
            plain = plain_variable(variable)
            size += math.prod(int(length) for length in plain.shape) * max(1, plain.dtype.size)
        return size

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._folder

    def _sweep(self, names: list[str]) -> None:
        """Remove what a killed process has left half-written."""
        for path in self._folder.glob(f"{_NAME}-[0-9]*"):
            whole = path.stem in names and path.suffix != ""
            if not whole or "temp" in path.name:
                _remove(path)
        self._swept = True

    def discard(self, step: int) -> None:
        """Remove what a failed `save` has written: on a full disk it would take the room of the next one."""
        if step == self.last:
            return
        for path in self._folder.glob(f"{_NAME}-{step}[._]*"):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_state(folder: Path, names: list[str]) -> None:
    """The file by which TensorFlow finds checkpoints, oldest first; names relative, so that a job can be moved."""
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{n}"' for n in names)]
    write_bytes(folder / "checkpoint", ("\n".join(lines) + "\n").encode())


def not_finite(what: str, step: int, where: str = "") -> NotFinite:
    """The error for a loss or weights that are NaN or infinite at a step."""
    return NotFinite(
        f"{what} became NaN or infinite by step {step}{where}",
        hint="lower the learning rate, clip gradients, or look for bad values in the data; "
        "the last good checkpoint is kept",
    )


def _finite(parts: Iterable[Any]) -> Any:
    """For each variable whether all of it is finite, worked out where it lives; a vector of bool."""
    import tensorflow as tf

    def fine(variable: Any) -> Any:
        if not variable.dtype.is_floating:
            return tf.constant(True)
        with tf.device(variable.device):
            return tf.reduce_all(tf.math.is_finite(variable))

    return tf.stack([fine(plain_variable(part)) for part in parts])
