"""Where an export comes from, as values that outlive the folders they speak of: raw data, records, job, MLflow's run.

Kept in export.json, and by the release store for every version: digests say what it was, paths where it was then.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trainers.job.errors import TrainyardError
from trainers.job.files import read_json
from trainers.job.record import JobRecord
from trainers.records.manifest import Manifest
from trainers.runtime.tracking import RUN

__all__ = ["lineage"]


def lineage(job: Path, records: Manifest, *, step: int | None, checkpoint: str) -> dict[str, Any]:
    """{"records", "job", "mlflow"} of an export of the job in `job`."""
    run = read_json(job / RUN)
    return {
        "records": _records(records),
        "job": _job(job, step, checkpoint),
        "mlflow": run and {key: run.get(key, "") for key in ("run_id", "experiment_id", "url")},
    }


def _records(manifest: Manifest) -> dict[str, Any]:
    found = _dataset(manifest)
    if manifest.spans:
        found["spans"] = []
        for span in manifest.spans:
            part: dict[str, Any] = {"span": span.span, "digest": span.digest}
            with contextlib.suppress(TrainyardError):  # removed since: its digest is known
                part = {**part, **_dataset(Manifest.load(manifest.folder.parent / span.folder))}
            found["spans"].append(part)
    return found


def _dataset(manifest: Manifest) -> dict[str, Any]:
    raw = dict(manifest.raw) or [{"uri": source} for source in manifest.sources]
    return {
        "name": manifest.name,
        "digest": manifest.digest,
        "fingerprint": manifest.fingerprint,
        "manifest": str(manifest.path),
        "span": manifest.span,
        "counts": dict(manifest.counts),
        "created": manifest.created,
        "code_version": manifest.code_version,
        "raw": raw if isinstance(raw, list) else [raw],
    }


def _job(folder: Path, step: int | None, checkpoint: str) -> dict[str, Any]:
    record = JobRecord.open(folder)
    job, outcome = record.plan().job, record.outcome()
    return {
        "folder": str(folder),
        "name": f"{folder.parent.name}/{folder.name}",
        "trainer": job.trainer,
        "strategy": job.strategy.kind.value,
        "args": dict(job.args),
        "step": step,
        "checkpoint": checkpoint,
        "began": record.began,
        "ended": outcome.at if outcome else None,
        "warm_start": job.warm_start,
    }
