"""Another version's SavedModel as a function of features, through its `serving_default` signature.

A champion may have been trained by other code, on records with other features, or not be whole any more: none of
that may stop the evaluation of its challenger. Everything wrong with it is ChampionUnusable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError
from trainers.task import CLASSIFICATION, Task, dense

__all__ = ["ChampionUnusable", "load_champion"]

SIGNATURE = "serving_default"


class ChampionUnusable(ConfigError):
    """A champion can't be evaluated on these records."""

    code = "evaluate.champion"


def load_champion(path: str | Path, task: Task) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function of a dict of features that gives what the trainer's own model would.

    Raises ChampionUnusable when it can't be loaded; so does the function when it can't be asked.
    """
    import tensorflow as tf

    if not (Path(path) / "saved_model.pb").is_file():
        raise ChampionUnusable(f"there is no SavedModel in {path}")
    try:
        loaded = tf.saved_model.load(str(path))
    except Exception as e:
        raise ChampionUnusable(f"the SavedModel in {path} can't be loaded: {e}") from e
    if SIGNATURE not in loaded.signatures:
        raise ChampionUnusable(f"the SavedModel in {path} has no signature {SIGNATURE}")
    signature = loaded.signatures[SIGNATURE]
    wanted = signature.structured_input_signature[1]

    def predict(features: Mapping[str, Any]) -> dict[str, Any]:
        missing = sorted(set(wanted) - set(features))
        if missing:
            raise ChampionUnusable(f"it takes {', '.join(missing)}, which the records don't hold")
        try:
            inputs = {name: tf.cast(dense(features[name]), spec.dtype) for name, spec in wanted.items()}
            for name, spec in wanted.items():
                spec.shape.assert_is_compatible_with(inputs[name].shape)  # a call does not look itself
            return _as_trained(signature(**inputs), task)
        except (ValueError, TypeError, tf.errors.OpError) as e:
            raise ChampionUnusable(f"it refuses these records: {e}") from e

    predict.loaded = loaded  # type: ignore[attr-defined] - its variables live as long as somebody holds it
    return predict


def _as_trained(answers: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Answers as the trainer's loss takes them: logits, also where the champion only gives probabilities."""
    import tensorflow as tf

    out = dict(answers)
    if task.kind != CLASSIFICATION:
        return out
    if task.from_logits and "logits" not in out:
        if "probabilities" not in out:
            raise ValueError(f"its answers are {', '.join(sorted(out))}, without logits or probabilities")
        out["logits"] = tf.math.log(tf.maximum(out["probabilities"], 1e-7))
    if not task.from_logits:
        out.pop("logits", None)
    return out
