"""What Airflow loads of Trainyard: one thin file, so that nothing of the package runs twice."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin
from trainyard.links import LINKS
from trainyard.records_page import PREFIX, LazyApp, make_app


class TrainyardPlugin(AirflowPlugin):
    """Registers the links from tasks to what they made, and the page of records' reports."""

    name = "trainyard"
    operator_extra_links = list(LINKS)  # noqa: RUF012 - Airflow's own form
    fastapi_apps = [  # noqa: RUF012
        {"name": "Trainyard records", "app": LazyApp(make_app), "url_prefix": PREFIX}
    ]
