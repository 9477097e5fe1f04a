"""The reports of datasets, served to people who are logged in to Airflow.

    GET /trainyard/records/NAME/DATASET/report.html

gives report.html of the dataset in records/NAME/DATASET under the storage root, and no other file: both names are
plain, and the file's is fixed. The page runs no script and loads nothing (Content-Security-Policy), whatever a
value of the data may be called. Who may see Airflow's assets may see it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from trainyard.settings import PipelineSettings

__all__ = ["HEADERS", "PREFIX", "REPORT", "LazyApp", "make_app", "report_path", "report_url"]

PREFIX = "/trainyard/records"
REPORT = "report.html"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DATASET = re.compile(r"[0-9a-f]{16}")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "private, no-cache",
}


def report_path(storage: Path, name: str, dataset: str) -> Path | None:
    """A dataset's report, None when there is none or the names are none of a dataset's."""
    if not _NAME.fullmatch(name) or not _DATASET.fullmatch(dataset):
        return None
    path = storage / "records" / name / dataset / REPORT
    # A link could lead anywhere.
    return path if path.is_file() and path.resolve().is_relative_to(storage.resolve()) else None


def report_url(manifest: str | None) -> str:
    """The address of the report beside a manifest, "" when there is none."""
    if not manifest:
        return ""
    from airflow.configuration import conf

    folder = Path(manifest).parent
    storage = PipelineSettings.from_environment().storage
    name, dataset = folder.parent.name, folder.name
    found = report_path(storage, name, dataset)
    if found is None or found.parent != folder:
        return ""
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base}{PREFIX}/{name}/{dataset}/{REPORT}"


def make_app() -> Any:
    """The page as a FastAPI application; Airflow's own login and rights decide who sees it."""
    from airflow.api_fastapi.core_api.security import requires_access_asset
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.responses import HTMLResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get(f"/{{name}}/{{dataset}}/{REPORT}", dependencies=[Depends(requires_access_asset("GET"))])
    def report(name: str, dataset: str) -> HTMLResponse:
        path = report_path(PipelineSettings.from_environment().storage, name, dataset)
        if path is None:
            raise HTTPException(404, "no such report")
        return HTMLResponse(path.read_text(), headers=HEADERS)

    return app


Message = MutableMapping[str, Any]


class LazyApp:
    """An ASGI application that is made on its first request: all of Airflow loads plugins, one process serves."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._app: Any = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Serve one request."""
        if self._app is None:
            self._app = self._make()
        await self._app(scope, receive, send)
