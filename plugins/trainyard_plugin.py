"""What Airflow loads of Trainyard: one thin file, so that nothing of the package runs twice."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin
from trainyard import evaluation_page
from trainyard.links import LINKS
from trainyard.monitor_page import PREFIX as MONITORING
from trainyard.monitor_page import make_app as make_monitoring
from trainyard.records_page import PREFIX, LazyApp, make_app


class TrainyardPlugin(AirflowPlugin):
    """Registers the links from tasks to what they made, and the pages of reports."""

    name = "trainyard"
    operator_extra_links = list(LINKS)  # noqa: RUF012 - Airflow's own form
    fastapi_apps = [  # noqa: RUF012
        {"name": "Trainyard records", "app": LazyApp(make_app), "url_prefix": PREFIX},
        {
            "name": "Trainyard evaluations",
            "app": LazyApp(evaluation_page.make_app),
            "url_prefix": evaluation_page.PREFIX,
        },
        {"name": "Trainyard monitoring", "app": LazyApp(make_monitoring), "url_prefix": MONITORING},
    ]
