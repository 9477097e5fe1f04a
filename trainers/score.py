# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Score a dataset or tables with a released version, in one process or in many.

    python -m trainers.score --spec '{"name": "flights", "model": STORAGE/models/flights/7,
        "source": STORAGE/raw/*.parquet, "records": STORAGE/records, "output": STORAGE/scores/flights,
        "columns": ["flight"], "shards": 8}'

does it all. In slices: {"step": "plan", "slices": n, ...} hands back {"plan", "slices"}, {"step": "score", "plan",
"slice": i} scores each, and {"step": "publish", "plan"} publishes. See scoring.plan for the folder that is written; its
manifest.json holds counts, each part's SHA-256 and a digest over all. Parts appear by rename, and one that is there
is not scored again, so any step may be killed and run again. Rows are in the source's order within each part.

Hands back {"manifest", "digest", "rows", "quarantined", "reused", "rows_per_second"}.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainers.job.errors import DataError, InvalidSpec
from trainers.job.files import read_json, sha256_of_file, sync_path, write_json
from trainers.job.termination import run_step
from trainers.lean import import_tensorflow
from trainers.records.manifest import MANIFEST, QUARANTINE
from trainers.records.source import Reject
from trainers.records.validate import Quarantine, check_threshold, merge
from trainers.records.write import temp_path
from trainers.released import Released
from trainers.scoring.plan import PARTS, Options, Plan, make_plan

if TYPE_CHECKING:
    from trainers.scoring.answers import Answerer
    from trainers.scoring.rows import Rows, ScoringSource

__all__ = ["PartsMissing", "main"]

log = logging.getLogger(__name__)

VERSION_COLUMN = "model_version"


class PartsMissing(DataError):
    """Not all parts have been scored, so nothing can be published."""

    code = "score.missing_parts"


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text for `spec` and the result."""
    spec = dict(spec)
    step = spec.pop("step", "all")
    if step == "score":
        return _score(Plan.load(spec["plan"]), int(spec["slice"]), int(spec["slices"]))
    if step == "publish":
        return _publish(Plan.load(spec["plan"]))
    if step not in ("all", "plan"):
        raise InvalidSpec("step", "be plan, score or publish", step)
    slices = spec.pop("slices", 1)
    options = Options.parse(spec)
    plan = make_plan(options)
    there = _published(plan)
    if there is None:
        plan.save()
    if step == "plan":
        return {
            "plan": str(plan.path),
            "slices": 0 if there else min(slices, plan.parts),
            "parts": plan.parts,
        }
    if there is not None:
        return there
    _score(plan, 0, 1)
    return _publish(plan)


def _published(plan: Plan) -> dict[str, Any] | None:
    manifest = read_json(plan.folder / MANIFEST)
    return None if manifest is None else _answer(plan, manifest, reused=True)


def _answer(plan: Plan, manifest: Mapping[str, Any], *, reused: bool) -> dict[str, Any]:
    keys = ("digest", "rows", "quarantined", "rows_per_second")
    return {"manifest": str(plan.folder / MANIFEST), **{key: manifest[key] for key in keys}, "reused": reused}


# ---- scoring


def _score(plan: Plan, slice_: int, slices: int) -> dict[str, Any]:
    """Score every slices-th part that is not there yet; parts never overlap and leave nothing out."""
    todo = [part for part in range(slice_, plan.parts, slices) if not _finished(plan, part)]
    rows = bad = 0
    if todo:
        import_tensorflow()
        from trainers.scoring.answers import Answerer
        from trainers.scoring.rows import open_source

        released = Released.open(plan.options.name, plan.options.model)
        if released.digest != plan.release:
            raise DataError(f"{released.path} is not the version that was planned", hint="plan again")
        source = open_source(plan)
        model = Answerer(released, source.signature)
        for part in todo:
            done = _part(plan, part, source, model, released.version)
            rows, bad = rows + done["rows"], bad + done["bad"]
            log.info(
                "part %s of %s: %s rows, %s refused, %.0f rows/s",
                part + 1,
                plan.parts,
                done["rows"],
                done["bad"],
                done["rows"] / max(done["seconds"], 1e-9),
            )
    return {"slice": slice_, "parts": len(todo), "rows": rows, "bad": bad}


def _finished(plan: Plan, part: int) -> bool:
    proof = read_json(plan.proof(part))
    path = plan.part(part)
    return bool(proof) and path.exists() and path.stat().st_size == proof["bytes"]


def _part(plan: Plan, part: int, source: ScoringSource, model: Answerer, version: int) -> dict[str, Any]:
    """Score one part: the file by rename, and then the proof of it."""
    for left in plan.folder.glob(f".{plan.part(part).name}.*"):
        left.unlink()  # of a run that was killed; nobody else has this part
    path = plan.part(part)
    temp, bad = temp_path(path), Quarantine(temp_path(plan.quarantine(part)))
    began, count = time.monotonic(), 0
    writer: pq.ParquetWriter | None = None
    try:
        for rows in source.read(part):
            table = _scored(plan, rows, model, bad, version)
            if table is None:
                continue
            if writer is None:
                writer = pq.ParquetWriter(temp, table.schema, compression="zstd")
            writer.write_table(table.cast(writer.schema))
            count += table.num_rows
        if writer is None:  # no row at all is a file too: readers find as many as the name says
            pq.write_table(pa.table({VERSION_COLUMN: pa.array([], pa.int64())}), temp)
        else:
            writer.close()
        bad.close()
        if bad.count:
            bad.path.replace(plan.quarantine(part))
        sync_path(temp)
        size, digest = temp.stat().st_size, sha256_of_file(temp)
        temp.replace(path)
    finally:
        if writer is not None:
            writer.close()
        bad.close()
        temp.unlink(missing_ok=True)
        bad.path.unlink(missing_ok=True)
    sync_path(plan.folder)
    proof = {"rows": count, "bad": bad.count, "bytes": size, "sha256": digest}
    proof["seconds"] = round(time.monotonic() - began, 3)
    write_json(plan.proof(part), proof)
    return proof


def _scored(plan: Plan, rows: Rows, model: Answerer, bad: Quarantine, version: int) -> pa.Table | None:
    """Keys, passed columns and answers of the rows that the model takes; the others go to the quarantine."""
    from trainers.scoring.answers import columns_of

    bad.add(rows.rejects)
    if not len(rows):
        return None
    answers, refused = model.ask(rows.inputs, len(rows))
    kept = dict(rows.kept)
    if refused:
        files, numbers = kept["source_file"], kept["source_row"]
        bad.add(Reject(files[i].as_py(), numbers[i].as_py(), "", why) for i, why in sorted(refused.items()))
        mask = pa.array([i not in refused for i in range(len(rows))])
        kept = {name: column.filter(mask) for name, column in kept.items()}
    if not answers:
        return None
    columns = columns_of(answers, plan.options.prefix)
    both = sorted(set(columns) & {*kept, VERSION_COLUMN})
    if both:
        raise InvalidSpec(
            "prefix", f"keep answers apart from the columns {', '.join(both)}", plan.options.prefix
        )
    count = len(kept["source_row"])
    return pa.table({**kept, **columns, VERSION_COLUMN: pa.array([version] * count, pa.int64())})


# ---- publishing


def _publish(plan: Plan) -> dict[str, Any]:
    """Put the quarantines together and write the manifest; TooManyBadRows and PartsMissing publish nothing."""
    there = _published(plan)
    if there is not None:
        return there
    missing = [part for part in range(plan.parts) if not _finished(plan, part)]
    if missing:
        shown = ", ".join(str(part + 1) for part in missing[:10])
        raise PartsMissing(
            f"{len(missing)} of {plan.parts} parts are not scored: {shown}",
            hint="run the tasks that score them again",
        )
    proofs = [read_json(plan.proof(part)) or {} for part in range(plan.parts)]
    rows, bad = (sum(proof[key] for proof in proofs) for key in ("rows", "bad"))
    quarantine = plan.folder / QUARANTINE
    if bad:
        temp = temp_path(quarantine)
        merge([plan.quarantine(part) for part, proof in enumerate(proofs) if proof["bad"]], temp)
        temp.replace(quarantine)
    check_threshold(quarantine, bad, rows + bad, plan.options.quarantine_threshold)
    released = Released.open(plan.options.name, plan.options.model)
    parts = [
        {"file": plan.part(part).name, **{key: proof[key] for key in ("rows", "bytes", "sha256")}}
        for part, proof in enumerate(proofs)
    ]
    seconds = sum(proof["seconds"] for proof in proofs)
    manifest = {
        "version": 1,
        "model": {"name": released.name, "version": released.version, "digest": released.digest},
        "source": plan.options.source,
        "fingerprint": plan.fingerprint,
        "columns": list(plan.options.columns),
        "parts": parts,
        "digest": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
        "rows": rows,
        "quarantined": bad,
        "seconds": round(seconds, 3),
        "rows_per_second": round(rows / seconds, 1) if seconds else None,
        "created": time.time(),
    }
    write_json(plan.folder / MANIFEST, manifest)
    shutil.rmtree(plan.folder / PARTS, ignore_errors=True)
    log.info("%s rows scored by version %s, %s refused, in %s", rows, released.version, bad, plan.folder)
    return _answer(plan, manifest, reused=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(run_step(main))
