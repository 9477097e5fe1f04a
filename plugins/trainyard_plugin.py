"""What Airflow loads of Trainyard: one thin file, so that nothing of the package runs twice."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin
from trainyard.links import LINKS


class TrainyardPlugin(AirflowPlugin):
    """Registers the links from tasks to MLflow."""

    name = "trainyard"
    operator_extra_links = list(LINKS)  # noqa: RUF012 - Airflow's own form
