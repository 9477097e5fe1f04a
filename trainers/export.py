"""Export a trained model for serving: a SavedModel with its golden examples, warm-up requests and manifest.

    python -m trainers.export --spec '{"job": FOLDER, "manifest": URI, "output": FOLDER/export}'

writes into "output" (by default the job's folder "export"), in one rename:

    saved_model.pb, variables/, fingerprint.pb      signatures serving_default and examples
    assets.extra/tf_serving_warmup_requests         what a server plays before a version is AVAILABLE
    golden.json                                     held-out examples and what this SavedModel answers to them
    export.json                                     digests, signatures, records, run, git commit, packages, size,
                                                    seconds to load in a fresh process, and where it comes from

and hands back {"export": FOLDER, "digest": HEX, "bytes": n, "load_s": seconds, "reused": whether it was there}.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.exporting import package
from trainers.exporting.loading import FreshProcess
from trainers.exporting.origin import lineage
from trainers.job.errors import InvalidSpec
from trainers.job.files import write_json
from trainers.job.record import JobRecord
from trainers.job.termination import run_step
from trainers.job.times import note_export
from trainers.lean import import_tensorflow

if TYPE_CHECKING:
    from trainers.records.read import RecordsDataset
    from trainers.runtime.restore import Trained

__all__ = ["export", "main"]

log = logging.getLogger(__name__)


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text for `spec` and the result."""
    known = {"job", "manifest", "output"}
    if set(spec) - known:
        raise InvalidSpec("spec", f"have no fields but {sorted(known)}", sorted(spec))
    for name in known:
        value = spec.get(name)
        if not isinstance(value or "", str) or (name == "job" and not value):
            raise InvalidSpec(name, "be a path", value)
    job = Path(spec["job"])
    target = Path(spec.get("output") or job / "export")
    manifest_uri = spec.get("manifest") or JobRecord.open(job).plan().job.inputs["records"]
    from trainers.records.manifest import Manifest

    began = time.monotonic()
    identity = {"job": str(job), "checkpoint": package.checkpoint_id(job)}
    dataset = Manifest.load(manifest_uri)
    identity["records_digest"] = dataset.digest
    there = package.complete(target)
    if there is not None and identity["checkpoint"] and identity.items() <= there.items():
        log.info("%s holds this model already", target)
        return _result(target, there, reused=True)
    with FreshProcess() as fresh:  # it imports TensorFlow while we do
        import_tensorflow()
        from trainers.records.read import RecordsDataset
        from trainers.runtime.restore import load_trained

        trained = load_trained(job)
        origin = lineage(job, dataset, step=trained.step, checkpoint=identity["checkpoint"])
        facts = {**identity, "lineage": origin}
        manifest = export(trained, RecordsDataset.open(manifest_uri), target, facts=facts, fresh=fresh)
    note_export(job, time.monotonic() - began)
    return _result(target, manifest, reused=False)


def _result(target: Path, manifest: Mapping[str, Any], *, reused: bool) -> dict[str, Any]:
    return {
        "export": str(target),
        "digest": manifest["digest"],
        "bytes": manifest["bytes"],
        "load_s": manifest["load_s"],
        "reused": reused,
    }


def export(
    trained: Trained,
    records: RecordsDataset,
    target: Path,
    *,
    facts: Mapping[str, Any],
    fresh: FreshProcess,
) -> dict[str, Any]:
    """Write the export folder `target`; its manifest, with `facts` in it. `fresh` tries whether it loads."""
    import tensorflow as tf

    from trainers.exporting import golden, saved_model, warmup
    from trainers.runtime.datasets import model_features
    from trainers.task import CLASSIFICATION, Task, call

    code = package.code()
    task = Task.of(trained.module, trained.job.args)
    names = model_features(trained.model, records)
    classes = len(task.classes or range(10)) if task.kind == CLASSIFICATION else None
    chosen = golden.choose(records, names, classes)
    own = task.answers(call(trained.model, {name: tf.constant(v) for name, v in chosen.inputs.items()}))
    with package.staged(target) as folder:
        saved_model.write_saved_model(folder, trained.model, names, task, records)
        loaded = tf.saved_model.load(str(folder))
        outputs = golden.answer(loaded, chosen)
        golden.check_same({k: v.numpy() for k, v in own.items()}, outputs, "the model and its SavedModel")
        write_json(folder / package.GOLDEN, golden.document(chosen, outputs))
        loading = fresh.measure(folder)
        requests = warmup.write_warmup(folder, trained.job.name, chosen)
        manifest = package.describe(
            folder,
            {
                "signatures": saved_model.signatures_of(loaded),
                "run_id": os.environ.get("TRAINYARD_RUN_ID") or Path(str(facts["job"])).name,
                "trainer": trained.job.trainer,
                "step": trained.step,
                "code": code,
                "code_version": code["version"],
                "packages": package.packages(),
                "created": time.time(),
                "classes": task.classes,
                **loading,
                **facts,
            },
        )
    log.info(
        "exported step %s to %s: %.1f MB, loads in %.1f s, %s golden examples, %s warm-up requests",
        trained.step,
        target,
        manifest["bytes"] / 1e6,
        loading["load_s"],
        len(chosen),
        requests,
    )
    return manifest


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(run_step(main))
