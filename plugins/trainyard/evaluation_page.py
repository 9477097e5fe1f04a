"""The reports of evaluations, served to people who are logged in to Airflow and may see the runs of the pipeline.

    GET /trainyard/jobs/PIPELINE/RUN/evaluation/report.html

gives the report of the job in jobs/PIPELINE/RUN under the storage root, and no other file: both names are plain, and
the file's is fixed. Like the page of records it runs no script and loads nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainyard.records_page import HEADERS
from trainyard.settings import PipelineSettings

__all__ = ["PREFIX", "make_app", "report_path", "report_url"]

PREFIX = "/trainyard/jobs"
_REPORT = "evaluation/report.html"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,249}")


def report_path(storage: Path, pipeline: str, run: str) -> Path | None:
    """The report of a job's evaluation, None when there is none or the names are none of a job's."""
    if not _NAME.fullmatch(pipeline) or not _NAME.fullmatch(run):
        return None
    path = storage / "jobs" / pipeline / run / _REPORT
    # A link could lead anywhere.
    inside = (storage / "jobs" / pipeline).resolve()
    return path if path.is_file() and path.resolve().is_relative_to(inside) else None


def report_url(report: str | None) -> str:
    """The address of a report that an evaluation wrote, "" when there is none."""
    if not report:
        return ""
    from airflow.configuration import conf

    folder = Path(report).parent.parent
    found = report_path(PipelineSettings.from_environment().storage, folder.parent.name, folder.name)
    if found is None or found != Path(report):
        return ""
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base}{PREFIX}/{folder.parent.name}/{folder.name}/{_REPORT}"


def make_app() -> Any:
    """The page as a FastAPI application; Airflow's own login decides who may see the runs of which pipeline."""
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.core_api.security import requires_access_dag
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.responses import HTMLResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    allowed = Depends(requires_access_dag("GET", DagAccessEntity.RUN))  # of the path's dag_id

    @app.get(f"/{{dag_id}}/{{run}}/{_REPORT}", dependencies=[allowed])
    def report(dag_id: str, run: str) -> HTMLResponse:
        path = report_path(PipelineSettings.from_environment().storage, dag_id, run)
        if path is None:
            raise HTTPException(404, "no such report")
        return HTMLResponse(path.read_text(), headers=HEADERS)

    return app
