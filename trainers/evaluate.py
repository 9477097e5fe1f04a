"""Evaluate a trained model on held-out records, beside the current champion.

    python -m trainers.evaluate --spec '{"job": FOLDER, "manifest": URI,
        "champion": null | {"version": 3, "path": SAVEDMODEL}, "min_examples": 100,
        "slices": ["carrier", "distance[500,1000]"], "slice_min_examples": 30}'

writes FOLDER/evaluation.json (metrics, confidence intervals, per-class accuracy, confusion matrix, the same by
slices and for the champion on the very same records, and the differences) with FOLDER/evaluation/report.html and
its plots, and hands back what the gate reads:

    {"metrics": {"accuracy": 0.97, "loss": 0.1}, "examples": 360, "evaluation": PATH, "report": PATH | null,
     "champion": null | {"version": 3, "metrics": {...}} | {"version": 3, "error": "..."}}

A champion that can't be evaluated is said, and no failure: then the gate knows nothing to compare with.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.evaluation.champion import ChampionUnusable, load_champion
from trainers.evaluation.report import Plots, write_report
from trainers.evaluation.scoring import Scorer, Scores
from trainers.evaluation.slices import parse, texts
from trainers.evaluation.slicing import Slicer
from trainers.evaluation.summary import Measured
from trainers.job.errors import InvalidSpec
from trainers.job.files import write_json
from trainers.job.termination import run_step
from trainers.lean import import_tensorflow
from trainers.records.masks import mask_name, masks_among
from trainers.runtime.datasets import model_features
from trainers.task import Task, call

if TYPE_CHECKING:
    from trainers.records.read import RecordsDataset
    from trainers.runtime.restore import Trained

__all__ = ["EVALUATION", "eval_batches", "evaluate", "main", "predictor", "scorer"]

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
FORMAT = 2
SLICE_MIN_EXAMPLES = 30
BATCH = 512
_TRACED_FROM = 8  # batches: tracing a graph costs as much as some of them without


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text for `spec` and the result."""
    job, manifest, champion, slices = _checked(spec)
    started = time.monotonic()
    import_tensorflow()
    from trainers.records.read import RecordsDataset
    from trainers.runtime.restore import load_trained

    imported = time.monotonic()
    trained = load_trained(job)
    records = RecordsDataset.open(manifest or trained.job.inputs["records"])
    loaded = time.monotonic()
    plots = Plots()
    document = evaluate(
        trained,
        records,
        champion,
        min_examples=spec.get("min_examples", 0),
        slices=slices,
        slice_min_examples=spec.get("slice_min_examples", SLICE_MIN_EXAMPLES),
        plots=plots,
    )
    document["job"] = str(job)
    document["seconds"] = {
        "import": imported - started,
        "load": loaded - imported,
        "evaluate": time.monotonic() - loaded,
    }
    path = Path(job) / EVALUATION
    write_json(path, document)
    report = write_report(Path(job), document, plots)
    log.info("evaluated %s examples: %s", document["examples"], document["metrics"])
    other = document["champion"]
    return {
        "metrics": document["metrics"],
        "examples": document["examples"],
        "champion": other and {key: other[key] for key in ("version", "metrics", "error") if key in other},
        "evaluation": str(path),
        "report": report and str(report),
    }


def _checked(spec: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any] | None, list[str]]:
    known = {"job", "manifest", "champion", "min_examples", "slices", "slice_min_examples"}
    if set(spec) - known:
        raise InvalidSpec("spec", f"have no fields but {sorted(known)}", sorted(spec))
    job, manifest, champion = spec.get("job"), spec.get("manifest") or "", spec.get("champion")
    if not isinstance(job, str) or not job:
        raise InvalidSpec("job", "be a job's folder", job)
    if not isinstance(manifest, str):
        raise InvalidSpec("manifest", "be the URI of a dataset's manifest", manifest)
    if champion is not None and not (isinstance(champion, Mapping) and {"version", "path"} <= set(champion)):
        raise InvalidSpec("champion", 'be null or {"version": ..., "path": ...}', champion)
    for field in ("min_examples", "slice_min_examples"):
        least = spec.get(field, 0)
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            raise InvalidSpec(field, "be a whole number of 0 or more", least)
    return job, manifest, champion, texts(spec.get("slices") or [])


def evaluate(
    trained: Trained,
    records: RecordsDataset,
    champion: Mapping[str, Any] | None = None,
    *,
    split: str = "eval",
    batch_size: int = BATCH,
    min_examples: int = 0,
    slices: Sequence[str] = (),
    slice_min_examples: int = SLICE_MIN_EXAMPLES,
    plots: Plots | None = None,
) -> dict[str, Any]:
    """What evaluation.json holds, but for the job's folder and the seconds; `plots` takes what plots are made of."""
    hparams = trained.job.args
    task = Task.of(trained.module, hparams)
    examples = records.count(split)
    predict = predictor(trained, records)
    if examples > _TRACED_FROM * batch_size:
        import tensorflow as tf

        predict = tf.function(predict, reduce_retracing=True)
    slicer = Slicer([parse(text) for text in slices], records.manifest.statistics.get("train", {}))
    scores, other = _score(
        slicer,
        scorer(trained, task, predict),
        _champion(trained, task, champion),
        eval_batches(trained, records, split, batch_size) if examples else iter(()),
    )
    measured = Measured(scores, task)
    theirs = Measured(other, task) if isinstance(other, Scores) else None
    if plots is not None:
        plots.take(scores, other if isinstance(other, Scores) else None)
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
        **measured.summary(),
        "champion": None,
        "slice_min_examples": slice_min_examples,
        "slices": _slices(slicer, measured, theirs, slice_min_examples) if scores.examples else [],
        "slices_not_shown": slicer.not_shown,
    }
    if champion is not None:
        said = {"version": champion["version"], "path": str(champion["path"])}
        if isinstance(other, ChampionUnusable):
            log.warning("champion version %s can't be compared with: %s", champion["version"], other)
            document["champion"] = {**said, "error": str(other).splitlines()[0][:300]}
        else:
            assert theirs is not None
            document["champion"] = {**said, **theirs.summary(), "difference": measured.less(theirs)}
    return document


def _slices(slicer: Slicer, ours: Measured, theirs: Measured | None, least: int) -> list[dict[str, Any]]:
    """Metrics of each slice, and the champion's beside them."""
    found = []
    for group in slicer.groups():
        part = ours.take(group.rows)
        row: dict[str, Any] = {
            "slice": group.name,
            "of": group.of,
            "examples": len(group.rows),
            "share": len(group.rows) / ours.scores.examples,
            "enough_examples": len(group.rows) >= least,
            "metrics": part.metrics(),
            "intervals": part.intervals(),
            "champion": None,
        }
        if theirs is not None:
            other = theirs.take(group.rows)
            row["champion"] = {
                "metrics": other.metrics(),
                "intervals": other.intervals(),
                "difference": part.less(other),
            }
        found.append(row)
    return found


def eval_batches(
    trained: Trained, records: RecordsDataset, split: str, batch_size: int
) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Batches of (features, label), as the trainer makes them or as the records hold them."""
    make = getattr(trained.module.module, "make_eval_dataset", None)
    if make is not None:
        yield from ((batch[0], batch[1]) for batch in make(records, split, batch_size))
        return
    # The champion may take masks that the candidate doesn't.
    names = [tensor.name for tensor in getattr(trained.model, "inputs", None) or ()]
    names += [mask_name(feature.name) for feature in records.schema if feature.presence == "optional"]
    with records.reading():
        for batch in records.dataset(split, batch_size, masks=masks_among(records.schema, names)):
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
    slicer: Slicer,
    candidate: Scorer,
    champion: Scorer | ChampionUnusable | None,
    batches: Iterator[tuple[Any, Any]],
) -> tuple[Scores, Scores | ChampionUnusable | None]:
    """Both models over the same batches, read once."""
    for features, labels in batches:
        slicer.update(features)
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
