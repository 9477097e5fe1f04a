"""The reports of what models were asked, served to people who are logged in to Airflow.

    GET /trainyard/monitoring/NAME/VERSION/WINDOW/report.html

gives that report and no other file, as `trainyard.records_page` does with those of datasets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainyard.records_page import HEADERS, REPORT
from trainyard.settings import PipelineSettings

__all__ = ["PREFIX", "drift_report_path", "drift_report_url", "make_app"]

PREFIX = "/trainyard/monitoring"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_WINDOW = re.compile(r"[0-9a-f]{16}")


def drift_report_path(storage: Path, name: str, version: str, window: str) -> Path | None:
    """A window's report, None when there is none or the names are none of a report's."""
    if not _NAME.fullmatch(name) or not version.isdecimal() or not _WINDOW.fullmatch(window):
        return None
    path = storage / "monitoring" / name / version / "reports" / window / REPORT
    # A link could lead anywhere.
    return path if path.is_file() and path.resolve().is_relative_to(storage.resolve()) else None


def drift_report_url(name: str, version: Any, window: str) -> str:
    """The address of a report, "" when there is none."""
    from airflow.configuration import conf

    storage = PipelineSettings.from_environment().storage
    if drift_report_path(storage, name, str(version), window) is None:
        return ""
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base}{PREFIX}/{name}/{version}/{window}/{REPORT}"


def make_app() -> Any:
    """The page as a FastAPI application; Airflow's own login and rights decide who sees it."""
    from airflow.api_fastapi.core_api.security import requires_access_asset
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.responses import HTMLResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    allowed = [Depends(requires_access_asset("GET"))]

    @app.get(f"/{{name}}/{{version}}/{{window}}/{REPORT}", dependencies=allowed)
    def report(name: str, version: str, window: str) -> HTMLResponse:
        path = drift_report_path(PipelineSettings.from_environment().storage, name, version, window)
        if path is None:
            raise HTTPException(404, "no such report")
        return HTMLResponse(path.read_text(), headers=HEADERS)

    return app
