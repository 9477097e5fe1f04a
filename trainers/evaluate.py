"""Evaluate a trained model on held-out records, beside the current champion.

    python -m trainers.evaluate --spec '{"job": FOLDER, "manifest": URI,
        "champion": null | {"version": 3, "path": SAVEDMODEL}, "min_examples": 100}'

writes FOLDER/evaluation.json (metrics, confidence intervals, per-class accuracy, confusion matrix, the same for
the champion on the very same records, and the difference) and hands back what the gate reads:

    {"metrics": {"accuracy": 0.97, "loss": 0.1}, "examples": 360, "evaluation": PATH,
     "champion": null | {"version": 3, "metrics": {...}} | {"version": 3, "error": "..."}}

A champion that can't be evaluated is said, and no failure: then the gate knows nothing to compare with.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.evaluation.champion import ChampionUnusable, load_champion
from trainers.evaluation.scoring import Scorer, Scores
from trainers.evaluation.summary import compare, summarize
from trainers.job.errors import InvalidSpec
from trainers.job.files import write_json
from trainers.job.termination import run_step
from trainers.lean import import_tensorflow
from trainers.runtime.datasets import model_features
from trainers.task import Task, call

if TYPE_CHECKING:
    from trainers.records.read import RecordsDataset
    from trainers.runtime.restore import Trained

__all__ = ["EVALUATION", "eval_batches", "evaluate", "main", "predictor", "scorer"]

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
FORMAT = 1
BATCH = 512
_TRACED_FROM = 8  # batches: tracing a graph costs as much as some of them without


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text for `spec` and the result."""
    job, manifest, champion = _checked(spec)
    started = time.monotonic()
    import_tensorflow()
    from trainers.records.read import RecordsDataset
    from trainers.runtime.restore import load_trained

    imported = time.monotonic()
    trained = load_trained(job)
    records = RecordsDataset.open(manifest or trained.job.inputs["records"])
    loaded = time.monotonic()
    document = evaluate(trained, records, champion, min_examples=spec.get("min_examples", 0))
    document["job"] = str(job)
    document["seconds"] = {
        "import": imported - started,
        "load": loaded - imported,
        "evaluate": time.monotonic() - loaded,
    }
    path = Path(job) / EVALUATION
    write_json(path, document)
    log.info("evaluated %s examples: %s", document["examples"], document["metrics"])
    other = document["champion"]
    return {
        "metrics": document["metrics"],
        "examples": document["examples"],
        "champion": other and {key: other[key] for key in ("version", "metrics", "error") if key in other},
        "evaluation": str(path),
    }


def _checked(spec: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any] | None]:
    known = {"job", "manifest", "champion", "min_examples"}
    if set(spec) - known:
        raise InvalidSpec("spec", f"have no fields but {sorted(known)}", sorted(spec))
    job, manifest, champion = spec.get("job"), spec.get("manifest") or "", spec.get("champion")
    if not isinstance(job, str) or not job:
        raise InvalidSpec("job", "be a job's folder", job)
    if not isinstance(manifest, str):
        raise InvalidSpec("manifest", "be the URI of a dataset's manifest", manifest)
    if champion is not None and not (isinstance(champion, Mapping) and {"version", "path"} <= set(champion)):
        raise InvalidSpec("champion", 'be null or {"version": ..., "path": ...}', champion)
    least = spec.get("min_examples", 0)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise InvalidSpec("min_examples", "be a whole number of 0 or more", least)
    return job, manifest, champion


def evaluate(
    trained: Trained,
    records: RecordsDataset,
    champion: Mapping[str, Any] | None = None,
    *,
    split: str = "eval",
    batch_size: int = BATCH,
    min_examples: int = 0,
) -> dict[str, Any]:
    """What evaluation.json holds, but for the job's folder and the seconds."""
    hparams = trained.job.args
    task = Task.of(trained.module, hparams)
    examples = records.count(split)
    predict = predictor(trained, records)
    if examples > _TRACED_FROM * batch_size:
        import tensorflow as tf

        predict = tf.function(predict, reduce_retracing=True)
    scores, other = _score(
        scorer(trained, task, predict),
        _champion(trained, task, champion),
        eval_batches(trained, records, split, batch_size) if examples else iter(()),
    )
    document: dict[str, Any] = {
        "format": FORMAT,
        "trainer": trained.job.trainer,
        "step": trained.step,
        "records": {"manifest": str(records.manifest.path), "digest": records.manifest.digest},
        "split": split,
        "task": task.kind,
        "classes": task.classes,
        "examples": scores.examples,
        "min_examples": min_examples,
        "enough_examples": scores.examples >= min_examples,
        "created": time.time(),
        **summarize(scores, task),
        "champion": None,
    }
    if champion is not None:
        said = {"version": champion["version"], "path": str(champion["path"])}
        if isinstance(other, ChampionUnusable):
            log.warning("champion version %s can't be compared with: %s", champion["version"], other)
            document["champion"] = {**said, "error": str(other).splitlines()[0][:300]}
        else:
            assert other is not None
            difference = compare(scores, other, task)
            document["champion"] = {**said, **summarize(other, task), "difference": difference}
    return document


def eval_batches(
    trained: Trained, records: RecordsDataset, split: str, batch_size: int
) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Batches of (features, label), as the trainer makes them or as the records hold them."""
    make = getattr(trained.module.module, "make_eval_dataset", None)
    if make is not None:
        yield from ((batch[0], batch[1]) for batch in make(records, split, batch_size))
        return
    with records.reading():
        for batch in records.dataset(split, batch_size):
            yield batch, batch[records.label]


def predictor(trained: Trained, records: RecordsDataset) -> Callable[[Mapping[str, Any]], Any]:
    """The model as a function of a batch's features, by name."""
    model = trained.model
    if getattr(model, "inputs", None):
        return lambda features: call(model, features)
    names = model_features(model, records)
    return lambda features: call(model, {name: features[name] for name in names})


def scorer(trained: Trained, task: Task, predict: Callable[[Mapping[str, Any]], Any]) -> Scorer:
    """A fresh scorer of it, by the trainer's loss and metrics."""
    hparams = trained.job.args
    return Scorer(predict, task, trained.module.loss(hparams), trained.module.metrics(hparams))


def _champion(
    trained: Trained, task: Task, champion: Mapping[str, Any] | None
) -> Scorer | ChampionUnusable | None:
    if champion is None:
        return None
    try:
        return scorer(trained, task, load_champion(champion["path"], task))
    except ChampionUnusable as e:
        return e


def _score(
    candidate: Scorer, champion: Scorer | ChampionUnusable | None, batches: Iterator[tuple[Any, Any]]
) -> tuple[Scores, Scores | ChampionUnusable | None]:
    """Both models over the same batches, read once."""
    for features, labels in batches:
        candidate.update(features, labels)
        if isinstance(champion, Scorer):
            try:
                champion.update(features, labels)
            except Exception as e:  # noqa: BLE001 - another model, perhaps of other code: nothing it does may fail this
                champion = (
                    e if isinstance(e, ChampionUnusable) else ChampionUnusable(f"{type(e).__name__}: {e}")
                )
    return candidate.finish(), champion.finish() if isinstance(champion, Scorer) else champion


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(run_step(main))
