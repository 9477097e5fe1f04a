"""Airflow is configured by its environment at its first import, so that has to be said before any test's own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]

_home = tempfile.TemporaryDirectory(prefix="trainyard-tests-")  # goes with this process
os.environ["AIRFLOW_HOME"] = _home.name
os.environ.update(
    {
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(REPO / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPO / "plugins"),
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_home.name}/airflow.db",
    }
)
