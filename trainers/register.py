"""Register an exported model as a version in MLflow, with its run, metrics, dataset and lineage.

    python -m trainers.register --spec '{"job": FOLDER, "export": FOLDER, "name": "digits",
        "evaluation": FOLDER/evaluation.json, "manifest": URI}'

tells the MLflow of MLFLOW_TRACKING_URI, once however often it is run, and hands back

    {"registered": true, "model_version": 3, "run_id": "...", "url": "http://..."}

MLflow being away stops no release: then it is {"registered": false, "warning": "..."}, within seconds.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainers.exporting.package import MANIFEST, complete
from trainers.job.errors import ConfigError, InvalidSpec
from trainers.job.files import read_json
from trainers.job.termination import run_step
from trainers.records.manifest import Manifest
from trainers.registry.tracking import TrackingUnavailable, connected, tracking_uri
from trainers.registry.versions import Registration

__all__ = ["ExportMissing", "main"]

log = logging.getLogger(__name__)
_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}"
)  # also a folder's, and nothing that ends a query's quotes


class ExportMissing(ConfigError):
    """There is no whole export to register."""

    code = "register.missing_export"


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text for `spec` and the result."""
    known = {"job", "export", "name", "evaluation", "manifest"}
    if set(spec) - known:
        raise InvalidSpec("spec", f"have no fields but {sorted(known)}", sorted(spec))
    for field in ("job", "export", "name"):
        if not isinstance(spec.get(field), str) or not spec[field]:
            raise InvalidSpec(field, "be given", spec.get(field))
    if not _NAME.fullmatch(spec["name"]):
        raise InvalidSpec("name", "be letters, digits, dots, dashes and underscores", spec["name"])
    folder = Path(spec["export"])
    export = complete(folder)
    if export is None:
        raise ExportMissing(
            f"{folder / MANIFEST} is not there, or its files are not as it says", hint="run the export again"
        )
    records = Manifest.load(spec["manifest"]) if spec.get("manifest") else None
    evaluation = read_json(Path(spec["evaluation"])) if spec.get("evaluation") else None
    try:
        return _register(spec, folder, export, evaluation, records)
    except TrackingUnavailable as e:
        log.warning("not registered: %s", e)
        return {"registered": False, "warning": str(e)}


def _register(
    spec: Mapping[str, Any],
    folder: Path,
    export: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None,
    records: Manifest | None,
) -> dict[str, Any]:
    from trainers.runtime.deliver import Undelivered, deliver, run_of
    from trainers.runtime.tracker import Refused, TrackerAway, connect

    uri = tracking_uri()
    job = Path(spec["job"])
    with connected(uri) as client:
        try:
            tracker = connect(uri)
            deliver(job, tracker=tracker)
            run_id = run_of(job, uri, tracker)
        except (Undelivered, TrackerAway, Refused) as e:
            raise TrackingUnavailable(e.message[:300], hint=e.hint) from e
        registration = Registration(spec["name"], job, folder, export, evaluation, records, run_id)
        version = registration.register(client)
    log.info("registered %s as version %s of %s", folder, version.version, spec["name"])
    result = {"registered": True, "model_version": int(version.version), "run_id": run_id}
    if uri.startswith("http"):
        result["url"] = f"{uri}/#/models/{quote(spec['name'])}/versions/{version.version}"
    return result


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(run_step(main))
